"""Admits waiting loads: who is next, whether there is a place, who does it.

Knows the pass: look at what waits, reserve places in the ledger by one write, then accept.
Does not know what a load waits for (`nodeagent.leader.admission.examiner`), the order
(`nodeagent.leader.admission.queue`),
how a load is accepted (`nodeagent.leader.admission.writer`) or who leads (`nodeagent.leader.election`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from core.aio import run_apart, wait_for_event
from core.errors import AgentError
from core.models.base import JsonDict
from core.models.phases import HOLDING_PHASES, Phase
from core.models.transfers import Transfer
from nodeagent.leader.admission.examiner import Examiner, Look
from nodeagent.leader.admission.ledger import AdmissionLedger, Reservations, free_quota, settle
from nodeagent.leader.admission.queue import HeldBack, QueueView, in_order
from nodeagent.leader.admission.writer import Acceptance
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.leader.index import Entry, TransferIndex
from nodeagent.leader.live_agents import ConfigAgreement, LiveAgents, count_accepted
from nodeagent.leader.recovery.garbage_collector import GarbageCollector
from nodeagent.leader.recovery.orphans import OrphanRecovery
from nodeagent.runtime.tasks import attempt, describe_causes, work_in_parallel

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)

_LOOKS_A_PASS: Final = 500
"""So that a pass takes seconds at most, and whoever comes meanwhile is not far behind; and so that
few passes go over all that waits, and write the whole ledger, where thousands may start."""

_TOLD_A_PASS: Final = 50
"""Loads that have to wait for a place are looked at a few at a time: those with a place come first."""

_LOOKS_AT_A_TIME: Final = 16
_PAUSE_SECONDS: Final = 0.1
"""Between passes: changes that come together share a pass, and its ledger write."""

_BUSY_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 60.0
"""The longest pause between passes, while something waits and while nothing does."""

_RETAKE_SECONDS: Final = 2.0
"""Before everything is read again after the ledger was lost or the API server failed."""


class Dispatcher:
    """The leader's work on loads: to be run while the Lease is held."""

    def __init__(
        self,
        tools: DispatchTools,
        rules: DispatchRules,
        *,
        on_accepted: Callable[[Transfer], None],
        agreement: ConfigAgreement | None = None,
    ) -> None:
        """Work with `tools` by `rules`; `on_accepted` is called with each load that was accepted.

        `agreement` compares the configurations of the agents, where anybody wants that.
        """
        self._tools = tools
        self._rules = rules
        self._on_accepted = on_accepted
        self._agreement = agreement
        self._term: _Term | None = None

    async def run(self) -> None:
        """Dispatch until canceled.

        Whenever the ledger turns out to be another's, everything is read anew, by quorum.
        """
        try:
            while True:
                self._term = term = _Term(self._tools, self._rules, self._on_accepted)
                try:
                    await run_apart(partial(term.run, self._agreement), name="dispatching")
                except* AgentError as group:
                    _log.warning("dispatching begins anew: %s", describe_causes(group))
                await self._tools.clock.sleep(_RETAKE_SECONDS)
        finally:
            self._term = None

    def look(self) -> None:
        """Look at the queue now: what decides about it has changed."""
        if self._term is not None:
            self._term.look()

    def report(self) -> JsonDict:
        """Return the queue for the status page; empty while this agent does not lead."""
        return self._term.report() if self._term is not None else {}


