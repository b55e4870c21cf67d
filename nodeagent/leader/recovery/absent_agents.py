"""Transfers with an unavailable agent or a lost node: reported, reassigned, interrupted or set to a final phase."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, cast

from core.clock import Clock
from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.resources import NODES
from core.kube.types import Condition, NodeObject, Pod
from core.models.names import NODE_LABEL, label_value
from core.models.phases import RUNNING_PHASES, AttemptStage, InterruptionCause, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from exposer.pod_status import parse_pod_end
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.metrics import RETRIES
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.workqueue import Timers
from nodeagent.transfers import status
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import explain_loss, read_mover
from nodeagent.transfers.outcome import read_outcome
from nodeagent.transfers.retries import Ending, fence_refusal, find_interruption, refusal

_log = logging.getLogger(__name__)


def explain_node_loss(name: str, condition: Condition | None, *, seconds: float, gone_after: timedelta) -> str | None:
    """Return why the node `name` is lost, or None.

    `condition` is the Node's condition Ready as JSON dict, empty if it has none, which this process has observed for so
    many `seconds`; None if there is no such Node. `gone_after` is how long a node may be not Ready.
    Source: Kubernetes v1.34, API reference, NodeCondition.
    """
    if condition is None:
        return f"node {name} does not exist"
    if _is_ready(condition) or seconds < gone_after.total_seconds():
        return None
    cause = ": ".join(part for part in (condition.get("reason", ""), condition.get("message", "")) if part)
    return f"node {name} is not Ready for {format_duration(gone_after)}" + (f": {cause}" if cause else "")


def _is_ready(condition: Condition) -> bool:
    return bool(condition.get("status", "True") == "True") or not condition.get("lastTransitionTime")


class NodeLoss(NamedTuple):
    """Why a node is lost, and whether its Node was deleted; otherwise it may be back at any time."""

    why: str
    deleted: bool


class _Node(NamedTuple):
    """The cached part of a Node: its label value, and its condition Ready, empty if it has none."""

    label: str
    ready: Condition


class NodeHealth:
    """The nodes of the cluster, kept by list and watch."""

    def __init__(self, client: KubeClient, clock: Clock, *, gone_after: timedelta) -> None:
        self._client = client
        self._gone_after = gone_after
        self._not_ready = Timers(clock)
        self._by_label: Mapping[str, Condition] | None = None
        self._informer = Informer(client, Selection(NODES), clock=clock, trim=_trim, on_change=self._take)

    async def run(self) -> None:
        """List and watch until canceled; while the list is rejected, no node is lost."""
        await self._informer.run_despite_rejections(partial(_log.warning, "cannot detect lost nodes, will retry: %s"))

    def is_lost(self, label: str) -> bool:
        """Return whether the node with that label value is lost.

        No node is lost before the first list, or while the list is empty: this process itself runs on a node.
        """
        if not self._informer.synced.is_set() or not (conditions := self._conditions()):
            return False
        return self._explain(label, label, conditions.get(label)) is not None

    async def confirm_loss(self, name: str) -> NodeLoss | None:
        """Read the node, and return why it is lost; None if it is not."""
        node = await self._client.read(NODES, "", name)
        why = self._explain(label_value(name), name, None if node is None else _trim(node).ready)
        return NodeLoss(why, deleted=node is None) if why else None

    def _explain(self, label: str, name: str, condition: Condition | None) -> str | None:
        seconds = 0.0 if condition is None else self._measure(label, condition)
        return explain_node_loss(name, condition, seconds=seconds, gone_after=self._gone_after)

    def _measure(self, label: str, condition: Condition) -> float:
        """Return how long the node has been observed not Ready since its last transition, 0.0 if it is Ready."""
        if _is_ready(condition):
            self._not_ready.forget(label)
            return 0.0
        return self._not_ready.seconds(label, condition["lastTransitionTime"])

    def _conditions(self) -> Mapping[str, Condition]:
        if self._by_label is None:
            self._by_label = {node.label: node.ready for node in self._informer.items()}
            self._not_ready.retain(self._by_label.keys())
        return self._by_label

    def _take(self, node: _Node) -> None:
        self._by_label = None
        self._measure(node.label, node.ready)


_KEPT: Final = ("status", "reason", "message", "lastTransitionTime")


def _trim(node: NodeObject) -> _Node:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((entry for entry in conditions if entry.get("type") == "Ready"), Condition())
    kept = {key: ready[key] for key in _KEPT if key in ready}
    return _Node(label_value(node["metadata"]["name"]), cast("Condition", kept))


_LONGEST_LABEL: Final = 63
"""Source: Kubernetes, label values."""

_FORCED_BEFORE_START: Final = timedelta(minutes=5)
_FORCED_RUNNING: Final = timedelta(hours=1)
"""Time after a cancel request until force cancel. Source: Velero v1.18, how the data mover controllers
cancel transfers that no agent handles (preparing: 5 minutes, in progress: an hour)."""


async def node_of(kind: Kind[Any], cr: Transfer) -> str:
    """Return the name of the node in the node label; the label's value if the name is unknown; its own without one."""
    label = cr.metadata.labels.get(NODE_LABEL, "")
    for name in (cr.status.node, cr.status.accepted_by_node):
        if name and label in {"", label_value(name)}:
            return name
    # A value of maximum length may be a shortened name.
    named = await kind.read_node(cr) if len(label) >= _LONGEST_LABEL else None
    return named if named is not None and label_value(named) == label else label


