"""Settings of exposes: mover pods, their volumes, and the metadata that is copied from tenants.

Exposers do not read the configuration; `nodeagent.config.expose_settings` builds these from it. Does no I/O.

CSI drivers and operators act on some annotations and labels of PVCs with the permissions of the agent's namespace: they
clone a PVC of the same namespace, or fetch data from an address. Those are left out, by prefix. What shapes a volume is
copied.
Source: NetApp Trident, "Import volumes" (docs.netapp.com, trident-use/vol-import); the annotations that
Containerized Data Importer documents for PVCs.
"""

import logging
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from functools import reduce
from operator import or_
from pathlib import PurePosixPath
from typing import Final, Literal, Self

from core.contract import MoverMethod
from core.kube.types import NodeRequirement, Object, PodToleration, Quantities, ResourceRequirements, VolumeSource
from core.models.names import EXCLUSIONS_ANNOTATION
from core.models.phases import InterruptionCause, RetryRules
from core.models.storage import BackupStorageLocation
from core.models.transfer_settings import Compression, Exclusions, read_patterns
from core.models.transfers import Transfer
from core.models.units import parse_quantity
from exposer.template import AgentTemplate

_log = logging.getLogger(__name__)

DEFAULT_EXCLUDED: Final = (
    "trident.netapp.io/cloneFrom",
    "trident.netapp.io/import",
    "trident.netapp.io/notManaged",
    "trident.netapp.io/shareFrom",
    "cdi.kubevirt.io/",
    "k8s.io/Clone",
    "cleanup.kyverno.io/",
    "janitor/",
    "app.kubernetes.io/instance",
    "applyset.kubernetes.io/",
    "argocd.argoproj.io/",
    "kapp.k14s.io/",
    "kubectl.kubernetes.io/",
    "meta.helm.sh/",
    "nodeagent.io/",
    "objectset.rio.cattle.io/",
)
"""How the keys begin that are left out unless the configuration replaces the list.

By the ones about cleanup, a copy would be deleted while it is used. The last eight name who manages the tenant's
object: Argo CD, for one, deletes a copy with its label, since it is declared nowhere and has no owner.
Source: Kyverno, "Cleanup label"; kube-janitor, README; argoproj/gitops-engine, pkg/cache/cluster.go.
"""


def read_exclusions(claim: Object | None) -> str | None:
    """Return what a tenant wants to leave out of the backups of a PVC, which counts only where that is allowed."""
    annotations = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    return annotations.get(EXCLUSIONS_ANNOTATION)


def copy_marks(obj: Object, field: Literal["labels", "annotations"], excluded: Iterable[str]) -> dict[str, str]:
    """Return the labels or annotations of a tenant's `obj` whose keys begin with none of `excluded`."""
    found = obj["metadata"].get(field) or {}
    prefixes = tuple(excluded)
    copied = {key: value for key, value in found.items() if not key.startswith(prefixes)}
    if left_out := sorted(found.keys() - copied.keys()):
        meta = obj["metadata"]
        place = f"{obj.get('kind', '')} {meta.get('namespace', '')}/{meta['name']}"
        _log.debug("did not copy %s of %s: %s", field, place, ", ".join(left_out))
    return copied


_MIB_IN_A_GIB = 1024

_LARGEST_GROWTH = 4
"""Of a memory limit without a configured maximum: more would keep the pod from being scheduled at last."""


