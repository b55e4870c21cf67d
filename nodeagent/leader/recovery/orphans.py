"""Loads that have no live owner: the dispatcher stands in.

Brings loads that nobody works on to somebody who does: a label where the peer's agent left
none, another agent where the accepting one is gone, clean-up where a load is final. Does not
know which load needs what (`nodeagent.leader.recovery.orphans`), nor what is done for one whose agent alone could
go on (`nodeagent.leader.recovery.absent_agents`). Does not admit loads (`nodeagent.leader.dispatcher`).

What a load needs whose agent does not look after it, as one pure function.

Knows every state that a load without a working owner can be seen in. Does not know how that
was seen, nor how it is done (`nodeagent.leader.recovery.orphans`).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Final

from core.errors import AgentError
from core.kube.errors import ConflictError, NotFoundError
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import NODE_LABEL, label_value
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.leader.index import Entry, TransferIndex, build_entry
from nodeagent.leader.live_agents import LiveAgents, choose_node, count_accepted
from nodeagent.leader.recovery.absent_agents import AbsentAgents, node_of
from nodeagent.leader.recovery.node_health import NodeHealth
from nodeagent.runtime.tasks import Faults
from nodeagent.runtime.workqueue import Requeue, WorkQueue
from nodeagent.transfers.cleanup import CleanUp
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import MoverLogs, pod_node, read_mover
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import Change

__all__ = ["OrphanRecovery", "OwnerState", "RecoveryAction", "decide_recovery"]


_log = logging.getLogger(__name__)


class RecoveryAction(Enum):
    """What a load needs from the dispatcher."""

    NOTHING = auto()
    ADOPT = auto()
    """It was accepted, but not by one of ours: give it the label of the node that has it."""
    REASSIGN = auto()
    """Its accepting agent is gone: give it to another."""
    END = auto()
    """The node that has it is lost: end it, unless there is a result that another agent can take."""
    AWAIT = auto()
    """Only the agent that is away can go on with it: say so, and heed cancel and timeout."""
    WELCOME = auto()
    """Its agent is back: take back what was said."""
    EXPLAIN = auto()
    """It cannot be read: say which fields are wrong."""
    CLEAN_UP = auto()
    """It is final and nobody else removes what was made for it."""


@dataclass(frozen=True)
class OwnerState:
    """The state of a load's owner.

    `away`: the agent under its label is gone for long enough. `node_lost`: its node counts as
    lost. `bound`: only that node can carry it out, from the beginning.
    """

    away: bool
    node_lost: bool
    bound: bool


def decide_recovery(entry: Entry, owner: OwnerState) -> RecoveryAction:
    """Return what a load needs."""
    if entry.fault and not entry.node_label:
        return RecoveryAction.EXPLAIN
    if not entry.managed or entry.phase is Phase.NEW:
        return RecoveryAction.NOTHING
    ownerless = not entry.node_label or owner.away or owner.node_lost
    if entry.phase.final:
        return RecoveryAction.CLEAN_UP if entry.finalizer and ownerless else RecoveryAction.NOTHING
    if not entry.node_label:
        return RecoveryAction.ADOPT
    if not ownerless:
        return RecoveryAction.WELCOME if entry.reason == PendingReason.AGENT_UNAVAILABLE else RecoveryAction.NOTHING
    if entry.phase is Phase.ACCEPTED and not owner.bound:
        return RecoveryAction.REASSIGN
    return RecoveryAction.END if owner.node_lost else RecoveryAction.AWAIT


_SWEEP_SECONDS: Final = 5.0
"""Between looks at what is in memory; they cost no request."""


_GONE_AFTER_SECONDS: Final = 30.0
"""An agent that restarts is back by then and goes on with its own loads."""


_AWAY_LOOK_SECONDS: Final = 30.0
"""Between looks at a load whose agent is away: a cancel or a timeout may be due."""


_REFUSED_PAUSE_SECONDS: Final = 60.0
"""After an error that trying again does not heal."""


_WORKERS: Final = 4


class OrphanRecovery:
    """Looks after ownerless loads while this agent leads."""

    def __init__(self, tools: DispatchTools, rules: DispatchRules, index: TransferIndex, *, agents: LiveAgents) -> None:
        """Look after the loads in `index`, given the live `agents`."""
        self._tools = tools
        self._kinds: Mapping[str, Kind] = {kind.name: kind for kind in rules.kinds}
        self._index = index
        self._agents = agents
        self._nodes = NodeHealth(tools.client, tools.clock, gone_after=rules.node_gone_after)
        self._absent = AbsentAgents(tools, rules, self._choose)
        self._waits = PendingRecords(tools.clock)
        self._cleaner = CleanUp(tools.clock, tools.status, tools.events, self._waits, rules.resource_timeout)
        self._logs = MoverLogs(tools.client)
        self._last_error = ""
        self._not_before: dict[tuple[str, str, str], float] = {}
        self._explained: set[str] = set()
        self._faults = Faults(_log)
        self._queue: WorkQueue[tuple[str, str, str]] = WorkQueue(tools.clock, name="orphans", workers=_WORKERS)

    def report(self) -> JsonDict:
        """Return for the status page how many loads need what, what clean-ups wait for, and the last error."""
        cared = [
            (entry, care)
            for entry in self._index.entries()
            if (care := self._care_of(entry)) is not RecoveryAction.NOTHING
        ]
        waits = {self._waits.message(entry.uid) for entry, care in cared if care is RecoveryAction.CLEAN_UP}
        return {
            "loads": dict(Counter(care.name for _, care in cared)),
            "waitsFor": sorted(waits - {""}),
            "lastError": self._last_error,
        }

    async def run(self) -> None:
        """Look after them until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run(self._handle), name="orphans at work")
            group.create_task(self._nodes.run(), name="node health")
            while True:
                self._sweep()
                await self._tools.clock.sleep(_SWEEP_SECONDS)

    def _sweep(self) -> None:
        """Enqueue what needs care; a load that waits for its agent now and then only."""
        now = self._tools.clock.monotonic()
        self._not_before = {key: at for key, at in self._not_before.items() if at > now}
        for entry in self._index.entries():
            care = self._care_of(entry)
            later = care is RecoveryAction.AWAIT and entry.key in self._not_before
            told = care is RecoveryAction.EXPLAIN and entry.uid in self._explained
            if care is not RecoveryAction.NOTHING and not later and not told:
                self._queue.add(entry.key)

    def _care_of(self, entry: Entry) -> RecoveryAction:
        label = entry.node_label
        owner = OwnerState(
            away=bool(label) and self._agents.seconds_gone(label) >= _GONE_AFTER_SECONDS,
            node_lost=bool(label) and bool(self._nodes.explain_loss(label, label)),
            bound=self._kinds[entry.kind].bound_to_node,
        )
        return decide_recovery(entry, owner)

    async def _handle(self, key: tuple[str, str, str]) -> Requeue | None:
        """Do for one load what it needs, as it is now."""
        kind = self._kinds[key[0]]
        told = fields(kind=key[0], namespace=key[1], name=key[2])
        try:
            raw = await self._tools.client.read(kind.resource, key[1], key[2])
            if raw is None:
                return None
            entry = build_entry(kind, raw)
            care = self._care_of(entry)
            if care is RecoveryAction.NOTHING:
                return None
            self._tools.check_leading()
            if care is RecoveryAction.EXPLAIN:
                self._explained.add(entry.uid)
                await self._tools.events.record_warning(raw, "Unreadable", entry.fault)
                return None
            requeue = await self._give(care, kind, kind.parse(raw))
        except (ConflictError, NotFoundError) as e:
            # The next sweep sees what became of it.
            _log.debug("looked at again: %s", e, extra=told)
        except AgentError as e:
            self._last_error = f"{kind.name} {key[1]}/{key[2]}: {e}"
            if e.retry:
                raise
            self._faults.report(key, "a load without an owner could not be looked after", e, extra=told)
            return Requeue(_REFUSED_PAUSE_SECONDS)
        else:
            self._faults.forget(key)
            return requeue
        return None

    async def _give(self, care: RecoveryAction, kind: Kind, cr: Transfer) -> Requeue | None:
        match care:
            case RecoveryAction.ADOPT:
                await self._adopt(kind, cr)
            case RecoveryAction.REASSIGN:
                await self._reassign(kind, cr)
            case RecoveryAction.END:
                # The cache may lag behind, and an end is for good.
                if why := await self._nodes.confirm_loss(await node_of(kind, cr)):
                    await self._absent.end(kind, cr, why)
            case RecoveryAction.AWAIT:
                key = (kind.name, cr.metadata.namespace, cr.name)
                self._not_before[key] = self._tools.clock.monotonic() + _AWAY_LOOK_SECONDS
                gone_seconds = self._agents.seconds_gone(cr.metadata.labels.get(NODE_LABEL, ""))
                await self._absent.wait_for_agent(kind, cr, away_for=timedelta(seconds=gone_seconds))
            case RecoveryAction.WELCOME:
                await self._absent.welcome(kind, cr)
            case RecoveryAction.CLEAN_UP:
                return await self._clean_up(kind, cr)
        return None

    async def _clean_up(self, kind: Kind, cr: Transfer) -> Requeue | None:
        """Take the next step of the clean-up, its mover's log first: the agent that would take it over is away."""
        if NODE_LABEL in cr.metadata.labels:
            pod = await read_mover(self._tools.client, cr)
            node = "" if pod is None else pod_node(pod)
            # The kubelet of a lost node would only be waited for.
            if not self._nodes.explain_loss(label_value(node), node):
                await self._logs.take_over(cr, pod)
        requeue = await self._cleaner.step(kind, cr)
        if requeue is None:
            self._logs.forget(cr.uid)
        return requeue

    async def _adopt(self, kind: Kind, cr: Transfer) -> None:
        """Label a load with the node that has it; an Accepted one of nobody goes to a live agent."""
        node = cr.status.node or await self._pod_node(cr) or cr.status.accepted_by_node or await kind.read_node(cr)
        live = label_value(node) in self._agents.nodes()
        if cr.phase is Phase.ACCEPTED and not live and not kind.bound_to_node:
            await self._reassign(kind, cr)
            return
        if not node:
            await self._absent.end_nowhere(kind, cr)
            return
        stored = await self._tools.status.annotate(kind, cr, Change(labels={NODE_LABEL: label_value(node)}))
        await self._tools.events.record(stored, "Adopted", f"the agent of node {node} goes on with it")

    async def _reassign(self, kind: Kind, cr: Transfer) -> None:
        """Give an Accepted load to another agent; its prepare timeout runs on."""
        chosen = self._choose()
        if chosen is None or kind.bound_to_node:
            # Only the agent of its volume's node can do it: it is waited for.
            return
        label, node = chosen
        change = Change(status={"acceptedByNode": node}, labels={NODE_LABEL: label})
        stored = await self._tools.status.annotate(kind, cr, change)
        gone = cr.status.accepted_by_node or "another node"
        await self._tools.events.record(stored, "Reassigned", f"the agent of {gone} is gone; node {node} is to do it")

    async def _pod_node(self, cr: Transfer) -> str:
        """Return the node of the load's mover pod, empty where there is none."""
        pod = await read_mover(self._tools.client, cr)
        return "" if pod is None else pod_node(pod)

    def _choose(self) -> tuple[str, str] | None:
        """Return the node label and node of the live agent that has the least to do.

        The agent's pod on a node that was just removed reads as alive for a while.
        """
        live = self._agents.nodes()
        agents = {label: node for label, node in live.items() if not self._nodes.explain_loss(label, node)}
        label = choose_node(agents, count_accepted(self._index.entries()))
        return (label, agents[label]) if label is not None else None
