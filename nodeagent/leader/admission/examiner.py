"""One look at a load that nobody accepted: may it start, and if not, who is told what.

Knows how a New load is read, checked through its kind, ended where it can never start, and
how its wait is explained. Does not know the order or the places (`nodeagent.leader.dispatcher`).
"""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.kube.errors import ForbiddenError
from core.models.names import ACCEPT_FENCE_ANNOTATION, label_value
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from exposer.model import Pending
from nodeagent.leader.admission.node_share import NodeShares, NodeSlots
from nodeagent.leader.admission.pod_watch import PodWatch
from nodeagent.leader.admission.shared_reader import SharedReader
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.leader.index import Entry
from nodeagent.transfers.events import cancel_cause
from nodeagent.transfers.kinds.base import READY, Admission, AdmissionState, Kind
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import Change

__all__ = ["Examiner", "Look"]


_LOOK_SECONDS: Final = 5.0
"""Between two looks at a load that waits for something of somebody else's."""


_LOOKS_A_SECOND: Final = 50.0
"""Looks at loads that wait, all together: their number must not become load on the API server."""


_WITNESSED_SECONDS: Final = 60.0
"""How long a wait must have been seen before it may end a load: after an outage of the agents
themselves all loads are old, and what they wait for is often just coming back."""


_WOKEN_SECONDS: Final = 60.0
"""The longest time until a load is looked at again that is woken once what it waits for has changed."""


_RETRY_SECONDS: Final = 1.0
"""Before a load is looked at again after an accept that went wrong: mostly somebody else wrote to it."""


@dataclass(frozen=True)
class Look:
    """A New load as it was just read; `node` names the only one that can do it, if any."""

    entry: Entry
    kind: Kind
    cr: Transfer
    ready: bool
    node: str = ""


