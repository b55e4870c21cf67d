"""The node's slots: how many loads move data here at a time, and whose turn it is.

Knows the loads of this node that wait for a slot or hold one, as they were last seen. Does
not know the cluster; `nodeagent.node.reconciler` tells it what it sees.

How many loads a node may move data of at a time.

Knows how `loadConcurrency` and a node's labels make one number, and where the labels of this
and of other nodes come from. Does not know the loads (`nodeagent.node.slots`).
"""

import asyncio
import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import NODES
from core.models.phases import Phase
from core.models.transfers import Transfer
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.models import LoadConcurrency
from nodeagent.runtime.informer import Informer

__all__ = ["Claim", "OwnSlots", "Slots"]


_log = logging.getLogger(__name__)


_RUNNING = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})


@dataclass(frozen=True, order=True)
class Claim:
    """A load that waits for a slot; in order: first accepted first, then by name.

    `key` is the load's key in the work queue.
    """

    accepted_at: datetime
    key: tuple[str, str, str]
    uid: str

    @classmethod
    def of(cls, cr: Transfer, *, now: datetime) -> Self:
        """Return the claim of `cr`; `now` counts for one that nothing tells the age of."""
        return cls(cr.accepted_at or now, (cr.kind_name, cr.metadata.namespace, cr.name), cr.uid)


class Slots:
    """At most `limit` loads of a node hold a slot; one quota for all kinds.

    A slot that was taken stays taken until its load is seen final or gone: a late sight of
    an older phase frees nothing.
    """

    def __init__(self, limit: int) -> None:
        """Start with `limit` free slots."""
        self._limit = limit
        self._waiting: dict[str, Claim] = {}
        self._running: set[str] = set()

    @property
    def limit(self) -> int:
        """How many loads may hold a slot at a time."""
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Let so many loads hold a slot from now on; those that hold one keep it."""
        self._limit = limit

    @property
    def used(self) -> int:
        """How many loads hold a slot; more than `limit` where it was lowered meanwhile."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many loads wait for a slot."""
        return len(self._waiting)

    def has_none_for(self, claim: Claim) -> bool:
        """Whether each slot is held, or somebody waits for it who comes before `claim`."""
        return self.used + sum(waiting < claim for waiting in self._waiting.values()) >= self._limit

    def observe(self, claim: Claim, phase: Phase) -> None:
        """Note that the load of `claim` was seen in `phase`."""
        if phase in _RUNNING:
            self._waiting.pop(claim.uid, None)
            self._running.add(claim.uid)
        elif phase.final:
            self.forget(claim.uid)
        elif phase is Phase.PREPARED and claim.uid not in self._running:
            self._waiting[claim.uid] = claim

    def forget(self, uid: str) -> None:
        """Note that the load of that uid ended, or is no longer this node's."""
        self._waiting.pop(uid, None)
        self._running.discard(uid)

    def is_turn_of(self, uid: str) -> bool:
        """Whether that load holds a slot, or is among the first for whom one is free."""
        return uid in self._running or (uid in self._waiting and any(claim.uid == uid for claim in self.next_claims()))

    def take(self, uid: str) -> bool:
        """Take a slot for that load if it is its turn; return whether it holds one."""
        if not self.is_turn_of(uid):
            return False
        self._waiting.pop(uid, None)
        self._running.add(uid)
        return True

    def next_claims(self) -> list[Claim]:
        """Return the waiting loads for whom a slot is free, in order."""
        free = self._limit - len(self._running)
        if free <= 0 or not self._waiting:
            return []
        return heapq.nsmallest(free, self._waiting.values(), key=lambda claim: (claim.accepted_at, claim.key))


class OwnSlots:
    """The number of the agent's own node, which follows its labels and the configuration."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        node: str,
        *,
        concurrency: Callable[[], LoadConcurrency],
        on_number: Callable[[int], None],
    ) -> None:
        """Follow `node` while `run` goes on.

        Args:
            client: how the node is read; it is not while no rule asks for its labels.
            clock: what pauses are measured on.
            node: the node's name.
            concurrency: returns the configuration in force; call `refresh` when it changed.
            on_number: is called with the node's number whenever it may have changed.
        """
        self._node = node
        self._concurrency = concurrency
        self._on_number = on_number
        self._changed = asyncio.Event()
        selection = Selection(NODES, field_selector=f"metadata.name={node}")
        # The last known labels stand while a node is away: it comes back with them, or not at all.
        self._labels: Mapping[str, str] = {}
        self._informer = Informer(client, selection, clock=clock, trim=labels_of, on_change=self._on_labels)

    async def run(self) -> None:
        """Follow the node until canceled; where that is refused, its labels count as none."""
        while not self._concurrency().per_node_config:
            await self._changed.wait()
            self._changed.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run_despite_rejections(self._go_without), name="labels of the node")
            await self._informer.synced.wait()
            # A change that the first list told was not yet the whole list.
            self.refresh()

    async def wait_known(self) -> None:
        """Return once the number is known: nothing may be started by one that is too high."""
        if self._concurrency().per_node_config:
            await self._informer.synced.wait()
        self.refresh()

    def refresh(self) -> None:
        """Work the number out again."""
        self._changed.set()
        concurrency = self._concurrency()
        if self._informer.synced.is_set() or not concurrency.per_node_config:
            self._on_number(resolve_slots(self._labels, concurrency))

    def _go_without(self, error: KubeError) -> None:
        _log.warning("the labels of node %s cannot be watched, loadConcurrency goes without: %s", self._node, error)
        self._informer.synced.set()

    def _on_labels(self, labels: Mapping[str, str]) -> None:
        if labels != self._labels:
            self._labels = labels
            self.refresh()
