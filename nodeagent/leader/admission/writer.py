"""All writes to New and interrupted transfers, each one patch by the leader alone, and how the queue is shown."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.errors import ConflictError, ForbiddenError, InvalidError
from core.models import names
from core.models.base import JsonDict
from core.models.phases import AttemptStage, Phase
from core.models.reasons import LOCATION_UNAVAILABLE, PendingReason
from core.models.transfers import Transfer
from exposer.model import Pending
from nodeagent.leader.admission.examiner import Checked
from nodeagent.leader.admission.pending_records import PendingTransfers
from nodeagent.leader.context import Cluster
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import LiveAgents, choose_node
from nodeagent.metrics import PENDING, QUEUE_LENGTH, QUEUE_POSITION, QUEUE_SECONDS, Metrics
from nodeagent.runtime.workqueue import attempt
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.status import Change, record_end, without_marks

_ACCEPT_SECONDS: Final = 10.0
"""For one accept: transfers are accepted in order, so those behind it wait for it."""

_EVENTS_AT_A_TIME: Final = 8
"""Fewer than the client sends at a time (`nodeagent.runtime.api_server`): an accept never waits for all of them."""


@dataclass(eq=False)
class AdmissionWriter:
    """Accepts, ends, reports and fences New transfers; resumes, reports and fences interrupted ones.

    It writes through `cluster`; `on_accepted` gets each accepted transfer once, also if that is found out later.
    """

    cluster: Cluster
    pending: PendingTransfers
    agents: LiveAgents
    _: KW_ONLY
    on_accepted: Callable[[Transfer], None]
    _events: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_EVENTS_AT_A_TIME), init=False)

    async def accept(self, ready: Sequence[Checked], idle: Counter[str]) -> None:
        """Accept transfers one after the other, in order; one that fails keeps its reservation.

        Each of `ready` has a reservation, and was read before that was written. `idle` is the number of transfers that
        no mover works on, by node label; it is increased here.
        """
        async with asyncio.TaskGroup() as events:
            for checked in ready:
                agents = self.agents.nodes(checked.cr.required_feature or checked.admission.datamover)
                node = checked.admission.node
                label = names.label_value(node) if node else choose_node(agents, idle, self.agents.backoff.labels())
                if label is None or label not in agents:
                    continue
                stored = await attempt(checked.entry.log_fields, self._accept(checked, agents[label]))
                if stored is not None:
                    idle[label] += 1
                    self.on_accepted(stored)
                    # The next one is accepted meanwhile.
                    events.create_task(self._record_accepted(checked, stored, agents[label]), name="accepted")

    async def resume(self, ready: Sequence[Checked]) -> None:
        """Begin the next attempts of interrupted transfers as `accept` does; one that fails keeps its reservation."""
        for checked in ready:
            if await attempt(checked.entry.log_fields, self._resume(checked)) is not None:
                await self._record_resumed(checked)

    async def resolve_accepts(self, entries: Iterable[Entry]) -> None:
        """Announce what was accepted or resumed although no answer came, as `entries` show."""
        unanswered = self.pending.unanswered()
        if not unanswered:
            return
        found = {entry.uid: entry for entry in entries if entry.uid in unanswered}
        async with asyncio.TaskGroup() as events:
            for uid, checked in unanswered.items():
                if uid in found and found[uid].admission_phase is Phase.NEW:
                    continue
                self.pending.end_accept(uid)
                if uid not in found or found[uid].phase.final:
                    continue
                # Where another leader did it, the same Event is recorded twice, which harms nothing.
                if checked.cr.phase is Phase.IN_PROGRESS:
                    events.create_task(self._record_resumed(checked), name="resumed")
                else:
                    self.on_accepted(checked.cr)
                    recorded = self._record_accepted(checked, checked.cr, found[uid].node_label)
                    events.create_task(recorded, name="accepted")

    async def end(self, checked: Checked, phase: Phase, message: str) -> None:
        """Move a New transfer to a final phase; recovery cleans up: its source snapshot was created for it alone."""
        kind, cr = checked.kind, checked.cr
        self.cluster.check_leading()
        if cr.deleting and kind.spec.finalizer not in cr.metadata.finalizers:
            # It can no longer get our finalizer, and is held by another: once it is final, recovery never sees it.
            await kind.clean_up(cr)
        change = Change(status={"message": message}, finalizers=_finalizers(kind, cr))
        stored = await self.cluster.status.move(kind, cr, phase, change)
        await record_end(kind, stored, metrics=self.cluster.metrics, events=self.cluster.events)

    async def report(self, checked: Checked, pending: Pending) -> None:
        """Write why a transfer is pending, if that is to be reported now."""
        cr = checked.cr
        report = self.pending.decide_report(cr.uid, pending)
        if not report.message:
            return
        # After a change of the leader the status may have it already.
        if (cr.status.message, cr.pending_reason) != (pending.message, pending.reason):
            stored = await self._write_reason(checked, pending)
            # A full node is reported by the status alone, as the queue is.
            if report.event and cr.status.message != pending.message and pending.reason != PendingReason.NODE_BUSY:
                await self.cluster.events.record(stored, pending.reason, pending.message, warning=pending.blocked)
        self.pending.reports.mark_reported(cr.uid, pending)

    async def report_queued(self, checked: Checked, *, limit: int, position: int) -> None:
        """Write that a transfer is pending for the queue alone, at `position`; `limit` is `prepareQueueLength`."""
        message = f"queued at position {position}: prepareQueueLength ({limit}) reached"
        await self._write_reason(checked, Pending(PendingReason.QUEUED, message))
        self.pending.mark_queued(checked.entry.uid)
        self.pending.wake([checked.entry.uid])

    async def report_waiting(self, checked: Checked, pending: Pending) -> None:
        """Write what the next attempt of an interrupted transfer waits for, and what interrupted the last one."""
        cr, attempts = checked.cr, checked.cr.attempts
        message = f"{attempts.explain_last()}; attempt {attempts.number} {pending.message}"
        if (cr.status.message, cr.pending_reason) != (message, pending.reason):
            stored = await self._write_reason(checked, Pending(pending.reason, message))
            if cr.pending_reason != pending.reason:
                await self.cluster.events.record(stored, pending.reason, message)
        self.pending.reports.mark_reported(cr.uid, pending)

    async def fence(self, checked: Checked) -> Transfer:
        """Write to a transfer, so that an accept or resume under way conflicts; AgentError: keep its reservation."""
        self.cluster.check_leading()
        change = Change(annotations={names.ACCEPT_FENCE_ANNOTATION: uuid.uuid4().hex})
        return await self.cluster.status.annotate(checked.kind, checked.cr, change)

    async def _accept(self, checked: Checked, node: str) -> Transfer:
        """Accept one transfer by the version that was read before its reservation was written."""
        self.cluster.check_leading()
        kind, cr = checked.kind, checked.cr
        change = Change(
            status={"acceptedByNode": node},
            labels={names.NODE_LABEL: names.label_value(node)},
            # The fence, and what a copy of another transfer's manifest brought along.
            annotations=without_marks(cr) | _marks(checked),
            finalizers=_finalizers(kind, cr),
            spec={"datamover": checked.admission.datamover} if checked.admission.datamover else {},
        )
        stored = await self._answered(checked, self.cluster.status.move(kind, cr, Phase.ACCEPTED, change, again=False))
        self.cluster.metrics.observe(QUEUE_SECONDS, cr.age_seconds(self.cluster.now()), kind.spec.name)
        return stored

    async def _report_rejected(self, checked: Checked, message: str) -> None:
        try:
            await self.report(checked, Pending(PendingReason.REJECTED, message, blocked=True))
        except AgentError:
            # What rejects the other write mostly rejects this one too.
            if self.pending.get(checked.cr.uid).rejections == 1:
                await self.cluster.events.record(checked.cr, PendingReason.REJECTED, message, warning=True)

    async def _resume(self, checked: Checked) -> Transfer:
        """Begin the next attempt of one transfer by the version that was read before its reservation was written."""
        self.cluster.check_leading()
        attempts = checked.cr.attempts.move(AttemptStage.EXPOSING)
        marks = {names.ATTEMPTS_ANNOTATION: attempts.to_json()}
        change = Change({"message": None}, {names.NODE_LABEL: checked.entry.node_label}, marks)
        return await self._answered(checked, self.cluster.status.annotate(checked.kind, checked.cr, change))

    async def _answered(self, checked: Checked, write: Awaitable[Transfer]) -> Transfer:
        """Return what `write` stored; without an answer it counts as under way until the transfer shows it."""
        uid = checked.entry.uid
        self.pending.begin_accept(uid, checked)
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                stored = await write
        except ConflictError as e:
            if not e.may_be_own:
                # That is an answer: nothing was written.
                self.pending.end_accept(uid)
            raise
        except (ForbiddenError, InvalidError) as e:
            # That is an answer too.
            self.pending.end_accept(uid)
            self.pending.postpone_rejected(uid)
            await self._report_rejected(checked, str(e))
            raise
        self.pending.end_accept(uid)
        return stored

    async def _write_reason(self, checked: Checked, pending: Pending) -> Transfer:
        """Write a reason and our finalizer; return the transfer as stored.

        Without the finalizer a pending transfer that is deleted leaves its source snapshot behind.
        It costs no write of its own, and a transfer that is never pending gets it by its accept.
        """
        self.cluster.check_leading()
        finalizers = _finalizers(checked.kind, checked.cr)
        change = Change({"message": pending.message}, finalizers=finalizers, reason=pending.reason)
        return await self.cluster.status.annotate(checked.kind, checked.cr, change)

    async def _record_accepted(self, checked: Checked, cr: Transfer, node: str) -> None:
        async with self._events:
            await self.cluster.events.record(cr, "Accepted", f"assigned to the node agent on node {node}")
            if warning := checked.admission.warning:
                await self.cluster.events.record(cr, LOCATION_UNAVAILABLE, warning, warning=True)

    async def _record_resumed(self, checked: Checked) -> None:
        async with self._events:
            message = f"the node agent on node {checked.admission.node} prepares attempt {checked.cr.attempts.number}"
            await self.cluster.events.record(checked.cr, "Resumed", message)


def _marks(checked: Checked) -> dict[str, str | None]:
    """Return the annotations with what holds for the transfer whatever the configuration is later.

    By one of them, cleanup finds the copies; by the other, a data mover is only preferred.
    """
    found: dict[str, str | None] = {}
    if copies := checked.admission.copies:
        found[names.COPIES_ANNOTATION] = " ".join(copies)
    if checked.admission.datamover:
        found[names.BLOCK_PREFERRED_ANNOTATION] = "true"
    return found


def _finalizers(kind: Kind[Any], cr: Transfer) -> list[str] | None:
    """Return the transfer's finalizers with ours; None where it is too late to add one."""
    if cr.deleting:
        return None
    return list(dict.fromkeys([*cr.metadata.finalizers, kind.spec.finalizer]))


