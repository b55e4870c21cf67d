"""What configuration asks of mover pods and their volumes, as exposers get it.

Knows parameters and their defaults. Does not know where they are written down: exposers read
no configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from core.models.base import JsonDict
from core.models.transfers import Transfer
from exposer.placement import PlacementRules
from exposer.template import AgentTemplate

__all__ = ["BackupPVCSettings", "CacheRule", "CacheVolume", "MoverOptions", "MoverPlan", "PlanSource", "PodSettings"]


_MIB_IN_A_GIB = 1024


@dataclass(frozen=True)
class PodSettings:
    """What is asked of every mover pod.

    `labels` and `annotations` replace the inherited ones; None or none at all keeps these.
    `tolerations` come on top of the inherited ones; `inherit_tolerations` takes all that the
    node agent's own pods have. `privileged_fs_backup` makes the movers of pod volumes privileged.
    """

    priority_class_name: str = ""
    resources: JsonDict = field(default_factory=dict)
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    tolerations: tuple[JsonDict, ...] = ()
    inherit_tolerations: bool = False
    privileged_fs_backup: bool = False


@dataclass(frozen=True)
class MoverOptions:
    """What a mover is told beside its volume and its custom resource."""

    resource_timeout: timedelta = timedelta(minutes=10)
    log_level: str = "info"
    log_format: str = "text"


@dataclass(frozen=True)
class BackupPVCSettings:
    """How the claim for a snapshot differs from its source; empty class: the source's.

    `no_relabeling` keeps SELinux labels of the volume as they are; it needs `read_only`.
    """

    storage_class: str = ""
    read_only: bool = False
    no_relabeling: bool = False
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheVolume:
    """A claim of its own for a restore's cache, in which kopia keeps up to `limit_mib`."""

    storage_class: str
    limit_mib: int

    @property
    def size_gib(self) -> int:
        """The size to ask for: a fifth more, for what kopia writes before it drops something, in whole GiB.

        Source: Velero v1.18, getCacheVolumeSize in pkg/exposer/cache_volume.go.
        """
        return -(-self.limit_mib * 12 // (10 * _MIB_IN_A_GIB))


@dataclass(frozen=True)
class CacheRule:
    """Which restores get a cache volume: those of snapshots of at least `threshold_mib`."""

    storage_class: str
    limit_mib: int
    threshold_mib: int = 0

    def volume_for(self, snapshot_bytes: int) -> CacheVolume | None:
        """Return the cache volume for a restore of so much data; 0: nobody knows how much.

        Source: Velero v1.18, getCacheVolumeSize in pkg/exposer/cache_volume.go.
        """
        if snapshot_bytes and snapshot_bytes < self.threshold_mib * _MIB_IN_A_GIB**2:
            return None
        return CacheVolume(self.storage_class, self.limit_mib)


@dataclass(frozen=True)
class MoverPlan:
    """What loads are exposed by: what every mover pod inherits, is given and is told, and the rules for volumes.

    `backup_pvcs` are by the storage class of the source. `cache` of None: no restore gets a
    cache volume.
    """

    template: AgentTemplate
    settings: PodSettings = field(default_factory=PodSettings)
    options: MoverOptions = field(default_factory=MoverOptions)
    nodes: PlacementRules = field(default_factory=PlacementRules)
    backup_pvcs: Mapping[str, BackupPVCSettings] = field(default_factory=dict)
    ignore_delay_binding: bool = False
    cache: CacheRule | None = None

    def options_for(self, cr: Transfer) -> MoverOptions:
        """Return what the mover of `cr` is told; the load itself may say how long one operation may take.

        Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go: their movers get
        the operation timeout as `--resource-timeout`.
        """
        span = cr.operation_timeout
        return self.options if span is None else replace(self.options, resource_timeout=span)

    def cache_for(self, snapshot_bytes: int) -> CacheVolume | None:
        """Return the cache volume for a restore of so much data; 0: nobody knows how much."""
        return self.cache.volume_for(snapshot_bytes) if self.cache else None


PlanSource = Callable[[], MoverPlan]
"""The plan in force now: configuration may change between two questions."""