@dataclass(frozen=True)
class PodSettings:
    """Settings of every mover pod.

    `service_account` is the movers' own; None: they inherit it from the node agent's pods.
    `labels` and `annotations` replace the inherited ones; None or an empty dict keeps them.
    `tolerations` are added to the inherited ones; `inherit_tolerations` inherits all tolerations of
    the node agent's pods. `privileged_fs_backup` makes the movers of pod volumes privileged.
    """

    service_account: str | None = None
    priority_class_name: str | None = None
    resources: ResourceRequirements = field(default_factory=ResourceRequirements)
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    tolerations: tuple[PodToleration, ...] = ()
    inherit_tolerations: bool = False
    privileged_fs_backup: bool = False

    @property
    def cache_room_mib(self) -> int | None:
        """What a limit of ephemeral storage leaves for kopia's cache, as in a cache volume; None: there is none."""
        limit = (self.resources.get("limits") or {}).get("ephemeral-storage")
        return max(1, int(parse_quantity(limit)) * 10 // 12 >> 20) if limit else None


@dataclass(frozen=True)
class StorageAccess:
    """What a mover pod inherits in order to reach the bucket; by default nothing.

    `inherits_credentials` is whether its location has no credentials of its own. `directory` is an absolute path in the
    pod that holds the repository; None: a bucket does. With `read_only` the pod cannot write to that directory.
    """

    inherits_credentials: bool = False
    directory: str | None = None
    read_only: bool = False

    @classmethod
    def of(cls, location: BackupStorageLocation) -> Self:
        """Return what the movers of the location need."""
        spec, in_directory = location.spec, is_in_directory(location)
        return cls(
            inherits_credentials=spec.credential is None and not in_directory,
            directory=spec.config.get(_DIRECTORY_KEY) or None if in_directory else None,
            read_only=location.read_only,
        )

    def is_below(self, path: str) -> bool:
        """Return whether the repository is in the directory `path`."""
        return self.directory is not None and PurePosixPath(posixpath.normpath(self.directory)).is_relative_to(path)


_DIRECTORY_PROVIDER: Final = "fs"
_DIRECTORY_KEY: Final = "fspath"
"""Source: Velero v1.18, GetBackendType in pkg/repository/config/config.go; its file system backend."""


def is_in_directory(location: BackupStorageLocation) -> bool:
    """Return whether the location is a directory in the file system of its movers."""
    return location.spec.provider.removeprefix("velero.io/") == _DIRECTORY_PROVIDER


@dataclass(frozen=True)
class RepositoryMount:
    """A shared volume with repositories in directories: a `v1.Volume` without its name, and where pods mount it."""

    mount_path: str
    source: VolumeSource


@dataclass(frozen=True)
class MoverOptions:
    """Arguments of a mover that do not depend on its volume or custom resource.

    `cluster` identifies the cluster in snapshots; None: it is not known. `require_attributes`: a restore fails if its
    target does not take owners, modes and times. `method` is how transfers run kopia.
    """

    resource_timeout: timedelta = timedelta(minutes=10)
    log_level: str = "info"
    log_format: str = "text"
    cluster: str | None = None
    require_attributes: bool = False
    method: MoverMethod = MoverMethod.ONE_OPEN


@dataclass(frozen=True)
class BackupPVCSettings:
    """Differences of a backup PVC from its source PVC; without a class, it has the source's.

    `no_relabeling` keeps the SELinux labels of the volume; it requires `read_only`. With `one_pod` a PVC that is not
    read-only may be used by a single pod, so that SELinux labels its volume at the mount. `copies` are the Secrets
    and ConfigMaps of the source's namespace that the driver needs beside the PVC, such as `Secret/token`.
    """

    storage_class: str | None = None
    read_only: bool = False
    one_pod: bool = False
    no_relabeling: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheVolume:
    """A PVC for the cache of a restore, in which kopia keeps up to `limit_mib`."""

    storage_class: str
    limit_mib: int

    @property
    def size_gib(self) -> int:
        """The requested size in whole GiB: a fifth more than the limit, since kopia exceeds it before it evicts.

        Source: Velero v1.18, getCacheVolumeSize in pkg/exposer/cache_volume.go.
        """
        return -(-self.limit_mib * 12 // (10 * _MIB_IN_A_GIB))

    def within(self, size_gib: int) -> "CacheVolume":
        """Return the cache that a PVC of this size has room for."""
        return replace(self, limit_mib=min(self.limit_mib, size_gib * _MIB_IN_A_GIB * 10 // 12))


@dataclass(frozen=True)
class CacheRule:
    """Restores with a cache volume: of backups of at least `threshold_mib`; none with a limit of 0."""

    storage_class: str
    limit_mib: int
    threshold_mib: int = 0


@dataclass(frozen=True)
class CompressionRules:
    """By which algorithm backups are compressed: by the storage class of the source, else the default one."""

    default: Compression = Compression.NONE
    by_class: Mapping[str, Compression] = field(default_factory=dict)

    def of_class(self, storage_class: str | None) -> Compression:
        """Return the algorithm for a source of `storage_class`; None: it has none."""
        return self.by_class.get(storage_class, self.default) if storage_class is not None else self.default


@dataclass(frozen=True)
class ExclusionRule:
    """What the volumes of some namespaces and storage classes leave out of backups; without any: of all."""

    exclude: Exclusions
    namespaces: frozenset[str] = frozenset()
    storage_classes: frozenset[str] = frozenset()

    def fits(self, namespace: str, storage_class: str | None) -> bool:
        """Return whether it is about a volume."""
        classes = not self.storage_classes or storage_class in self.storage_classes
        return classes and (not self.namespaces or namespace in self.namespaces)


@dataclass(frozen=True)
class ExclusionRules:
    """What volumes leave out of backups, and the namespaces in which the annotation of a PVC adds to it."""

    rules: tuple[ExclusionRule, ...] = ()
    annotation_namespaces: frozenset[str] = frozenset()

    def exclude(self, namespace: str, storage_class: str | None, annotation: str | None = None) -> str | None:
        """Return the exclusions of a volume as JSON; None: none. Invalid lines of an annotation have no effect."""
        fitting = [rule.exclude for rule in self.rules if rule.fits(namespace, storage_class)]
        if annotation and namespace in self.annotation_namespaces:
            fitting.append(Exclusions(patterns=read_patterns(annotation)))
        found = reduce(or_, fitting, Exclusions())
        return found.to_json() if found else None


Alternatives = tuple[tuple[NodeRequirement, ...], ...]
"""Sets of requirements on a node's labels, as in a pod's `matchExpressions`: one set must match."""


@dataclass(frozen=True)
class PlacementRule:
    """The nodes for transfers of a storage class; without a class: for those without a rule.

    `requirements` are entries of a pod's `matchExpressions`; all must match.
    """

    requirements: tuple[NodeRequirement, ...] = ()
    storage_class: str | None = None


@dataclass(frozen=True)
class PlacementRules:
    """All rules, in their order; `any_of` makes those for the same class alternatives."""

    rules: tuple[PlacementRule, ...] = ()
    any_of: bool = False

    def choose(self, storage_class: str | None) -> Alternatives:
        """Return the requirements on nodes for volumes of `storage_class`; empty: any node."""
        own = [rule for rule in self.rules if rule.storage_class == storage_class]
        found = own or [rule for rule in self.rules if not rule.storage_class]
        # Velero uses the first one and ignores the others.
        return tuple(rule.requirements for rule in (found if self.any_of else found[:1]))


@dataclass(frozen=True)
class ExposeSettings:
    """All settings of an expose: what every mover pod inherits, its configuration, and the rules for volumes.

    `excluded_metadata` is how the keys of tenants' annotations and labels begin that are not copied. `backup_pvcs` are
    keyed by the storage class of the source. A `cache` of None: no restore gets a cache volume. `repository_volumes`
    are mounted by the pods of a location whose directory is in them. In volumes of `ignore_files_namespaces`, files
    named `.kopiaignore` have an effect; in volumes of `read_all_files_namespaces`, backups also read files whose size
    and time are unchanged since the last one. Volumes of `block_classes` are preferably backed up by block.
    `exclusions` say what backups leave out. `restore_copies` are the Secrets and ConfigMaps of the target's namespace
    that the driver needs beside the PVC of a restore. `retries` are the rules of kinds with other than the default
    ones; only what they say about memory applies.
    """

    template: AgentTemplate
    pod: PodSettings = field(default_factory=PodSettings)
    mover: MoverOptions = field(default_factory=MoverOptions)
    nodes: PlacementRules = field(default_factory=PlacementRules)
    backup_pvcs: Mapping[str, BackupPVCSettings] = field(default_factory=dict)
    excluded_metadata: tuple[str, ...] = DEFAULT_EXCLUDED
    ignore_delay_binding: bool = False
    restore_copies: tuple[str, ...] = ()
    cache: CacheRule | None = None
    compression: CompressionRules = field(default_factory=CompressionRules)
    ignore_files_namespaces: frozenset[str] = frozenset()
    read_all_files_namespaces: frozenset[str] = frozenset()
    block_classes: frozenset[str] = frozenset()
    exclusions: ExclusionRules = field(default_factory=ExclusionRules)
    repository_volumes: tuple[RepositoryMount, ...] = ()
    retries: Mapping[str, RetryRules] = field(default_factory=dict)

    def for_attempt(self, cr: Transfer) -> "ExposeSettings":
        """Return the settings for the current attempt of `cr`: more memory for each one that ran out of it."""
        times = sum(one.cause is InterruptionCause.OUT_OF_MEMORY for one in cr.attempts.interruptions)
        if not times:
            return self
        resources = _grow_memory(self.pod.resources, self.retries.get(cr.kind_name) or RetryRules(), times)
        return replace(self, pod=replace(self.pod, resources=resources))

    def mover_options(self, operation_timeout: timedelta | None = None) -> MoverOptions:
        """Return the mover's options; the custom resource's own `operation_timeout` takes precedence.

        Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go: their movers get
        the operation timeout as `--resource-timeout`.
        """
        return self.mover if operation_timeout is None else replace(self.mover, resource_timeout=operation_timeout)

    def backup_pvc(self, storage_class: str) -> BackupPVCSettings:
        """Return the settings of the backup PVC for a source of `storage_class`."""
        return self.backup_pvcs.get(storage_class) or BackupPVCSettings()

    def cache_for(self, snapshot_bytes: int | None) -> CacheVolume | None:
        """Return the cache volume for a restore of `snapshot_bytes`; None: the size is unknown.

        Source: Velero v1.18, getCacheVolumeSize in pkg/exposer/cache_volume.go.
        """
        rule = self.cache
        if rule is None or (snapshot_bytes and snapshot_bytes < rule.threshold_mib * _MIB_IN_A_GIB**2):
            return None
        return CacheVolume(rule.storage_class, rule.limit_mib) if rule.limit_mib else None

    def repository_volume(self, storage: StorageAccess) -> RepositoryMount | None:
        """Return the shared volume that holds the repository; None: it is in no such volume."""
        holding = [volume for volume in self.repository_volumes if storage.is_below(volume.mount_path)]
        return max(holding, key=lambda volume: len(volume.mount_path), default=None)


def _grow_memory(resources: ResourceRequirements, rules: RetryRules, times: int) -> ResourceRequirements:
    """Return the `resources` of a container with a larger limit and request of memory; unchanged without a limit."""
    limit = (resources.get("limits") or {}).get("memory")
    if not limit:
        return resources
    before = parse_quantity(limit)
    most = parse_quantity(rules.oom_memory_limit_max) if rules.oom_memory_limit_max else before * _LARGEST_GROWTH
    factor = min(Decimal(str(rules.oom_memory_factor)) ** times, most / before)
    if factor <= 1:
        return resources
    grown = resources.copy()
    grown["limits"] = _grow(resources["limits"], factor)
    if requests := resources.get("requests"):
        grown["requests"] = _grow(requests, factor)
    return grown


def _grow(quantities: Quantities, factor: Decimal) -> Quantities:
    memory = quantities.get("memory")
    if memory is None:
        return quantities
    size_bytes = int(parse_quantity(memory) * factor)
    return quantities | {"memory": f"{size_bytes >> 20}Mi" if size_bytes >> 20 else str(size_bytes)}
