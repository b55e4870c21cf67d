"""The slots of a node: how many transfers may be InProgress at a time, and which one is next.

Knows the transfers of this node that hold a slot or are pending for one, as they were last
observed, and how the number follows `loadConcurrency` and the labels of the node. Does not know
the cluster beyond those labels: `nodeagent.node.reconciler` passes in what it observes.
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
from core.models.phases import RUNNING_PHASES, Phase
from core.models.transfers import Transfer
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.keys import LoadConcurrency
from nodeagent.runtime.informer import Informer

__all__ = ["OwnSlots", "SlotRequest", "Slots"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class SlotRequest:
    """A transfer that is pending for a slot; sorted by the time of its accept, then by name.

    `key` is the transfer's key in the work queue.
    """

    accepted_at: datetime
    key: tuple[str, str, str]
    uid: str

    @classmethod
    def of(cls, cr: Transfer, *, now: datetime) -> Self:
        """Return the request of `cr`; `now` stands for an unknown time of its accept."""
        return cls(cr.accepted_at or now, (cr.kind_name, cr.metadata.namespace, cr.name), cr.uid)


class Slots:
    """At most `limit` transfers of a node hold a slot; all kinds share them.

    A slot is held until its transfer is observed in a final phase or disappears, or its attempt is interrupted: an
    outdated observation of an earlier phase frees nothing.
    """

    def __init__(self, limit: int) -> None:
        """Begin with `limit` free slots."""
        self._limit = limit
        self._pending: dict[str, SlotRequest] = {}
        self._holders: set[str] = set()

    @property
    def limit(self) -> int:
        """The number of slots."""
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Change the number of slots; transfers that hold one keep it."""
        self._limit = limit

    @property
    def used(self) -> int:
        """The number of slots in use; more than `limit` after that was lowered."""
        return len(self._holders)

    @property
    def pending(self) -> int:
        """The number of transfers that are pending for a slot."""
        return len(self._pending)

    def is_full_for(self, request: SlotRequest) -> bool:
        """Return whether every slot is in use, or pending for by a transfer that precedes `request`."""
        return self.used + sum(other < request for other in self._pending.values()) >= self._limit

    def observe(self, request: SlotRequest, phase: Phase) -> None:
        """Record that the transfer of `request` was observed in `phase`."""
        if phase in RUNNING_PHASES:
            self._pending.pop(request.uid, None)
            self._holders.add(request.uid)
        elif phase.final:
            self.release(request.uid)
        elif phase is Phase.PREPARED and request.uid not in self._holders:
            self._pending[request.uid] = request

    def release(self, uid: str) -> None:
        """Free the slot of a transfer, or drop its request: it is final, or no longer this node's."""
        self._pending.pop(uid, None)
        self._holders.discard(uid)

    def withdraw(self, uid: str) -> None:
        """Drop the request of a transfer: it has no mover that could start. A slot that it holds stays."""
        self._pending.pop(uid, None)

    def is_available_to(self, uid: str) -> bool:
        """Return whether that transfer holds a slot, or is among the first for which one is free."""
        return uid in self._holders or (uid in self._pending and any(each.uid == uid for each in self.next_requests()))

    def acquire(self, uid: str) -> bool:
        """Give that transfer a slot if one is available to it; return whether it holds one."""
        if not self.is_available_to(uid):
            return False
        self._pending.pop(uid, None)
        self._holders.add(uid)
        return True

    def next_requests(self) -> list[SlotRequest]:
        """Return the requests for which a slot is free, in order."""
        free = self._limit - len(self._holders)
        if free <= 0 or not self._pending:
            return []
        return heapq.nsmallest(free, self._pending.values(), key=lambda request: (request.accepted_at, request.key))


class OwnSlots:
    """The number of slots of the agent's own node, which follows its labels and the configuration."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        node: str,
        *,
        concurrency: Callable[[], LoadConcurrency],
        on_number: Callable[[int], None],
    ) -> None:
        """Follow `node` while `run` is running.

        Args:
            client: reads the node; it is not read unless a rule selects by labels.
            clock: measures pauses.
            node: the node's name.
            concurrency: returns the active configuration; call `refresh` after a change.
            on_number: called with the node's number whenever it may have changed.
        """
        self._node = node
        self._concurrency = concurrency
        self._on_number = on_number
        self._changed = asyncio.Event()
        selection = Selection(NODES, field_selector=f"metadata.name={node}")
        # A Node that is deleted comes back with the same labels, or not at all: keep the last ones.
        self._labels: Mapping[str, str] = {}
        self._informer = Informer(client, selection, clock=clock, trim=labels_of, on_change=self._on_labels)

    async def run(self) -> None:
        """Follow the node until canceled; without the permission for it, the node has no labels."""
        while not self._concurrency().per_node_config:
            await self._changed.wait()
            self._changed.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run_despite_rejections(self._go_without), name="labels of the node")
            await self._informer.synced.wait()
            # A change during the first list was reported before the list was complete.
            self.refresh()

    @property
    def known(self) -> bool:
        """Whether the number is known, or follows from no labels."""
        return self._informer.synced.is_set() or not self._concurrency().per_node_config

    async def wait_known(self) -> None:
        """Return once the number is known: a number that is too high would start too many transfers."""
        if self._concurrency().per_node_config:
            await self._informer.synced.wait()
        self.refresh()

    def refresh(self) -> None:
        """Compute the number again."""
        self._changed.set()
        concurrency = self._concurrency()
        if self.known:
            self._on_number(resolve_slots(self._labels, concurrency))

    def _go_without(self, error: KubeError) -> None:
        _log.warning("cannot watch the labels of node %s, perNodeConfig ignored: %s", self._node, error)
        self._informer.synced.set()

    def _on_labels(self, labels: Mapping[str, str]) -> None:
        if labels != self._labels:
            self._labels = labels
            self.refresh()
