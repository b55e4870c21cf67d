"""Loads whose agent or node stays away: told, handed on or ended, in their agent's place.

Knows what can still be done for such a load, and when somebody has to end it. Does not know
which loads these are (`nodeagent.leader.recovery.orphans`), nor how often they are looked at
(`nodeagent.leader.recovery.orphans`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.models.base import JsonDict, format_time
from core.models.names import CANCEL_REQUESTED_ANNOTATION, NODE_LABEL, label_value
from core.models.phases import HOLDING_PHASES, RUNNING_PHASES, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from exposer.pod_status import parse_pod_end
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.transfers.events import cancel_cause, record_end
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import explain_loss, read_mover
from nodeagent.transfers.outcome import read_outcome
from nodeagent.transfers.status import Change

__all__ = ["AbsentAgents", "node_of"]

_LONGEST_LABEL: Final = 63
"""Source: Kubernetes, label values."""

_FORCED_BEFORE_START: Final = timedelta(minutes=5)
_FORCED_RUNNING: Final = timedelta(hours=1)
"""After a cancel that nobody answers. Source: Velero v1.18, the data mover controllers' cancel
of loads that no agent handles (preparing: 5 minutes, in progress: an hour)."""


async def node_of(kind: Kind, cr: Transfer) -> str:
    """Return the name of the node under the load's label; the label itself where nothing tells the name."""
    label = cr.metadata.labels.get(NODE_LABEL, "")
    for name in (cr.status.node, cr.status.accepted_by_node):
        if name and label_value(name) == label:
            return name
    # A value as long as values may be is perhaps a name that was cut.
    name = await kind.read_node(cr) if len(label) >= _LONGEST_LABEL else label
    return name if label_value(name) == label else label