class Examiner:
    """Looks at New loads and remembers when to look again."""

    def __init__(
        self,
        tools: DispatchTools,
        rules: DispatchRules,
        *,
        agents: Callable[[], Mapping[str, str]],
        on_due: Callable[[], None],
    ) -> None:
        """Look at loads while `run` goes on.

        Args:
            tools: what it works with.
            rules: what it goes by.
            agents: returns the live agents by node label.
            on_due: is called when a load that was put off is to be looked at after all.
        """
        self._tools = tools
        self._rules = rules
        self._agents = agents
        self._slots = NodeSlots(tools.client, tools.clock, rules.concurrency)
        self._pods = PodWatch(tools.client, tools.clock, on_change=on_due)
        self._kinds = {kind.name: kind for kind in rules.kinds}
        self._reader = SharedReader(tools.client, tools.clock)
        self._waits = PendingRecords(tools.clock)
        self._not_before: dict[str, float] = {}
        self._waiting_since: dict[str, float] = {}
        self._excused: set[str] = set()
        bound = frozenset(kind.name for kind in rules.kinds if kind.bound_to_node)
        self._crowds = NodeShares(bound)

    async def run(self) -> None:
        """Watch what loads wait for, until canceled."""
        await self._pods.run()

    def begin_pass(self, entries: Sequence[Entry]) -> None:
        """Count what is on its way to each node; wake whom a node has room for again, and whose pod changed."""
        for uid in [*self._crowds.count(entries), *self._pods.take_woken()]:
            self.wake(uid)

    def is_due(self, uid: str) -> bool:
        """Whether the load of that uid may be looked at now."""
        return self._not_before.get(uid, 0.0) <= self._tools.clock.monotonic()

    def waits(self, uid: str) -> bool:
        """Whether the load of that uid waits for something else than a place."""
        return bool(self._waits.message(uid))

    def seconds_to_next(self) -> float:
        """Return when the next load that was put off is due; infinity where none was."""
        return max(0.0, min(self._not_before.values(), default=math.inf) - self._tools.clock.monotonic())

    def put_off(self, uid: str, seconds: float = _RETRY_SECONDS) -> None:
        """Look at that load again only after so many seconds."""
        self._not_before[uid] = self._tools.clock.monotonic() + seconds

    def wake(self, uid: str) -> None:
        """Look at that load as soon as may be."""
        self._not_before.pop(uid, None)

    def retain(self, uids: AbstractSet[str]) -> None:
        """Forget all loads but those."""
        for uid in self._not_before.keys() | self._waiting_since.keys() | self._excused:
            if uid not in uids:
                self._waits.forget(uid)
                self._pods.leave(uid)
                self._not_before.pop(uid, None)
                self._waiting_since.pop(uid, None)
                self._excused.discard(uid)
        now = self._tools.clock.monotonic()
        self._not_before = {uid: at for uid, at in self._not_before.items() if at > now}

    async def examine(self, entry: Entry) -> Look | None:
        """Read a load and say whether it may start; None where it is not for anybody to start.

        A load that is to end, or can never start, is ended. One that waits is told why.

        Raises:
            AgentError: it could not be read, checked or written.
        """
        # Where it goes wrong, not again and again.
        self.put_off(entry.uid, _LOOK_SECONDS)
        kind = self._kinds[entry.kind]
        raw = await self._tools.client.read(kind.resource, entry.namespace, entry.name)
        if raw is None:
            return None
        cr = kind.parse(raw)
        if cr.uid != entry.uid or cr.phase is not Phase.NEW or not kind.managed(cr):
            return None
        if cr.cancel_requested:
            await self._end(kind, cr, Phase.CANCELED, f"canceled while New: {cancel_cause(cr)}")
            return None
        admission = await self._check(kind, cr)
        if self._crowds.counts(entry) and admission.verdict is AdmissionState.READY:
            slots = await self._slots.of(admission.node)
            admission = self._crowds.admit(entry, admission, slots=slots)
        if admission.verdict is AdmissionState.FAILED:
            await self._end(kind, cr, Phase.FAILED, admission.message)
            return None
        if admission.verdict is AdmissionState.PENDING:
            limit = min(admission.limit or self._rules.prepare_timeout, self._rules.prepare_timeout)
            if self._is_overdue(cr, admission, limit):
                span = format_duration(limit)
                await self._end(kind, cr, Phase.FAILED, f"could not start within {span}: {admission.message}")
                return None
            cr = await self._tell(kind, cr, Pending(admission.reason, admission.message, blocked=admission.blocked))
            self._put_off_waiting(cr.uid, admission)
            return Look(entry, kind, cr, ready=False)
        # Of the many that only wait for a place nothing is remembered.
        self._waits.forget(entry.uid)
        self._not_before.pop(entry.uid, None)
        self._pods.leave(entry.uid)
        self._waiting_since.pop(entry.uid, None)
        return Look(entry, kind, cr, ready=True, node=admission.node)

    async def hold_back(self, look: Look, *, limit: int, position: int) -> None:
        """Tell the reader of a load that only the queue holds it back.

        Raises:
            AgentError: that could not be written.
        """
        message = f"waits for a place in prepareQueueLength ({limit}, all taken): number {position} in line"
        await self._say(look.kind, look.cr, Pending(PendingReason.QUEUED, message))

    async def fence(self, look: Look) -> None:
        """Write to a New load, so that every accept that is still under way conflicts.

        Raises:
            AgentError: that could not be written; its place must be kept.
        """
        self._tools.check_leading()
        change = Change(annotations={ACCEPT_FENCE_ANNOTATION: uuid.uuid4().hex})
        await self._tools.status.annotate(look.kind, look.cr, change)

    def _put_off_waiting(self, uid: str, admission: Admission) -> None:
        """Look at a load that waits again in a while; late where a change of what it waits for wakes it."""
        pause_seconds = max(_LOOK_SECONDS, len(self._not_before) / _LOOKS_A_SECOND)
        if admission.pod is not None:
            self._pods.expect(uid, admission.pod)
        else:
            self._pods.leave(uid)
        if self._waits.is_reported(uid, admission.reason) and (self._crowds.holds(uid) or self._pods.follows(uid)):
            pause_seconds = max(pause_seconds, _WOKEN_SECONDS)
        self.put_off(uid, pause_seconds)

    async def _check(self, kind: Kind, cr: Transfer) -> Admission:
        try:
            admission = await kind.check_admission(cr, self._reader)
        except ForbiddenError as e:
            return Admission(AdmissionState.PENDING, PendingReason.FORBIDDEN, str(e), blocked=True)
        if admission.verdict is not AdmissionState.READY:
            return admission
        agents = self._agents()
        if admission.node and label_value(admission.node) not in agents:
            message = f"no node agent is ready on node {admission.node}"
            return Admission(AdmissionState.PENDING, PendingReason.NO_NODE_AGENT, message, blocked=True)
        if not agents:
            message = f"no node agent is ready in namespace {self._rules.namespace}"
            return Admission(AdmissionState.PENDING, PendingReason.NO_NODE_AGENT, message, blocked=True)
        return admission if admission.node else READY

    def _is_overdue(self, cr: Transfer, admission: Admission, limit: timedelta) -> bool:
        """Whether the load has waited for longer than `limit` for what it waits for now.

        Time counts from its creation, but not the time in which only the queue, or a
        patient wait, held it back. A short limit counts what was seen alone: the creation is
        by another machine's clock.
        """
        if admission.indefinite or cr.pending_reason == PendingReason.QUEUED:
            self._excused.add(cr.uid)
        if admission.indefinite:
            self._waiting_since.pop(cr.uid, None)
            return False
        now = self._tools.clock.monotonic()
        seconds = now - self._waiting_since.setdefault(cr.uid, now)
        created = cr.metadata.creation_timestamp
        if (
            admission.limit is None
            and created is not None
            and cr.uid not in self._excused
            and seconds >= _WITNESSED_SECONDS
        ):
            seconds = max(seconds, (self._tools.clock.now() - created).total_seconds())
        return seconds >= limit.total_seconds()

    async def _tell(self, kind: Kind, cr: Transfer, waiting: Pending) -> Transfer:
        """Write why a load waits where that is news; return it as stored."""
        # Whom a node has no room for is not looked at again before it has.
        telling = self._waits.decide_report(cr.uid, waiting, immediately=self._crowds.holds(cr.uid))
        if not telling.message:
            return cr
        # After a change of the leader the status may have it already.
        if (cr.status.message, cr.pending_reason) != (waiting.message, waiting.reason):
            news = cr.status.message != waiting.message
            cr = await self._say(kind, cr, waiting)
            # A full node is reported by the status alone, as the queue is.
            if telling.event and news and not self._crowds.holds(cr.uid):
                await self._tools.events.record(cr, waiting.reason, waiting.message, warning=waiting.blocked)
        self._waits.mark_reported(cr.uid, waiting)
        return cr

    async def _say(self, kind: Kind, cr: Transfer, waiting: Pending) -> Transfer:
        """Write why a load waits, and that it must not go without us; return it as stored.

        Whoever deletes a load that waits would leave its source snapshot behind. It costs no
        write of its own, and what does not wait is marked as it is accepted.
        """
        self._tools.check_leading()
        change = Change({"message": waiting.message}, finalizers=_finalizers(kind, cr), reason=waiting.reason)
        return await self._tools.status.annotate(kind, cr, change)

    async def _end(self, kind: Kind, cr: Transfer, phase: Phase, message: str) -> None:
        """End a load that nobody accepted; its finalizer has the keeper of orphans clean up behind it.

        There is something even so: the source snapshot was made for this load alone.
        """
        self._tools.check_leading()
        change = Change(status={"message": message}, finalizers=_finalizers(kind, cr))
        stored = await self._tools.status.move(kind, cr, phase, change)
        self._tools.metrics.transfer_finished(kind.name, phase)
        await self._tools.events.record(stored, str(phase), message, warning=phase is Phase.FAILED)
        if kind.finalizer not in stored.metadata.finalizers:
            # It was deleted before it could be marked, and somebody else's finalizer holds it: nobody comes back to it.
            await kind.clean_up(stored)


def _finalizers(kind: Kind, cr: Transfer) -> list[str] | None:
    """Return the load's finalizers with ours; None where it is too late to add one."""
    if cr.deleting:
        return None
    return list(dict.fromkeys([*cr.metadata.finalizers, kind.finalizer]))
