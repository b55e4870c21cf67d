"""Loads that have no live owner: the dispatcher stands in.

Knows which loads nobody works on, and brings them to somebody who does: a label where the
peer's agent left none, another agent where the accepting one is gone, clean-up where a load
is final. Does not admit loads (`nodeagent.dispatcher`).
"""

import asyncio
import logging
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from core.errors import AgentError
from core.kube.errors import ConflictError, NotFoundError
from core.kube.resources import PODS
from core.logs import fields
from core.models.loads import Load
from core.models.names import NODE_LABEL, OWNER_UID_LABEL, label_value
from core.models.phases import Phase
from nodeagent.admission_order import choose_node, count_accepted
from nodeagent.dispatch_rules import DispatchRules, DispatchTools
from nodeagent.faults import Faults
from nodeagent.kinds.base import Kind
from nodeagent.live_agents import LiveAgents
from nodeagent.load_index import Entry, LoadIndex, build_entry
from nodeagent.queue import Requeue, WorkQueue
from nodeagent.status import Change

__all__ = ["Care", "OrphanKeeper", "decide_care"]

_log = logging.getLogger(__name__)

_SWEEP_SECONDS: Final = 5.0
"""Between looks at what is in memory; they cost no request."""

_GONE_AFTER_SECONDS: Final = 30.0
"""An agent that restarts is back by then and goes on with its own loads."""

_CLEAN_UP_PAUSE_SECONDS: Final = 5.0
_REFUSED_PAUSE_SECONDS: Final = 60.0
"""After an error that trying again does not heal."""

_WORKERS: Final = 4


class Care(Enum):
    """What a load needs from the dispatcher."""

    NOTHING = auto()
    ADOPT = auto()
    """It was accepted, but not by one of ours: give it the label of the node that has it."""
    REASSIGN = auto()
    """Its accepting agent is gone: give it to another."""
    CLEAN_UP = auto()
    """It is final and nobody else removes what was made for it."""


def decide_care(entry: Entry, *, owner_gone: bool) -> Care:
    """Return what a load needs; `owner_gone`: the agent under its label is gone for long enough."""
    if not entry.managed or entry.phase is Phase.NEW:
        return Care.NOTHING
    ownerless = not entry.node_label or owner_gone
    if entry.phase.final:
        return Care.CLEAN_UP if entry.finalizer and ownerless else Care.NOTHING
    if not entry.node_label:
        return Care.ADOPT
    return Care.REASSIGN if owner_gone and entry.phase is Phase.ACCEPTED else Care.NOTHING


class OrphanKeeper:
    """Looks after ownerless loads while this agent leads."""

    def __init__(self, tools: DispatchTools, rules: DispatchRules, index: LoadIndex, *, agents: LiveAgents) -> None:
        """Look after the loads in `index`, given the live `agents`."""
        self._tools = tools
        self._kinds: Mapping[str, Kind] = {kind.name: kind for kind in rules.kinds}
        self._index = index
        self._agents = agents
        self._faults = Faults(_log)
        self._queue: WorkQueue[tuple[str, str, str]] = WorkQueue(tools.clock, name="orphans", workers=_WORKERS)

    async def run(self) -> None:
        """Look after them until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run(self._handle), name="orphans at work")
            while True:
                for entry in self._index.entries():
                    if self._care_of(entry) is not Care.NOTHING:
                        self._queue.add(entry.key)
                await self._tools.clock.sleep(_SWEEP_SECONDS)

    def _care_of(self, entry: Entry) -> Care:
        gone = bool(entry.node_label) and self._agents.seconds_gone(entry.node_label) >= _GONE_AFTER_SECONDS
        return decide_care(entry, owner_gone=gone)

    async def _handle(self, key: tuple[str, str, str]) -> Requeue | None:
        """Do for one load what it needs, as it is now."""
        kind = self._kinds[key[0]]
        told = fields(kind=key[0], namespace=key[1], name=key[2])
        try:
            raw = await self._tools.client.read(kind.resource, key[1], key[2])
            if raw is None:
                return None
            care = self._care_of(build_entry(kind, raw))
            if care is Care.NOTHING:
                return None
            self._tools.check_leading()
            requeue = await self._give(care, kind, kind.parse(raw))
        except (ConflictError, NotFoundError) as e:
            # The next sweep sees what became of it.
            _log.debug("looked at again: %s", e, extra=told)
        except AgentError as e:
            if e.retry:
                raise
            self._faults.tell(key, "a load without an owner could not be looked after", e, extra=told)
            return Requeue(_REFUSED_PAUSE_SECONDS)
        else:
            self._faults.forget(key)
            return requeue
        return None

    async def _give(self, care: Care, kind: Kind, cr: Load) -> Requeue | None:
        match care:
            case Care.ADOPT:
                await self._adopt(kind, cr)
            case Care.REASSIGN:
                await self._reassign(kind, cr)
            case Care.CLEAN_UP:
                return await self._clean_up(kind, cr)
        return None

    async def _adopt(self, kind: Kind, cr: Load) -> None:
        """Label a load with the node that has it; an Accepted one of nobody goes to a live agent."""
        node = cr.status.node or await self._pod_node(cr) or cr.status.accepted_by_node or await kind.read_node(cr)
        live = label_value(node) in self._agents.nodes()
        if cr.phase is Phase.ACCEPTED and not live and not kind.bound_to_node:
            await self._reassign(kind, cr)
            return
        if not node:
            _log.warning(
                "nothing tells which node has the load", extra=fields(kind=kind.name, name=cr.name, uid=cr.uid)
            )
            return
        stored = await self._tools.status.annotate(kind, cr, Change(labels={NODE_LABEL: label_value(node)}))
        await self._tools.story.tell(stored, "Adopted", f"the agent of node {node} goes on with it")

    async def _reassign(self, kind: Kind, cr: Load) -> None:
        """Give an Accepted load to another agent; its prepare timeout runs on."""
        agents = self._agents.nodes()
        label = choose_node(agents, count_accepted(self._index.entries()))
        if label is None or kind.bound_to_node:
            # Only the agent of its volume's node can do it: it is waited for.
            return
        node = agents[label]
        change = Change(status={"acceptedByNode": node}, labels={NODE_LABEL: label})
        stored = await self._tools.status.annotate(kind, cr, change)
        gone = cr.status.accepted_by_node or "another node"
        await self._tools.story.tell(stored, "Reassigned", f"the agent of {gone} is gone; node {node} is to do it")

    async def _pod_node(self, cr: Load) -> str:
        """Return the node of the load's mover pod, empty where there is none."""
        pod = await self._tools.client.read(PODS, cr.metadata.namespace, cr.name)
        if pod is None:
            return ""
        owned = any(owner["uid"] == cr.uid for owner in pod["metadata"].get("ownerReferences") or [])
        labelled = (pod["metadata"].get("labels") or {}).get(OWNER_UID_LABEL) == cr.uid
        return str((pod.get("spec") or {}).get("nodeName", "")) if owned or labelled else ""

    async def _clean_up(self, kind: Kind, cr: Load) -> Requeue | None:
        """Remove what was made for a final load, then all marks on it in one patch."""
        waiting = await kind.clean_up(cr)
        if waiting is not None:
            _log.debug("clean-up waits: %s", waiting.message, extra=fields(kind=kind.name, name=cr.name, uid=cr.uid))
            return Requeue(_CLEAN_UP_PAUSE_SECONDS)
        self._tools.check_leading()
        await self._tools.status.release(kind, cr)
        return None