@dataclass(frozen=True)
class AbsentAgents:
    """Stands in for agents that are away.

    `choose` returns the label and name of the node of a live agent, None where there is none.
    """

    tools: DispatchTools
    rules: DispatchRules
    choose: Callable[[], tuple[str, str] | None]

    async def end(self, kind: Kind, cr: Transfer, why: str) -> None:
        """End a load whose node is lost; `why` says how.

        A result that is there goes to another agent, and waits for one, unless nobody wants it any more.
        """
        mover = await self._read_mover(cr)
        if await self._hand_on(kind, cr, mover, why):
            return
        if cr.phase in RUNNING_PHASES and not cr.cancel_requested and _has_result(cr, mover):
            await self._say(kind, cr, f"{why}; its result waits for an agent that is ready", note_cancel=False)
            return
        await self._end_unfinished(kind, cr, why, f"{why}; {_what_was_there(cr)}")

    async def end_nowhere(self, kind: Kind, cr: Transfer) -> None:
        """End a load that no agent can have: it was made with its phase, or its pods are gone.

        It would hold its place in the queue for good.
        """
        why = "nothing tells which node has it, and there is no data mover pod"
        await self._end_unfinished(kind, cr, why, f"it is {cr.phase}, but {why}")

    async def wait_for_agent(self, kind: Kind, cr: Transfer, *, away_for: timedelta) -> None:
        """Say that only the agent that is away can go on; end the load where that takes too long.

        `away_for` is how long it was seen away.
        """
        node, clock = await node_of(kind, cr), self.tools.clock
        away = f"no node agent is ready on node {node}"
        mover = await self._read_mover(cr)
        if await self._hand_on(kind, cr, mover, away):
            return
        if lost := _explain_lost_mover(cr, mover):
            await self._end_unfinished(kind, cr, f"{lost}; {away}")
            return
        stop = cr.cancel_requested
        asked_at = cr.cancel_requested_at
        if stop and asked_at is not None:
            span = _FORCED_BEFORE_START if cr.phase in HOLDING_PHASES else _FORCED_RUNNING
            if clock.now() - asked_at >= span:
                message = f"{cancel_cause(cr)}; nobody answered within {format_duration(span)}: {away}"
                await self._end(kind, cr, Phase.CANCELED, message)
                return
        if not stop and (late := self._late(cr, away_for)):
            await self._end(kind, cr, Phase.FAILED, f"{late}: {away}")
            return
        await self._say(kind, cr, f"{away}: {_what_goes_on(cr)}", note_cancel=stop and asked_at is None)

    async def welcome(self, kind: Kind, cr: Transfer) -> None:
        """Take back what was said about the agent, which is there again."""
        if cr.pending_reason == PendingReason.AGENT_UNAVAILABLE:
            self.tools.check_leading()
            await self.tools.status.report(kind, cr, message="")

    async def _say(self, kind: Kind, cr: Transfer, message: str, *, note_cancel: bool) -> None:
        """Write why the load waits, and since when it is to stop, where that is news."""
        if cr.status.message == message and not note_cancel:
            return
        now = format_time(self.tools.clock.now())
        annotations = {CANCEL_REQUESTED_ANNOTATION: now} if note_cancel else {}
        change = Change({"message": message}, annotations=annotations, reason=PendingReason.AGENT_UNAVAILABLE)
        self.tools.check_leading()
        stored = await self.tools.status.annotate(kind, cr, change)
        if cr.status.message != message:
            await self.tools.events.record(stored, PendingReason.AGENT_UNAVAILABLE, message, warning=True)

    async def _read_mover(self, cr: Transfer) -> JsonDict | None:
        """Return the mover pod of a load that runs."""
        return await read_mover(self.tools.client, cr) if cr.phase in RUNNING_PHASES else None

    async def _hand_on(self, kind: Kind, cr: Transfer, mover: JsonDict | None, why: str) -> bool:
        """Give a load whose mover has left a result to another agent; return whether that was done."""
        if cr.phase not in RUNNING_PHASES or not _has_result(cr, mover):
            return False
        chosen = self.choose()
        if chosen is None:
            return False
        label, node = chosen
        self.tools.check_leading()
        stored = await self.tools.status.annotate(kind, cr, Change(labels={NODE_LABEL: label}))
        await self.tools.events.record(stored, "HandedOn", f"{why}; the agent of node {node} takes the result over")
        return True

    def _late(self, cr: Transfer, away_for: timedelta) -> str:
        """Return what has not come about within the prepare timeout; empty where that is not over.

        A mover that is ready may have waited for its slot for long: its time is that without an agent.
        """
        span, accepted_at = self.rules.prepare_timeout, cr.accepted_at
        if cr.phase is Phase.PREPARED and away_for >= span:
            return f"not started within {format_duration(span)}"
        accepted = accepted_at is not None and self.tools.clock.now() - accepted_at >= span
        return f"not prepared within {format_duration(span)}" if cr.phase is Phase.ACCEPTED and accepted else ""

    async def _end_unfinished(self, kind: Kind, cr: Transfer, why: str, failed: str = "") -> None:
        """End a load that nobody can carry on: Canceled where that was wanted, else Failed with `failed` or `why`."""
        if cr.cancel_requested:
            await self._end(kind, cr, Phase.CANCELED, f"{cancel_cause(cr)}; {why}")
        else:
            await self._end(kind, cr, Phase.FAILED, failed or why)

    async def _end(self, kind: Kind, cr: Transfer, phase: Phase, message: str) -> None:
        self.tools.check_leading()
        stored = await self.tools.status.move(kind, cr, phase, Change(status={"message": message}))
        await record_end(kind, stored, metrics=self.tools.metrics, events=self.tools.events)


def _what_was_there(cr: Transfer) -> str:
    return "its data mover moved data there" if cr.phase in RUNNING_PHASES else "its volume was to be moved there"


def _what_goes_on(cr: Transfer) -> str:
    if cr.phase in RUNNING_PHASES:
        return "the data mover goes on, and its end is seen when the agent is back"
    return "it goes on when the agent is back"


def _has_result(cr: Transfer, mover: JsonDict | None) -> bool:
    """Whether it is known how the load ended, or its mover's container tells."""
    end = parse_pod_end(mover) if mover is not None else None
    return read_outcome(cr) is not None or (end is not None and end.exit_code is not None)


def _explain_lost_mover(cr: Transfer, mover: JsonDict | None) -> str:
    """Return what became of the mover of a load that runs; empty while it goes on, or where there is a result."""
    if cr.phase not in RUNNING_PHASES or _has_result(cr, mover):
        return ""
    gone = f"data mover pod {cr.metadata.namespace}/{cr.name} is gone; it left no result"
    if mover is None:
        return gone
    if parse_pod_end(mover) is None:
        return ""
    why = explain_loss(mover)
    return f"{gone}: {why}" if why else gone
