"""The node's half of an agent: builds its parts, runs them, and shares the bandwidth of the node among data movers.

A mover reads its share from an annotation on its custom resource (`datamover.bandwidth`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from core.clock import Clock
from core.errors import ContractError
from core.kube.errors import ConflictError, ForbiddenError, InvalidError, KubeError, NotFoundError
from core.models.base import JsonDict
from core.models.names import BANDWIDTH_ANNOTATION
from core.models.phases import RUNNING_PHASES, Uptime
from core.models.transfer_settings import BandwidthLimits
from core.models.transfers import Transfer
from nodeagent.config.own_keys import BandwidthKeys
from nodeagent.metrics import BANDWIDTH_LIMIT, Metrics
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.node.reconciler import Reconciler
from nodeagent.node.steps import OwnSlots, Slots, Tools
from nodeagent.startup import AgentParts
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.retries import PendingRecords
from nodeagent.transfers.status import Change, StatusWriter

_CHECK_SECONDS: Final = 4.0
"""Edits and windows take effect so soon; a mover learns of it by its watch."""


def share_limits(keys: BandwidthKeys, locations: Mapping[str, str], now: datetime) -> dict[str, BandwidthLimits]:
    """Return the limits of each transfer that runs, by its UID; `locations` has the BackupStorageLocation of each.

    A budget is divided by the transfers that share it, also where one of them uses less than its share.
    """
    own, node = keys.per_mover.at(now), keys.per_node.at(now)
    users = Counter(locations.values())
    shared = {name: _divide(budget.at(now), users[name]) for name, budget in keys.per_location.items() if name in users}
    of_node = _divide(node, len(locations))
    return {
        uid: _strictest([own, of_node, *([shared[location]] if location in shared else [])])
        for uid, location in locations.items()
    }


def _divide(limits: BandwidthLimits, users: int) -> BandwidthLimits:
    def share(rate: int) -> int:
        return max(1, rate // users) if rate and users else rate

    return BandwidthLimits(
        upload_bytes_per_second=share(limits.upload_bytes_per_second),
        download_bytes_per_second=share(limits.download_bytes_per_second),
    )


def _strictest(limits: Sequence[BandwidthLimits]) -> BandwidthLimits:
    return BandwidthLimits(
        upload_bytes_per_second=min(filter(None, [one.upload_bytes_per_second for one in limits]), default=0),
        download_bytes_per_second=min(filter(None, [one.download_bytes_per_second for one in limits]), default=0),
    )


@dataclass(frozen=True)
class NodeBandwidth:
    """Keeps the limits on the node's running transfers current; `keys` returns the active configuration."""

    clock: Clock
    cache: TransferCache
    status: StatusWriter
    kinds: Mapping[str, Kind[Any]]
    metrics: Metrics
    keys: Callable[[], BandwidthKeys | None]

    def annotations(self, cr: Transfer) -> dict[str, str | None]:
        """Return the annotation of a transfer whose data path is about to start, if it has limits."""
        keys = self.keys()
        if keys is None:
            return {}
        running = {one.uid: one.spec.backup_storage_location for one in self._running()}
        limits = share_limits(keys, running | {cr.uid: cr.spec.backup_storage_location}, self.clock.now())
        return {BANDWIDTH_ANNOTATION: limits[cr.uid].to_json()}

    async def run(self) -> None:
        """Follow configuration, windows and the number of movers until canceled."""
        while True:
            await self.refresh()
            await self.clock.sleep(_CHECK_SECONDS)

    async def refresh(self) -> None:
        """Write what has changed; a transfer whose data path started without limits has no proxy, and gets none."""
        running = self._running()
        keys, now = self.keys() or BandwidthKeys(), self.clock.now()
        of_node = keys.per_node.at(now)
        self.metrics.set(BANDWIDTH_LIMIT, of_node.upload_bytes_per_second, "upload")
        self.metrics.set(BANDWIDTH_LIMIT, of_node.download_bytes_per_second, "download")
        wanted = share_limits(keys, {one.uid: one.spec.backup_storage_location for one in running}, now)
        for cr in running:
            limits = BandwidthLimits.from_annotations(cr.metadata.annotations)
            if limits is None or limits == wanted[cr.uid]:
                continue
            change = Change(annotations={BANDWIDTH_ANNOTATION: wanted[cr.uid].to_json()})
            try:
                await self.status.annotate(self.kinds[cr.kind_name], cr, change)
            except (ConflictError, NotFoundError, ForbiddenError, InvalidError, ContractError):
                # It has just changed, or it alone is rejected or invalid: the next round sees how.
                continue
            except KubeError:
                # Nothing is lost: it is written again.
                return

    def report(self) -> JsonDict:
        """Return the limits of the running transfers for `/status`, by kind and name; no key: none are set."""
        found = {
            f"{cr.kind_name}/{cr.name}": limits.to_wire()
            for cr in self._running()
            if (limits := BandwidthLimits.from_annotations(cr.metadata.annotations)) is not None
        }
        return {"bandwidth": found} if found else {}

    def _running(self) -> list[Transfer]:
        """Return the transfers whose data movers may move data; another attempt gets its share when it starts."""
        return [cr for cr in self.cache.transfers() if cr.phase in RUNNING_PHASES and not cr.interrupted]


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
    """Return the node's half, not running."""
    client, clock, settings = parts.client, parts.clock, parts.spec.settings
    current = parts.live.current
    host_pods = parts.spec.template.host_pods
    site = Site(node=settings.node_name, namespace=parts.spec.namespace, host_pods=host_pods)
    cache = TransferCache(client, clock, site, kinds=parts.kinds)
    status = StatusWriter(client, parts.skew.now, on_stored=[cache.observe_written])
    by_name = {kind.spec.name: kind for kind in parts.kinds}
    bandwidth = NodeBandwidth(clock, cache, status, by_name, parts.metrics, lambda: current.config.own.budgets)
    reconciler = Reconciler(
        Tools(
            site=site,
            limits=Timeouts(prepare=settings.prepare_timeout, resource=settings.resource_timeout),
            client=client,
            clock=clock,
            cache=cache,
            pending=PendingRecords(clock),
            status=status,
            events=parts.events,
            logs=MoverLogs(client),
            progress=ProgressFollower(client, clock, site, status=status, metrics=parts.metrics),
            slots=Slots(current.config.load_concurrency.global_config),
            metrics=parts.metrics,
            retry_rules=current.retry_rules,
            api_time=parts.skew.now,
            uptime=_read_uptime,
            starting=bandwidth.annotations,
        ),
        parts.kinds,
    )
    own_slots = OwnSlots(
        client, clock, settings.node_name, concurrency=current.load_concurrency, on_number=reconciler.set_slots
    )
    current.subscribe(own_slots.refresh)
    return Node(cache, reconciler, own_slots, bandwidth)


def _read_uptime() -> Uptime:
    """Return this node's. Source: random(4), clock_gettime(2); a container has the boot ID of its machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Uptime(boot=boot, seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