_PLACED: Final = frozenset({AttemptStage.EXPOSING, AttemptStage.RUNNING})
"""The stages in which an attempt is lost with its node."""


@dataclass(frozen=True)
class AbsentAgents:
    """Acts for unavailable agents.

    `canceling` measures, by uid, how long cancel requests have been observed. `choose` returns node label and node name
    of a live agent that a transfer is reassigned to, or None if there is none.
    """

    cluster: Cluster
    rules: DispatchRules
    canceling: Timers
    choose: Callable[[Transfer], tuple[str, str] | None]

    async def leave_node(self, kind: Kind[Any], cr: Transfer, loss: NodeLoss) -> None:
        """Continue a transfer of a lost node if that is possible, else set it to a final phase.

        A result is taken over by another agent, unless the transfer is to be canceled. A transfer that is bound to the
        node continues when that is back.
        """
        mover, why = await self._read_mover(cr), loss.why
        if await self._reassign(kind, cr, mover, why):
            return
        if cr.phase in RUNNING_PHASES and not cr.cancel_requested and _has_result(kind, cr, mover):
            await self._report(kind, cr, f"{why}; its result is kept until a node agent is ready")
            return
        work = "its data path was running there" if _may_run(cr) else "its volume was being prepared there"
        message = f"{why}; {work}"
        if cr.phase is Phase.IN_PROGRESS and not cr.cancel_requested and not (kind.spec.bound_to_node and loss.deleted):
            ending = find_interruption(mover, None) if mover is not None else None
            if ending is None and cr.stage in _PLACED:
                ending = Ending(InterruptionCause.NODE_LOST, why, terminated=False)
            await self._continue(kind, cr, ending, mover, why=why, failed=message)
        else:
            await self._leave_unstarted(kind, cr, why, message)

    async def end_nowhere(self, kind: Kind[Any], cr: Transfer) -> None:
        """End a transfer without an owning agent: it was created with its phase, or its pods were deleted."""
        why = f"cannot determine the owning agent in phase {cr.phase}: no node label and no data mover pod"
        await self._end_unfinished(kind, cr, why)

    async def wait_for_agent(self, kind: Kind[Any], cr: Transfer, *, unavailable_for: timedelta) -> None:
        """Report that only the agent, `unavailable_for` so long, can continue; end the transfer after its deadline."""
        node = await node_of(kind, cr)
        cause = f"no node agent is ready on node {node}"
        mover = await self._read_mover(cr)
        if await self._reassign(kind, cr, mover, cause):
            return
        if lost := _explain_lost_mover(kind, cr, mover):
            why, ending = f"{lost}; {cause}", find_interruption(mover, None)
            if cr.phase is Phase.IN_PROGRESS and not cr.cancel_requested and ending is not None:
                await self._continue(kind, cr, ending, mover, why=why, failed=why)
            else:
                await self._end_unfinished(kind, cr, why)
            return
        if cr.cancel_requested:
            timeout = _FORCED_RUNNING if _may_run(cr) else _FORCED_BEFORE_START
            if self.canceling.seconds(cr.uid) >= timeout.total_seconds():
                message = f"{status.cancel_cause(cr)}; force canceled after {format_duration(timeout)}: {cause}"
                await self._end(kind, cr, Phase.CANCELED, message)
                return
        elif cr.phase is Phase.IN_PROGRESS and not _may_run(cr):
            late = self._late(cr, unavailable_for)
            ending = Ending(InterruptionCause.NODE_LOST, f"{late}: {cause}", terminated=False) if late else None
            await self._continue(kind, cr, ending, mover, why=cause, failed=cause)
            return
        elif late := self._late(cr, unavailable_for):
            await self._leave_unstarted(kind, cr, f"{late}: {cause}", f"{late}: {cause}")
            return
        runs = "the data mover continues; its result is read when the agent is back"
        await self._report(kind, cr, f"{cause}: {runs if _may_run(cr) else 'continues when the agent is back'}")

    async def _leave_unstarted(self, kind: Kind[Any], cr: Transfer, why: str, message: str) -> None:
        """Have another agent begin with a transfer whose mover waits for a slot, else set it to a final phase.

        The mover ends itself once it reads of another attempt: it could not begin before.
        """
        if cr.phase is Phase.PREPARED and not cr.cancel_requested and not kind.spec.bound_to_node:
            mover = await read_mover(self.cluster.client, cr)
            # One of a restore that is gone may have been one that knows no attempts.
            if mover is not None or not kind.spec.restores:
                ending = Ending(InterruptionCause.NODE_LOST, why, terminated=False)
                await self._continue(kind, cr, ending, mover, why=why, failed=message)
                return
        await self._end_unfinished(kind, cr, why, message)

    async def _continue(
        self, kind: Kind[Any], cr: Transfer, ending: Ending | None, mover: Pod | None, *, why: str, failed: str
    ) -> None:
        """Announce the interruption of an attempt, or report what that waits for; fail the transfer if neither helps.

        The only agent that can continue the transfer announces what was running itself, and may find a result. An
        attempt that was only being prepared is given up for it, so that it does not hold its quota.

        The transfer is Prepared or InProgress, without a cancel request. `ending` is how its attempt ended, None if it
        has not begun, `mover` the pod that ran it, if it is known, and `why` why its own agent does not act. `failed`
        begins the message if it fails.
        """
        given_up = None if kind.spec.bound_to_node and _may_run(cr) else ending
        refused = await self._refuse(kind, cr, ending.cause if ending is not None else None)
        if not refused and given_up is not None and kind.spec.restores:
            refused = fence_refusal(given_up, mover)
        if refused:
            await self._end(kind, cr, Phase.FAILED, f"{failed}; not retried: {refused}")
        elif given_up is None or not await self._announce(kind, cr, given_up):
            condition = "the agent is back" if given_up is None else "an agent is ready"
            await self._report(kind, cr, f"{why}: continues when {condition}")

    async def _refuse(self, kind: Kind[Any], cr: Transfer, cause: InterruptionCause | None) -> str | None:
        """Return why the transfer cannot continue; without a `cause` its attempt has not begun: only its age counts."""
        rules, age_seconds = self.rules.retry_rules(cr), cr.age_seconds(self.cluster.now())
        if why := refusal(rules, cr.attempts, cause, age_seconds=age_seconds):
            return why
        try:
            await kind.confirm_volume(cr)
        except ExposeError as e:
            return str(e)
        return await status.read_owner_refusal(self.cluster.client, cr)

    async def _announce(self, kind: Kind[Any], cr: Transfer, ending: Ending) -> bool:
        """Write that the attempt is interrupted; return False if there is no agent for the next one.

        That is one patch, which also gives the transfer to another agent where that is possible. What follows is the
        owning agent's.
        """
        node = await node_of(kind, cr)
        chosen = (cr.metadata.labels[NODE_LABEL], node) if kind.spec.bound_to_node else self.choose(cr)
        if chosen is None:
            return False
        label, _ = chosen
        interruption = status.build_interruption(ending, node=node, at=self.cluster.now())
        rules, restores = self.rules.retry_rules(cr), kind.spec.restores
        change, message = status.announce_next(cr, interruption, rules, restores=restores, label=label)
        self.cluster.check_leading()
        if cr.phase is Phase.PREPARED:
            stored = await self.cluster.status.move(kind, cr, Phase.IN_PROGRESS, change)
        else:
            stored = await self.cluster.status.annotate(kind, cr, change)
        self.cluster.metrics.inc(RETRIES, kind.spec.name, ending.cause)
        await self.cluster.events.record(stored, PendingReason.INTERRUPTED, message, warning=True)
        return True

    async def clear_report(self, kind: Kind[Any], cr: Transfer) -> None:
        """Remove the report about the agent, which is available again."""
        if cr.pending_reason == PendingReason.AGENT_UNAVAILABLE:
            self.cluster.check_leading()
            await self.cluster.status.report(kind, cr, message="")

    async def _report(self, kind: Kind[Any], cr: Transfer, message: str) -> None:
        if cr.status.message == message:
            return
        change = status.Change({"message": message}, reason=PendingReason.AGENT_UNAVAILABLE)
        self.cluster.check_leading()
        stored = await self.cluster.status.annotate(kind, cr, change)
        await self.cluster.events.record(stored, PendingReason.AGENT_UNAVAILABLE, message, warning=True)

    async def _read_mover(self, cr: Transfer) -> Pod | None:
        return await read_mover(self.cluster.client, cr) if _may_run(cr) else None

    async def _reassign(self, kind: Kind[Any], cr: Transfer, mover: Pod | None, why: str) -> bool:
        """Reassign a transfer whose mover has left a result; return whether that was done."""
        if cr.phase not in RUNNING_PHASES or not _has_result(kind, cr, mover):
            return False
        chosen = self.choose(cr)
        if chosen is None:
            return False
        label, node = chosen
        self.cluster.check_leading()
        # With another `status.node`, the new owner would take it for a transfer that another agent has taken over.
        # The volume may still be attached to the previous one.
        nodes = {"node": node, "acceptedByNode": await node_of(kind, cr)}
        change = status.Change(status=nodes, labels={NODE_LABEL: label})
        stored = await self.cluster.status.annotate(kind, cr, change)
        message = f"{why}; the node agent on node {node} takes over the result"
        await self.cluster.events.record(stored, "Reassigned", message)
        return True

    def _late(self, cr: Transfer, unavailable_for: timedelta) -> str | None:
        """Return which step exceeded the prepare timeout, or None; the time without an agent counts."""
        timeout = self.rules.prepare_timeout
        if not cr.preparing or unavailable_for < timeout:
            return None
        step = "not prepared within" if cr.phase is Phase.ACCEPTED else "not started within"
        return f"{step} {format_duration(timeout)}"

    async def _end_unfinished(self, kind: Kind[Any], cr: Transfer, why: str, failed: str | None = None) -> None:
        """Set the final phase: Canceled if requested, else Failed with the message `failed` or `why`."""
        if cr.cancel_requested:
            await self._end(kind, cr, Phase.CANCELED, f"{status.cancel_cause(cr)}; {why}")
        else:
            await self._end(kind, cr, Phase.FAILED, failed or why)

    async def _end(self, kind: Kind[Any], cr: Transfer, phase: Phase, message: str) -> None:
        self.cluster.check_leading()
        stored = await self.cluster.status.move(kind, cr, phase, status.Change(status={"message": message}))
        await status.record_end(kind, stored, metrics=self.cluster.metrics, events=self.cluster.events)


def _may_run(cr: Transfer) -> bool:
    """Return whether a mover may move data now."""
    return cr.phase in RUNNING_PHASES and not cr.interrupted


def _has_result(kind: Kind[Any], cr: Transfer, mover: Pod | None) -> bool:
    """Return whether an outcome is recorded, or the mover's container has terminated.

    A mover that was interrupted counts only where another agent may let the next attempt begin.
    """
    end = parse_pod_end(mover) if mover is not None else None
    ended = end is not None and end.exit_code is not None
    stays = ended and kind.spec.bound_to_node and find_interruption(mover, None) is not None
    return read_outcome(cr) is not None or (ended and not stays)


def _explain_lost_mover(kind: Kind[Any], cr: Transfer, mover: Pod | None) -> str | None:
    """Return why the mover of a running transfer is lost; None while it runs or if it left a result."""
    if not _may_run(cr) or _has_result(kind, cr, mover):
        return None
    lost = f"data mover pod {cr.metadata.namespace}/{cr.name} was lost without a result"
    if mover is None:
        return lost
    if parse_pod_end(mover) is None:
        return None
    why = explain_loss(mover)
    return f"{lost}: {why}" if why else lost
