"""The dispatcher: the leader's part that admits New transfers and the next attempts of interrupted ones.

Wires what one term of leadership needs, from the first full read to the loss of the ledger, and runs
pass after pass (`nodeagent.leader.admission.admission_pass`) as transfers and agents change.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, TypeVar

from core.aio import run_apart, wait_for_event
from core.clock import Backoff
from core.errors import AgentError
from core.logs import fields
from core.models.base import JsonDict
from core.models.phases import HOLDING_PHASES, Phase, in_order
from core.models.storage import RepositoryKey
from core.models.transfers import Transfer
from nodeagent.leader.admission.admission_pass import PAUSE_SECONDS, AdmissionPass, settle_entries
from nodeagent.leader.admission.examiner import Examiner
from nodeagent.leader.admission.pending_records import PendingTransfers, PodWatch
from nodeagent.leader.admission.quota import AdmissionLedger, LedgerLostError, Reservations
from nodeagent.leader.admission.writer import AdmissionWriter, QueueView
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.election import NotLeaderError
from nodeagent.leader.index import Entry, TransferIndex
from nodeagent.leader.live_agents import LiveAgents, compare_configs
from nodeagent.leader.recovery.garbage_collector import GarbageCollector
from nodeagent.leader.recovery.orphaned_transfers import OrphanRecovery
from nodeagent.leader.volumes.states import HistoryKeeper
from nodeagent.leader.volumes.view import VolumeView
from nodeagent.metrics import NODE_PASSED_OVER
from nodeagent.runtime.own_pod import OwnPod
from nodeagent.runtime.workqueue import describe_causes

_log = logging.getLogger(__name__)

_UIDS_PER_SECOND: Final = 20_000
"""A large ledger is a large write: the pause grows with it, so that more changes share one."""

_RETRY_SECONDS: Final = 2.0
"""Before everything is read again after the ledger was lost or a first list failed."""

_RETRY: Final = Backoff(2.0, 60.0)
"""After a step of the dispatcher that failed, such as a ledger that could not be written."""

_R = TypeVar("_R")


@dataclass(eq=False)
class Dispatcher:
    """The leader's work in `cluster` on transfers by `rules`, to be run while the Lease is held.

    `on_accepted` is called once with each transfer that was accepted. `own_pod` is where it is reported that the
    configurations of the agents differ; None: they are not compared.
    """

    cluster: Cluster
    rules: DispatchRules
    _: KW_ONLY
    on_accepted: Callable[[Transfer], None]
    own_pod: OwnPod | None = None
    _term: "_Term | None" = field(default=None, init=False)

    def finished_backups(self, key: RepositoryKey) -> AbstractSet[str] | None:
        """Return the UIDs of the backups in the repository that have a final phase; None before all were listed."""
        return self._term.index.finished_backups(key) if self._term is not None else None

    async def run(self) -> None:
        """Dispatch until canceled; once another leader has written the ledger, everything is read again, by quorum."""
        try:
            while True:
                self._term = term = _Term(self.cluster, self.rules, self.on_accepted)
                try:
                    await run_apart(partial(term.run, self.own_pod), name="dispatching")
                except* AgentError as group:
                    _log.warning("dispatching failed, will retry: %s", describe_causes(group))
                await self.cluster.clock.sleep(_RETRY_SECONDS)
        finally:
            self._term = None
            self.cluster.metrics.show(NODE_PASSED_OVER, {})

    def request_pass(self) -> None:
        """Begin a pass soon: what it depends on has changed."""
        if self._term is not None:
            self._term.changed.set()

    def report(self) -> JsonDict:
        """Return the queue for the status page; empty while this agent is not the leader."""
        return self._term.report() if self._term is not None else {}


class _Term:
    """One term of dispatching, from a full read to the loss of the ledger; with `changed` set, a pass begins soon."""

    def __init__(self, cluster: Cluster, rules: DispatchRules, on_accepted: Callable[[Transfer], None]) -> None:
        self._cluster = cluster
        self._rules = rules
        self.changed = asyncio.Event()
        self._last_error = ""
        client, clock = cluster.client, cluster.clock
        self._ledger = AdmissionLedger(client, rules.namespace, check_leading=cluster.check_leading)
        self.index = TransferIndex(
            client, clock, namespace=rules.namespace, kinds=rules.kinds, on_change=self._on_change
        )
        self._agents = LiveAgents(client, clock, namespace=rules.namespace, on_change=self.changed.set)
        self._pods = PodWatch(client, clock, on_change=self.changed.set)
        self._pending = PendingTransfers(clock, self._pods)
        examiner = Examiner(cluster, rules, self._agents)
        writer = AdmissionWriter(cluster, self._pending, self._agents, on_accepted=on_accepted)
        self._pass = AdmissionPass(
            rules, self._ledger, self._agents, examiner=examiner, pending=self._pending, writer=writer
        )
        kinds = [kind.spec.name for kind in rules.kinds]
        self._view = QueueView(cluster.metrics, clock, kinds, entries=self.index.entries, order=self._queue)
        self._volumes = VolumeView(cluster, rules, entries=self.index.entries)
        self._history = HistoryKeeper(cluster, rules.namespace, entries=self.index.entries)
        self._orphans = OrphanRecovery(cluster, rules, self.index, agents=self._agents)
        self._garbage = GarbageCollector(cluster, rules, transfers=self.index.entries)

    async def run(self, own_pod: OwnPod | None) -> None:
        """Dispatch until canceled, or until the ledger is lost; ExceptionGroup, of AgentErrors: read all again."""
        async with asyncio.TaskGroup() as group:
            # The ledger comes first: whatever it names existed before the transfers are listed.
            await self._ledger.load()
            group.create_task(self.index.run(), name="transfer index")
            group.create_task(self._agents.informer.run(), name="live agents")
            await self.index.wait_synced()
            await self._agents.informer.synced.wait()
            # This write stops the leader before.
            await self._repeat(self._settle)
            group.create_task(self._orphans.run(), name="orphan recovery")
            group.create_task(self._garbage.run(), name="garbage collection")
            if own_pod is not None:
                comparing = compare_configs(self._cluster.clock, own_pod, self._agents.configs)
                group.create_task(comparing, name="agreement of configurations")
            group.create_task(self._pods.run(), name="workload pods")
            group.create_task(self._view.run(), name="queue metrics")
            group.create_task(self._volumes.run(), name="volume metrics")
            group.create_task(self._history.run(), name="history of backups")
            while True:
                pause_seconds = await self._repeat(self._run_pass)
                if pause_seconds <= 0:
                    continue
                await wait_for_event(self.changed, pause_seconds)
                await self._cluster.clock.sleep(PAUSE_SECONDS + len(self._ledger.reservations.uids) / _UIDS_PER_SECOND)

    async def _settle(self) -> None:
        settled = settle_entries(self._ledger, self.index.entries())
        await self._ledger.write(Reservations(settled, self._ledger.reservations.last_namespace))

    async def _run_pass(self) -> float:
        """Run one pass; return the pause until the next one in seconds."""
        self.changed.clear()
        self._cluster.check_leading()
        entries = self.index.entries()
        await self._back_off(entries)
        return await self._pass.run(entries)

    async def _repeat(self, step: Callable[[], Awaitable[_R]]) -> _R:
        """Return what `step` returns; repeat it if it fails, such as where the write of the ledger is rejected.

        To read everything again would help nothing, and forget how long transfers are pending and what nodes failed.

        Raises:
            LedgerLostError: another leader wrote the ledger.
            NotLeaderError: this agent is not the leader any more.
        """
        failures = 0
        while True:
            try:
                result = await step()
            except (LedgerLostError, NotLeaderError):
                raise
            except AgentError as e:
                failures += 1
                self._last_error = str(e)
                _log.warning("admission failed, will retry: %s", e)
                await self._cluster.clock.sleep(_RETRY.seconds_after(failures))
            else:
                self._last_error = ""
                return result

    def report(self) -> JsonDict:
        """Return the queue's figures."""
        return {
            "prepareQueueLength": self._rules.queue_length,
            "lastError": self._last_error,
            "reservations": len(self._ledger.reservations.uids),
            "agents": sorted(self._agents.nodes().values()),
            "passedOver": self._agents.backoff.report(self._agents.nodes()),
            **self._view.report(),
            "orphans": self._orphans.report(),
            "leakedObjects": self._garbage.report(),
        }

    async def _back_off(self, entries: Sequence[Entry]) -> None:
        """Show the nodes that are passed over; report each new one on its agent's pod."""
        backoff, nodes = self._agents.backoff, self._agents.nodes()
        backoff.retain(entries, nodes.keys())
        self._cluster.metrics.show(NODE_PASSED_OVER, {(label,): 1 for label in backoff.labels()})
        for label, message in backoff.take_news():
            _log.warning("%s", message, extra=fields(node=nodes.get(label, label)))
            if (pod := self._agents.pod(label)) is not None:
                await self._cluster.events.record_warning(pod, "NodePassedOver", message)

    def _queue(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """Return the transfers that are pending for the queue alone, in order."""
        reservations = self._ledger.reservations
        queued = (
            entry
            for entry in entries
            if entry.managed
            and entry.phase is Phase.NEW
            and not (entry.stop or entry.uid in reservations.uids)
            # The last check found no reason other than the queue.
            and not self._pending.reports.get(entry.uid).current.message
        )
        return in_order(queued, after=reservations.last_namespace, first=self._rules.first)

    def _on_change(self, entry: Entry) -> None:
        """Begin a pass if the change can matter to one."""
        self._view.notify()
        self._volumes.observe(entry)
        self._history.observe(entry)
        self._agents.backoff.observe(entry)
        if entry.phase is Phase.NEW:
            if entry.stop:
                # However long it was postponed.
                self._pending.wake([entry.uid])
            known = self._pending.get(entry.uid).queued or not self._pending.is_due(entry.uid)
            matters = entry.stop or not known
        else:
            holds = entry.admission_phase in HOLDING_PHASES
            reserved = entry.uid in self._ledger.reservations.uids
            ready = entry.admission_phase is Phase.NEW
            matters = ready or holds != reserved or self._pending.get(entry.uid).unanswered is not None
        if matters:
            self.changed.set()
