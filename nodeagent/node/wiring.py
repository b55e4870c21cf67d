"""The node's half of an agent: builds its parts and runs them.

Knows which parts exist and which need each other. Does not decide anything.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from core.models.base import JsonDict
from core.models.phases import Uptime
from nodeagent.node.bandwidth import NodeBandwidth
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.node.reconciler import Reconciler
from nodeagent.node.steps import OwnSlots, Slots, Tools
from nodeagent.startup import AgentParts
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.status import StatusWriter

__all__ = ["Node", "build_node"]


@dataclass(frozen=True)
class Node:
    """The node's half of an agent."""

    cache: TransferCache
    reconciler: Reconciler
    own_slots: OwnSlots
    bandwidth: NodeBandwidth

    async def run(self) -> None:
        """Run the transfers of this node until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.own_slots.run(), name="labels of the node")
            group.create_task(self._reconcile(), name="reconciler")
            group.create_task(self.bandwidth.run(), name="bandwidth")

    def not_ready(self) -> list[str]:
        """Return why this agent cannot accept transfers, for the readiness probe, if it cannot."""
        if missing := self.cache.not_synced():
            labels = [] if self.own_slots.known else ["labels of the node"]
            return [f"not synced: {', '.join([*labels, *missing])}"]
        return self.cache.outdated()

    def report(self) -> JsonDict:
        """Return the node's part of `/status`."""
        return self.reconciler.report() | self.bandwidth.report()

    async def _reconcile(self) -> None:
        await self.own_slots.wait_known()
        await self.reconciler.run()


def build_node(parts: AgentParts) -> Node:
    """Return the node's half, not running.

    Args:
        parts: the parts that both halves share.
    """
    client, clock, settings = parts.client, parts.clock, parts.spec.settings
    current = parts.live.current
    host_pods = parts.spec.template.host_pods
    site = Site(node=settings.node_name, namespace=parts.spec.namespace, host_pods=host_pods)
    cache = TransferCache(client, clock, site, kinds=parts.kinds)
    status = StatusWriter(client, clock, on_stored=[cache.observe_written])
    by_name = {kind.spec.name: kind for kind in parts.kinds}
    bandwidth = NodeBandwidth(clock, cache, status, by_name, parts.metrics, lambda: current.config.own.budgets)
    slots = Slots(current.config.load_concurrency.global_config)
    reconciler = Reconciler(
        Tools(
            client=client,
            clock=clock,
            status=status,
            events=parts.events,
            logs=MoverLogs(client),
            progress=ProgressFollower(client, clock, site, status=status, metrics=parts.metrics),
            slots=slots,
            metrics=parts.metrics,
            retry_rules=current.retry_rules,
            api_time=parts.skew.now,
            uptime=_read_uptime,
            starting=bandwidth.annotations,
        ),
        site,
        limits=Timeouts(prepare=settings.prepare_timeout, resource=settings.resource_timeout),
        kinds=parts.kinds,
        cache=cache,
    )

    def set_slots(number: int) -> None:
        slots.set_limit(number)
        reconciler.slots_changed()

    own_slots = OwnSlots(client, clock, settings.node_name, concurrency=current.load_concurrency, on_number=set_slots)
    current.subscribe(own_slots.refresh)
    return Node(cache, reconciler, own_slots, bandwidth)


def _read_uptime() -> Uptime:
    """Return this node's. Source: random(4), clock_gettime(2); a container has the boot ID of its machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Uptime(boot=boot, seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
