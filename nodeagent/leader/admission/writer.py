"""Accepts loads whose places are reserved, one after the other.

Knows the one write that makes a load Accepted, who is to do it, and how an accept whose answer
was lost is found out about. Does not know who is next (`nodeagent.leader.dispatcher`), nor how places
are reserved (`nodeagent.leader.admission.ledger`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from core.kube.errors import ConflictError
from core.models.names import NODE_LABEL, label_value
from core.models.phases import Phase
from core.models.transfers import Transfer
from nodeagent.leader.admission.examiner import Look
from nodeagent.leader.context import DispatchTools
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import choose_node
from nodeagent.runtime.tasks import attempt
from nodeagent.transfers.status import Change, without_marks

__all__ = ["Acceptance"]

_ACCEPT_SECONDS: Final = 10.0
"""For one accept: those behind it wait for it, since they are admitted in order."""

_STORIES_AT_A_TIME: Final = 8
"""Fewer than the client sends at a time (`nodeagent.runtime.rate_limit`): an accept never waits for all of them."""


class Acceptance:
    """Makes loads Accepted, and tells of each that was, once."""

    def __init__(
        self,
        tools: DispatchTools,
        agents: Callable[[], Mapping[str, str]],
        *,
        on_accepted: Callable[[Transfer], None],
    ) -> None:
        """Work with `tools`.

        Args:
            tools: what it works with.
            agents: returns the live agents' nodes, by node label.
            on_accepted: is called with each load that was accepted.
        """
        self._tools = tools
        self._agents = agents
        self._on_accepted = on_accepted
        self._unanswered: dict[str, Look] = {}
        self._stories = asyncio.Semaphore(_STORIES_AT_A_TIME)

    async def accept(self, looks: Sequence[Look], accepted: Counter[str]) -> None:
        """Accept one after the other, in order; what goes wrong keeps its place and is looked at again.

        Args:
            looks: loads that have a place each, as read before it was reserved.
            accepted: how many loads are Accepted, by node label; counted on.
        """
        async with asyncio.TaskGroup() as stories:
            for look in looks:
                agents = self._agents()
                label = label_value(look.node) if look.node else choose_node(agents, accepted)
                if label is None or label not in agents:
                    continue
                stored = await attempt(look.entry.log_fields, self._accept(look, agents[label]))
                if stored is not None:
                    accepted[label] += 1
                    self._on_accepted(stored)
                    # The next one is accepted meanwhile.
                    stories.create_task(self._tell(stored, agents[label]), name="accepted")

    def awaits(self, uid: str) -> bool:
        """Whether it is not known if the accept of that load was applied."""
        return uid in self._unanswered

    async def find_out(self, entries: Iterable[Entry]) -> None:
        """Tell of the accepts among `entries` that were applied although no answer came."""
        if not self._unanswered:
            return
        seen = {entry.uid: entry for entry in entries if entry.uid in self._unanswered}
        applied = [uid for uid in self._unanswered if uid in seen and seen[uid].phase is not Phase.NEW]
        for uid in [uid for uid in self._unanswered if uid not in seen]:
            del self._unanswered[uid]
        async with asyncio.TaskGroup() as stories:
            for uid in applied:
                look = self._unanswered.pop(uid)
                # Where another dispatcher accepted it, that one tells the same to nobody's harm.
                if not seen[uid].phase.final:
                    self._on_accepted(look.cr)
                    stories.create_task(self._tell(look.cr, seen[uid].node_label), name="accepted")

    async def _accept(self, look: Look, node: str) -> Transfer:
        """Accept one load by the version that was read before its place was reserved."""
        self._tools.check_leading()
        kind, meta = look.kind, look.cr.metadata
        change = Change(
            status={"acceptedByNode": node},
            labels={NODE_LABEL: label_value(node)},
            # The fence; and what somebody took along who made it from another load's manifest.
            annotations=without_marks(look.cr),
            finalizers=list(dict.fromkeys([*meta.finalizers, kind.finalizer])),
        )
        self._unanswered[look.entry.uid] = look
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                stored = await self._tools.status.move(kind, look.cr, Phase.ACCEPTED, change, again=False)
        except ConflictError:
            # That is an answer: nothing was written.
            del self._unanswered[look.entry.uid]
            raise
        del self._unanswered[look.entry.uid]
        return stored

    async def _tell(self, load: Transfer, node: str) -> None:
        async with self._stories:
            await self._tools.events.record(load, "Accepted", f"the agent of node {node} is to do it")