_SHOW_SECONDS: Final = 1.0
"""Between two updates of the metrics while the queue changes; longer for a longer queue,"""

_ENTRIES_PER_SECOND: Final = 10_000
"""so that 100,000 transfers take no more of a core than 10,000: some percent."""

_ON_STATUS_PAGE: Final = 1000
"""Transfers that the status page lists; the others are counted."""

_IN_METRICS: Final = 100
"""Positions with a time series each: more would make scraping expensive."""

_REASONS: Final = frozenset(PendingReason)
_OTHER_REASON: Final = "Other"
"""The label of reasons that the kubelet, the scheduler or a volume controller defines: there is no list of them."""


@dataclass(eq=False)
class QueueView:
    """Shows the queue in the metrics and on the status page while this agent is the leader.

    These are the transfers of `kinds` that `entries` returns; `order` brings the queued ones into order.
    """

    metrics: Metrics
    clock: Clock
    kinds: Sequence[str]
    _: KW_ONLY
    entries: Callable[[], Sequence[Entry]]
    order: Callable[[Iterable[Entry]], Iterable[Entry]]
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def notify(self) -> None:
        """Request an update: a transfer has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the metrics up to date until canceled; then remove them, since another agent shows the queue."""
        try:
            while True:
                self._changed.clear()
                shown = self._show()
                await self._changed.wait()
                await self.clock.sleep(_SHOW_SECONDS + shown / _ENTRIES_PER_SECOND)
        finally:
            self.metrics.show(PENDING, {})
            self._show_counts(Counter())
            self.metrics.show(QUEUE_POSITION, {})

    def report(self) -> JsonDict:
        """Return the queue; `pending` are New ones with another reason, `interrupted` those between two attempts."""
        managed = [entry for entry in self.entries() if entry.managed]
        queue = list(self.order(managed))
        positions = {entry.uid: position for position, entry in enumerate(queue, start=1)}
        others = [entry for entry in managed if entry.phase is Phase.NEW and entry.uid not in positions]
        interrupted = [entry for entry in managed if entry.interrupted]
        return {
            "phases": dict(Counter(str(entry.phase) for entry in managed)),
            "queued": len(queue),
            "queue": [_describe(entry) | {"position": positions[entry.uid]} for entry in queue[:_ON_STATUS_PAGE]],
            "pending": [_describe(entry) | {"reason": entry.reason or ""} for entry in others[:_ON_STATUS_PAGE]],
            "interrupted": [_describe_attempt(entry) for entry in interrupted[:_ON_STATUS_PAGE]],
        }

    def _show(self) -> int:
        """Update the metrics; return the number of transfers."""
        managed = [entry for entry in self.entries() if entry.managed]
        self._show_counts(Counter((entry.kind, entry.phase) for entry in managed))
        pending = [entry for entry in managed if entry.reason and not entry.phase.final]
        reasons = ((entry, entry.reason if entry.reason in _REASONS else _OTHER_REASON) for entry in pending)
        self.metrics.show(PENDING, Counter((entry.kind, str(entry.phase), reason) for entry, reason in reasons))
        head = enumerate(islice(self.order(managed), _IN_METRICS), start=1)
        self.metrics.show(QUEUE_POSITION, {(entry.kind, entry.name): position for position, entry in head})
        return len(managed)

    def _show_counts(self, counts: Counter[tuple[str, Phase]]) -> None:
        for kind in self.kinds:
            for phase in Phase:
                if not phase.final:
                    self.metrics.set(QUEUE_LENGTH, counts[(kind, phase)], kind, str(phase))


def _describe(entry: Entry) -> JsonDict:
    return {"kind": entry.kind, "name": entry.name, "volumeNamespace": entry.queue, "created": entry.created}


def _describe_attempt(entry: Entry) -> JsonDict:
    return _describe(entry) | {"stage": str(entry.stage), "nodeLabel": entry.node_label, "reason": entry.reason or ""}
