"""How many loads a node may move data of at a time.

Knows how `loadConcurrency` and a node's labels make one number, and where the labels of this
and of other nodes come from. Does not know the loads (`nodeagent.concurrency`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import NODES
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.models import LoadConcurrency
from nodeagent.runtime.informer import Informer

__all__ = ["OwnSlots"]


_log = logging.getLogger(__name__)


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
            group.create_task(self._informer.run_despite_refusals(self._go_without), name="labels of the node")
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
