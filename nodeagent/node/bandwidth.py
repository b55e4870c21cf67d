"""The bandwidth of the data movers of a node: its budgets are shared fairly by those that run.

Knows which transfers run and what the configuration allows. Does not know how a mover limits itself
(`datamover.bandwidth`), which reads the annotation on its custom resource.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from core.clock import Clock
from core.kube.errors import ConflictError, KubeError, NotFoundError
from core.models.base import JsonDict
from core.models.names import BANDWIDTH_ANNOTATION
from core.models.phases import RUNNING_PHASES
from core.models.transfer_settings import BandwidthLimits
from core.models.transfers import Transfer
from nodeagent.config.own_keys import BandwidthKeys
from nodeagent.metrics import BANDWIDTH_LIMIT, Metrics
from nodeagent.node.cache import TransferCache
from nodeagent.transfers.kinds.base import NodeKind
from nodeagent.transfers.status import Change, StatusWriter

__all__ = ["NodeBandwidth", "share_limits"]

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


def _strictest(limits: Iterable[BandwidthLimits]) -> BandwidthLimits:
    uploads, downloads = [], []
    for one in limits:
        uploads.append(one.upload_bytes_per_second)
        downloads.append(one.download_bytes_per_second)
    return BandwidthLimits(
        upload_bytes_per_second=min(filter(None, uploads), default=0),
        download_bytes_per_second=min(filter(None, downloads), default=0),
    )


@dataclass(frozen=True)
class NodeBandwidth:
    """Keeps the limits on the node's running transfers current; `keys` returns the active configuration."""

    clock: Clock
    cache: TransferCache
    status: StatusWriter
    kinds: Mapping[str, NodeKind[Any]]
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
            limits = BandwidthLimits.of(cr.metadata.annotations)
            if limits is None or limits == wanted[cr.uid]:
                continue
            change = Change(annotations={BANDWIDTH_ANNOTATION: wanted[cr.uid].to_json()})
            try:
                await self.status.annotate(self.kinds[cr.kind_name], cr, change)
            except (ConflictError, NotFoundError):
                # It has just changed: the next round sees how.
                continue
            except KubeError:
                # Nothing is lost: it is written again.
                return

    def report(self) -> JsonDict:
        """Return the limits of the running transfers for `/status`, by kind and name; no key: none are set."""
        found = {
            f"{cr.kind_name}/{cr.name}": limits.to_wire()
            for cr in self._running()
            if (limits := BandwidthLimits.of(cr.metadata.annotations)) is not None
        }
        return {"bandwidth": found} if found else {}

    def _running(self) -> list[Transfer]:
        found = (self.cache.transfer(key) for key in self.cache.transfer_keys())
        return [cr for cr in found if cr is not None and cr.phase in RUNNING_PHASES]
