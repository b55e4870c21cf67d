"""Recovery of orphaned transfers, which have no live owning agent: adopt, reassign, clean up."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Final

from core.errors import AgentError
from core.kube.errors import ConflictError, NotFoundError
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import NODE_LABEL, label_value
from core.models.phases import AttemptStage, Phase
from core.models.reasons import UNREADABLE, PendingReason
from core.models.transfers import Transfer
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.index import Entry, TransferIndex, build_entry
from nodeagent.leader.live_agents import LiveAgents, choose_node, count_idle
from nodeagent.leader.recovery.absent_agents import AbsentAgents, NodeHealth, node_of
from nodeagent.runtime.workqueue import Faults, Requeue, Timers, WorkQueue
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import MoverLogs, pod_node, read_mover
from nodeagent.transfers.retries import PendingRecords
from nodeagent.transfers.status import Change, CleanUp

_log = logging.getLogger(__name__)


class RecoveryAction(Enum):
    """The recovery step that a transfer needs."""

    NOTHING = auto()
    ADOPT = auto()
    """Accepted by Velero's agent: set the label of its node."""
    REASSIGN = auto()
    """No mover moves its data, and its agent is unavailable: assign it to another one."""
    LEAVE_NODE = auto()
    """Its node is lost: continue it elsewhere if that is possible, else set a final phase."""
    WAIT_FOR_AGENT = auto()
    """Only its unavailable agent can continue it: report that, and honor cancel requests and timeouts."""
    CLEAR_REPORT = auto()
    """Its agent is available again: remove the report."""
    REPORT_INVALID = auto()
    """It cannot be parsed: report the invalid fields."""
    CLEAN_UP = auto()
    """In a final phase, and no agent deletes its expose objects."""


@dataclass(frozen=True)
class OwnerState:
    """The state of a transfer's owning agent.

    `unavailable`: no Ready agent pod of ours is on the node of the label for long enough. `velero`: an agent of Velero
    runs there. `bound`: only this node can carry out the transfer.
    """

    unavailable: bool
    velero: bool
    node_lost: bool
    bound: bool


def decide_recovery(entry: Entry, owner: OwnerState) -> RecoveryAction:
    """Return the recovery step for a transfer."""
    if entry.fault and not entry.node_label:
        return RecoveryAction.REPORT_INVALID
    if not entry.managed or entry.phase is Phase.NEW:
        return RecoveryAction.NOTHING
    orphaned = not entry.node_label or owner.unavailable or owner.node_lost
    if entry.phase.final:
        return RecoveryAction.CLEAN_UP if entry.finalizer and orphaned else RecoveryAction.NOTHING
    if not entry.node_label:
        return RecoveryAction.ADOPT
    if owner.velero and not entry.idle:
        # It has taken the transfer over, since the mover pod runs there.
        return RecoveryAction.NOTHING
    if not orphaned:
        reported = entry.reason == PendingReason.AGENT_UNAVAILABLE
        return RecoveryAction.CLEAR_REPORT if reported else RecoveryAction.NOTHING
    if entry.idle and not owner.bound:
        return RecoveryAction.REASSIGN
    return RecoveryAction.LEAVE_NODE if owner.node_lost else RecoveryAction.WAIT_FOR_AGENT


_SCAN_SECONDS: Final = 5.0
"""Between scans of the index; they cost no request."""

_UNAVAILABLE_AFTER_SECONDS: Final = 30.0
"""A restarting agent is Ready by then and continues its own transfers."""

_UNAVAILABLE_CHECK_SECONDS: Final = 30.0
"""Between checks of a transfer with an unavailable agent or a lost node: a cancel or a timeout may be due."""

_REJECTED_PAUSE_SECONDS: Final = 60.0
"""After an error that a retry does not resolve."""

_WORKERS: Final = 4