class _Term:
    """One stretch of dispatching, from a full read to the loss of the ledger."""

    def __init__(self, tools: DispatchTools, rules: DispatchRules, on_accepted: Callable[[Transfer], None]) -> None:
        self._tools = tools
        self._rules = rules
        self._changed = asyncio.Event()
        self._ledger = AdmissionLedger(tools.client, rules.namespace, check_leading=tools.check_leading)
        self._index = TransferIndex(
            tools.client, tools.clock, namespace=rules.namespace, kinds=rules.kinds, on_change=self._on_change
        )
        self._agents = LiveAgents(tools.client, tools.clock, namespace=rules.namespace, on_change=self._changed.set)
        self._examiner = Examiner(tools, rules, agents=self._agents.nodes, on_due=self._changed.set)
        self._held_back = HeldBack(self._examiner, tools.clock, self._examine)
        self._acceptance = Acceptance(tools, self._agents.nodes, on_accepted=on_accepted)
        kinds = [kind.name for kind in rules.kinds]
        self._view = QueueView(tools.metrics, tools.clock, kinds, entries=self._index.entries, order=self._line)
        self._orphans = OrphanRecovery(tools, rules, self._index, agents=self._agents)
        self._sweeper = GarbageCollector(
            tools.client,
            tools.clock,
            namespace=rules.namespace,
            transfers=self._index.entries,
            check_leading=tools.check_leading,
        )

    async def run(self, agreement: ConfigAgreement | None) -> None:
        """Dispatch until canceled, or until the ledger is lost.

        Raises:
            ExceptionGroup: of AgentErrors: read everything anew.
        """
        async with asyncio.TaskGroup() as group:
            # The ledger comes first: whatever it names existed before the loads are listed.
            await self._ledger.load()
            group.create_task(self._index.run(), name="load index")
            group.create_task(self._agents.run(), name="live agents")
            await self._index.wait_synced()
            await self._agents.wait_synced()
            # This write stops whoever led before.
            places = self._ledger.places
            await self._ledger.write(Reservations(self._settle(self._index.entries()), places.turn))
            group.create_task(self._orphans.run(), name="orphans")
            group.create_task(self._sweeper.run(), name="sweeper")
            if agreement is not None:
                group.create_task(agreement.run(self._agents.configs), name="agreement of configurations")
            group.create_task(self._examiner.run(), name="what loads wait for")
            group.create_task(self._view.run(), name="queue metrics")
            while True:
                self._changed.clear()
                pause_seconds = await self._pass()
                if pause_seconds <= 0:
                    continue
                await wait_for_event(self._changed, pause_seconds)
                # A large ledger is a large write: then more changes share one.
                await self._tools.clock.sleep(_PAUSE_SECONDS + len(self._ledger.places.uids) / 20_000)

    def look(self) -> None:
        """Begin a pass soon."""
        self._changed.set()

    def report(self) -> JsonDict:
        """Return the queue's figures."""
        return {
            "prepareQueueLength": self._rules.queue_length,
            "placesTaken": len(self._ledger.places.uids),
            "agents": sorted(self._agents.nodes().values()),
            **self._view.report(),
            "ownerless": self._orphans.report(),
            "leftovers": self._sweeper.report(),
        }

    def _line(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """Return those that wait for a place and for nothing else, in order."""
        places = self._ledger.places
        line = (entry for entry in entries if _waits(entry) and entry.uid not in places.uids)
        placeless = (entry for entry in line if not self._examiner.waits(entry.uid))
        return in_order(placeless, after=places.turn, first=self._rules.first)

    def _on_change(self, entry: Entry) -> None:
        """Ask for a pass if the change can matter to one."""
        self._view.note()
        if entry.phase is Phase.NEW:
            if entry.stop:
                # However long it was put off for.
                self._examiner.wake(entry.uid)
            known = entry.uid in self._held_back or not self._examiner.is_due(entry.uid)
            matters = entry.stop or not known
        else:
            holds = entry.phase in HOLDING_PHASES
            matters = holds != (entry.uid in self._ledger.places.uids) or self._acceptance.awaits(entry.uid)
        if matters:
            self._changed.set()

    def _settle(self, entries: Iterable[Entry]) -> frozenset[str]:
        """Return who has a place by what is seen now."""
        seen = {entry.uid: entry.phase for entry in entries if entry.managed or entry.phase is Phase.NEW}
        return settle(self._ledger.places.uids, seen)

    async def _pass(self) -> float:
        """Admit whoever may be admitted; return after how many seconds to look again at the latest.

        0.0: there is more to do, and nothing is gained by a pause.
        """
        self._tools.check_leading()
        entries = self._index.entries()
        await self._acceptance.find_out(entries)
        waiting = [entry for entry in entries if entry.managed and entry.phase is Phase.NEW]
        uids = {entry.uid for entry in waiting}
        self._examiner.retain(uids)
        self._examiner.begin_pass(entries)
        self._held_back.retain(uids)
        await self._examine([e for e in waiting if e.stop and self._examiner.is_due(e.uid)])
        waiting = [entry for entry in waiting if not entry.stop]
        places = self._settle(entries)
        reserved, places = await self._examine_reserved(waiting, places)
        line = [entry for entry in waiting if entry.uid not in places]
        picks, left = await self._pick(line, free_quota(places, self._rules.queue_length))
        if picks or reserved or places != self._ledger.places.uids:
            turn = picks[-1].entry.queue if picks else self._ledger.places.turn
            await self._ledger.write(Reservations(places | {look.entry.uid for look in picks}, turn))
            looks = [*reserved, *picks]
            for look in looks:
                self._examiner.put_off(look.entry.uid)
            await self._acceptance.accept(looks, count_accepted(entries))
        picked = {look.entry.uid for look in picks}
        limit, most = self._rules.queue_length, min(left, _TOLD_A_PASS)
        behind = [entry for entry in line if entry.uid not in picked]
        if limit is not None and self._held_back.has_news(behind):
            left = most - await self._held_back.tell(self._in_order(behind), limit=limit, most=most)
        if left <= 0:
            return 0.0
        latest_seconds = _BUSY_SECONDS if waiting else _IDLE_SECONDS
        return max(_PAUSE_SECONDS, min(latest_seconds, self._examiner.seconds_to_next()))

    async def _examine_reserved(
        self, waiting: Iterable[Entry], places: frozenset[str]
    ) -> tuple[list[Look], frozenset[str]]:
        """Return who of those with a place may start now, and the places without who may not."""
        due = self._in_order(entry for entry in waiting if entry.uid in places)
        looks = await self._examine(list(due))
        released = set()
        for look in looks:
            if not look.ready and await attempt(look.entry.log_fields, self._fence(look)):
                released.add(look.entry.uid)
        return [look for look in looks if look.ready], places - released

    async def _fence(self, look: Look) -> bool:
        await self._examiner.fence(look)
        return True

    async def _pick(self, line: Sequence[Entry], free: int) -> tuple[list[Look], int]:
        """Return the next ones in line that may start, `free` at most, and how many looks are left."""
        left = _LOOKS_A_PASS
        ready: dict[str, Look] = {}
        while free > 0:
            turn = list(islice(self._in_order(line), free))
            fresh = [entry for entry in turn if entry.uid not in ready][:left]
            if not fresh:
                # All of them are ready, or the looks of this pass are used up.
                return _head([ready.get(entry.uid) for entry in turn]), left
            left -= len(fresh)
            ready |= {look.entry.uid: look for look in await self._examine(fresh) if look.ready}
        return [], left

    def _in_order(self, line: Iterable[Entry]) -> Iterable[Entry]:
        due = (entry for entry in line if self._examiner.is_due(entry.uid))
        return in_order(due, after=self._ledger.places.turn, first=self._rules.first)

    async def _examine(self, entries: Sequence[Entry]) -> list[Look]:
        """Look at some loads, several at a time; return those that can be spoken about, in order."""

        async def look_at(entry: Entry) -> Look | None:
            return await attempt(entry.log_fields, self._examiner.examine(entry))

        looks = await work_in_parallel(entries, look_at, at_a_time=_LOOKS_AT_A_TIME, name="look at a load")
        found = [look for look in looks if look is not None]
        self._held_back.forget(look.entry.uid for look in found if not look.ready)
        return found


def _waits(entry: Entry) -> bool:
    """Whether the load is ours to admit."""
    return entry.managed and entry.phase is Phase.NEW and not entry.stop


def _head(looks: Iterable[Look | None]) -> list[Look]:
    """Return what comes before the first gap: nobody is admitted before somebody ahead was looked at."""
    head = []
    for look in looks:
        if look is None:
            break
        head.append(look)
    return head
