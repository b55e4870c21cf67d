"""What configuration asks of mover pods and their volumes, as exposers get it.

Knows parameters and their defaults. Does not know where they are written down: exposers read
no configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from core.models.base import JsonDict
from exposer.placement import PlacementRules
from exposer.template import AgentTemplate

__all__ = ["BackupPVCSettings", "CacheRule", "CacheVolume", "ExposeSettings", "MoverOptions", "PodSettings"]


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
class ExposeSettings:
    """All settings of an expose: what every mover pod inherits, its configuration, and the rules for volumes.

    `backup_pvcs` are keyed by the storage class of the source. A `cache` of None: no restore gets a
    cache volume.
    """

    template: AgentTemplate
    pod: PodSettings = field(default_factory=PodSettings)
    mover: MoverOptions = field(default_factory=MoverOptions)
    nodes: PlacementRules = field(default_factory=PlacementRules)
    backup_pvcs: Mapping[str, BackupPVCSettings] = field(default_factory=dict)
    ignore_delay_binding: bool = False
    cache: CacheRule | None = None

    def mover_options(self, operation_timeout: timedelta | None = None) -> MoverOptions:
        """Return the mover's options; the custom resource's own `operation_timeout` takes precedence.

        Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go: their movers get
        the operation timeout as `--resource-timeout`.
        """
        return self.mover if operation_timeout is None else replace(self.mover, resource_timeout=operation_timeout)

    def backup_pvc(self, storage_class: str) -> BackupPVCSettings:
        """Return the settings of the backup PVC for a source of `storage_class`."""
        return self.backup_pvcs.get(storage_class) or BackupPVCSettings()

    def cache_for(self, snapshot_bytes: int) -> CacheVolume | None:
        """Return the cache volume for a restore of `snapshot_bytes`; 0: the size is unknown."""
        return self.cache.volume_for(snapshot_bytes) if self.cache else None