class OrphanRecovery:
    """Recovers orphaned transfers while this agent is the leader."""

    def __init__(self, cluster: Cluster, rules: DispatchRules, index: TransferIndex, *, agents: LiveAgents) -> None:
        self._cluster = cluster
        self._kinds: Mapping[str, Kind[Any]] = {kind.spec.name: kind for kind in rules.kinds}
        self._index = index
        self._agents = agents
        self._nodes = NodeHealth(cluster.client, cluster.clock, gone_after=rules.node_gone_after)
        self._canceling = Timers(cluster.clock)
        self._alone = Timers(cluster.clock, most_seconds=2 * _UNAVAILABLE_CHECK_SECONDS)
        self._absent = AbsentAgents(cluster, rules, self._canceling, self._choose)
        self._pending = PendingRecords(cluster.clock)
        self._cleaner = CleanUp(cluster.status, cluster.events, self._pending, rules.resource_timeout)
        self._logs = MoverLogs(cluster.client)
        self._last_error = ""
        self._chosen: dict[str, str] = {}
        self._last: dict[tuple[str, str, str], RecoveryAction] = {}
        self._explained: dict[str, str] = {}
        self._faults = Faults(_log)
        self._queue: WorkQueue[tuple[str, str, str]] = WorkQueue(cluster.clock, name="orphans", workers=_WORKERS)

    def report(self) -> JsonDict:
        """Return for the status page: transfers by step, what cleanups are pending for, the last error."""
        steps = [(entry, self._action_for(entry)) for entry in self._index.entries()]
        unclean = [self._pending.get(entry.uid) for entry, action in steps if action is RecoveryAction.CLEAN_UP]
        return {
            "transfers": dict(Counter(step.name for _, step in steps if step is not RecoveryAction.NOTHING)),
            "pendingMessages": sorted({record.current.message for record in unclean} - {""}),
            "lastError": self._last_error,
        }

    async def run(self) -> None:
        """Recover until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run(self._handle), name="orphaned transfers")
            group.create_task(self._nodes.run(), name="node health")
            while True:
                self._scan()
                await self._cluster.clock.sleep(_SCAN_SECONDS)

    def _scan(self) -> None:
        """Enqueue what needs another step than the last one, which the queue repeats when that is due."""
        self._last = {key: action for key, action in self._last.items() if self._queue.holds(key)}
        # The index shows by now what was chosen after the last scan.
        self._chosen.clear()
        entries = self._index.entries()
        uids = {entry.uid for entry in entries}
        self._canceling.retain(uids)
        self._alone.retain(uids)
        self._pending.retain(uids)
        self._explained = {uid: fault for uid, fault in self._explained.items() if uid in uids}
        self._agents.retain({entry.node_label for entry in entries})
        # Most of all transfers are finished and cleaned up.
        for entry in (entry for entry in entries if entry.finalizer or not entry.phase.final):
            action = self._action_for(entry)
            reported = action is RecoveryAction.REPORT_INVALID and self._explained.get(entry.uid) == entry.fault
            if action not in {RecoveryAction.NOTHING, self._last.get(entry.key)} and not reported:
                self._queue.add(entry.key)

    def _action_for(self, entry: Entry) -> RecoveryAction:
        label = entry.node_label
        owner = OwnerState(
            unavailable=bool(label) and self._agents.seconds_unavailable(label) >= _UNAVAILABLE_AFTER_SECONDS,
            velero=label in self._agents.velero_nodes(),
            node_lost=bool(label) and self._nodes.is_lost(label),
            bound=self._kinds[entry.kind].spec.bound_to_node,
        )
        return decide_recovery(entry, owner)

    async def _handle(self, key: tuple[str, str, str]) -> Requeue | None:
        kind = self._kinds[key[0]]
        log_fields = fields(kind=key[0], namespace=key[1], name=key[2])
        try:
            requeue = await self._recover(kind, key)
        except (ConflictError, NotFoundError) as e:
            # The next scan reads the current state.
            _log.debug("conflict, will retry: %s", e, extra=log_fields)
            return None
        except AgentError as e:
            self._last_error = f"{kind.spec.name} {key[1]}/{key[2]}: {e}"
            if e.retry:
                # The next scan, not the end of a long backoff.
                self._last.pop(key, None)
                raise
            self._faults.report(key, "recovery of an orphaned transfer failed", e, extra=log_fields)
            return Requeue(_REJECTED_PAUSE_SECONDS)
        self._faults.forget(key)
        return requeue

    async def _recover(self, kind: Kind[Any], key: tuple[str, str, str]) -> Requeue | None:
        raw = await self._cluster.client.read(kind.spec.resource, key[1], key[2])
        if raw is None:
            return None
        entry = build_entry(kind, raw)
        action = self._action_for(entry)
        if action is RecoveryAction.NOTHING:
            return None
        self._last[key] = action
        self._cluster.check_leading()
        if action is RecoveryAction.REPORT_INVALID:
            self._explained[entry.uid] = fault = entry.fault or ""
            await self._cluster.events.record_warning(raw, UNREADABLE, fault)
            return None
        return await self._perform(action, kind, kind.parse(raw))

    async def _perform(self, action: RecoveryAction, kind: Kind[Any], cr: Transfer) -> Requeue | None:
        match action:
            case RecoveryAction.ADOPT:
                await self._adopt(kind, cr)
            case RecoveryAction.REASSIGN:
                leave = self._leave_node if await self._has_pod_there(cr) else self._reassign
                if not await leave(kind, cr):
                    await self._wait_for_agent(kind, cr)
            case RecoveryAction.LEAVE_NODE:
                await self._leave_node(kind, cr)
            case RecoveryAction.WAIT_FOR_AGENT:
                await self._wait_for_agent(kind, cr)
            case RecoveryAction.CLEAR_REPORT:
                await self._absent.clear_report(kind, cr)
            case RecoveryAction.CLEAN_UP:
                return await self._clean_up(kind, cr)
        return Requeue(_UNAVAILABLE_CHECK_SECONDS)

    async def _has_pod_there(self, cr: Transfer) -> bool:
        """Return whether the next attempt already has a mover pod on its agent's node: no other agent can use it."""
        label = cr.metadata.labels.get(NODE_LABEL)
        return cr.stage is AttemptStage.EXPOSING and label_value(await self._pod_node(cr) or "") == label

    async def _leave_node(self, kind: Kind[Any], cr: Transfer) -> bool:
        """Continue a transfer of a lost node or end it; return whether the node is lost."""
        # The cache may be stale, and what follows cannot be undone.
        loss = await self._nodes.confirm_loss(await node_of(kind, cr))
        if loss is not None:
            await self._absent.leave_node(kind, cr, loss)
        return loss is not None

    async def _wait_for_agent(self, kind: Kind[Any], cr: Transfer) -> None:
        unavailable_seconds = self._agents.seconds_unavailable(cr.metadata.labels.get(NODE_LABEL, ""))
        await self._absent.wait_for_agent(kind, cr, unavailable_for=timedelta(seconds=unavailable_seconds))

    async def _clean_up(self, kind: Kind[Any], cr: Transfer) -> Requeue | None:
        """Take the next step of the cleanup; copy the mover's log first, as the agent would have done."""
        if NODE_LABEL in cr.metadata.labels:
            pod = await read_mover(self._cluster.client, cr)
            node = (pod and pod_node(pod)) or ""
            # The kubelet of a lost node does not answer.
            if not self._nodes.is_lost(label_value(node)):
                await self._logs.copy(cr, pod)
        requeue = await self._cleaner.step(kind, cr)
        if requeue is None:
            self._logs.forget(cr.uid)
        return requeue

    async def _adopt(self, kind: Kind[Any], cr: Transfer) -> None:
        """Set the node label; an Accepted transfer without a live agent is reassigned, or waits for one.

        One that an agent of Velero has accepted stays with it while it runs, until the mover pod is on a node of ours.
        """
        acceptor = cr.status.accepted_by_node
        node = cr.status.node or await self._pod_node(cr) or acceptor or await kind.read_node(cr) or ""
        live = label_value(node) in self._agents.nodes()
        holders = {label_value(each) for each in (node, (cr.phase is Phase.ACCEPTED and acceptor) or "")}
        if not live and holders & self._agents.velero_nodes():
            self._alone.forget(cr.uid)
            await self._absent.clear_report(kind, cr)
            return
        if cr.phase is Phase.ACCEPTED and not live and not kind.spec.bound_to_node:
            if not await self._reassign(kind, cr) and (seconds := self._alone.seconds(cr.uid)) > 0:
                # Without the label: an agent of Velero there may be back, and continue it.
                await self._absent.wait_for_agent(kind, cr, unavailable_for=timedelta(seconds=seconds))
            return
        if not node:
            await self._absent.end_nowhere(kind, cr)
            return
        stored = await self._cluster.status.annotate(kind, cr, Change(labels={NODE_LABEL: label_value(node)}))
        await self._cluster.events.record(stored, "Adopted", f"the node agent on node {node} continues it")

    async def _reassign(self, kind: Kind[Any], cr: Transfer) -> bool:
        """Assign a transfer to another agent, where its prepare timeout begins again if it is Accepted.

        Return False if no agent can carry it out: none is live, or has the feature; or it is bound to its node.
        """
        chosen = None if kind.spec.bound_to_node else self._choose(cr)
        if chosen is None:
            return False
        label, node = chosen
        previous = await node_of(kind, cr) or "another node"
        accepted = {"acceptedByNode": node} if cr.phase is Phase.ACCEPTED else {}
        stored = await self._cluster.status.annotate(kind, cr, Change(status=accepted, labels={NODE_LABEL: label}))
        message = f"node agent on {previous} is not available; assigned to the node agent on node {node}"
        await self._cluster.events.record(stored, "Reassigned", message)
        return True

    async def _pod_node(self, cr: Transfer) -> str | None:
        pod = await read_mover(self._cluster.client, cr)
        return None if pod is None else pod_node(pod)

    def _choose(self, cr: Transfer) -> tuple[str, str] | None:
        """Return node label and node name of the live agent with the fewest idle transfers, to be given `cr` too.

        Agents on lost nodes are left out: their pods read as Ready for a while.
        """
        live = self._agents.nodes(cr.required_feature)
        agents = {label: node for label, node in live.items() if not self._nodes.is_lost(label)}
        idle = count_idle(self._index.entries(), self._chosen)
        label = choose_node(agents, idle, self._agents.backoff.labels())
        if label is None:
            return None
        self._chosen[cr.uid] = label
        return label, agents[label]
