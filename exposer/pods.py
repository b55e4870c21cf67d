"""Builders of the mover pods: backup, restore, pod volume, repository and location.

Each differs in arguments, volume, placement and tolerations; `exposer.pod_manifest` builds what they
share. `storage` is what the pod needs to reach the bucket of its location. Does no I/O.
"""

from dataclasses import replace
from typing import Final

from core.contract import BackupMover, MoverArgs, MoverVerb, VolumeMode
from core.kube.types import ClaimSource, Manifest, PersistentVolumeClaim
from core.models.compression import Compression
from core.models.names import (
    DATA_DOWNLOAD_LABEL,
    DATA_UPLOAD_LABEL,
    POD_VOLUME_BACKUP_LABEL,
    POD_VOLUME_RESTORE_LABEL,
)
from core.models.storage import BlockHash
from core.mover_specs import InitRepository, ValidateLocation
from exposer.claims import cache_claim_name, claim_for_one_pod, claim_read_only, claim_volume_mode
from exposer.model import LocatedVolume, Owner, PodVolumeRequest, RestoreRequest, SnapshotRequest
from exposer.placement import Placement
from exposer.pod_files import MoverVolume
from exposer.pod_manifest import MoverPod, build_mover_pod, complete_spec
from exposer.settings import CacheVolume, ExposeSettings, MoverOptions, StorageAccess

__all__ = [
    "build_backup_pod",
    "build_init_pod",
    "build_pod_volume_pod",
    "build_restore_pod",
    "build_validation_pod",
    "init_pod_name",
    "validation_pod_name",
]

_SNAPSHOT_GROUP: Final = "snapshot-exposer"
_RESTORE_GROUP: Final = "generic-restore-exposer"


def build_backup_pod(
    request: SnapshotRequest,
    claim: PersistentVolumeClaim,
    placement: Placement,
    *,
    storage: StorageAccess,
    excluded: str = "",
) -> Manifest:
    """Return the pod that backs up the volume created from a snapshot.

    `claim` is the backup PVC as created: settings may have changed since. `excluded` is what the annotation of the
    source PVC names.
    """
    owner, mode, read_only = request.owner, claim_volume_mode(claim), claim_read_only(claim)
    volume: ClaimSource = {"claimName": owner.name}
    if read_only:
        volume["readOnly"] = True
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=_choose_for_backup(
            _build_args(
                owner, MoverVerb.BACKUP, "data-upload", request.settings.mover_options(request.operation_timeout)
            ),
            request.settings,
            namespace=request.source_namespace,
            storage_class=request.storage_class,
            excluded=excluded,
        ),
        storage=storage,
        volume=MoverVolume({"persistentVolumeClaim": volume}, mode, read_only=read_only),
        label=DATA_UPLOAD_LABEL,
        group=_SNAPSHOT_GROUP,
        placement=placement,
        no_relabeling=read_only and request.backup_pvc.no_relabeling,
        label_at_mount=claim_for_one_pod(claim),
    )
    return build_mover_pod(plan, request.settings)


def build_restore_pod(
    request: RestoreRequest,
    mode: VolumeMode,
    *,
    placement: Placement,
    storage: StorageAccess,
    cache: CacheVolume | None = None,
) -> Manifest:
    """Return the pod that restores into a new volume; without a `cache` volume its cache is on the node."""
    owner = request.owner
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=replace(
            _build_args(
                owner,
                MoverVerb.RESTORE,
                "data-download",
                request.settings.mover_options(request.operation_timeout),
                cache,
            ),
            in_place=request.in_place,
        ),
        storage=storage,
        volume=MoverVolume({"persistentVolumeClaim": {"claimName": owner.name}}, mode),
        cache_claim=cache_claim_name(owner) if cache else "",
        label=DATA_DOWNLOAD_LABEL,
        group=_RESTORE_GROUP,
        placement=placement,
        tolerations=placement.tolerations,
    )
    return build_mover_pod(plan, request.settings)


def build_pod_volume_pod(
    request: PodVolumeRequest, located: LocatedVolume, *, storage: StorageAccess, cache: CacheVolume | None = None
) -> Manifest:
    """Return the pod that backs up or restores a volume where its workload pod has it mounted.

    It is bound to its node without the scheduler, since it can run nowhere else.
    Source: Velero v1.18, pkg/exposer/pod_volume.go.
    """
    owner, backup = request.owner, request.verb is MoverVerb.BACKUP
    kind_flag = "pod-volume-backup" if backup else "pod-volume-restore"
    args = replace(
        _build_args(owner, request.verb, kind_flag, request.settings.mover, cache), in_place=request.in_place
    )
    if backup:
        args = _choose_for_backup(
            args,
            request.settings,
            namespace=request.workload.namespace,
            storage_class=located.storage_class,
            excluded=located.excluded,
        )
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=args,
        storage=storage,
        # With this type a missing directory fails the mount, instead of being created empty.
        volume=MoverVolume(
            {"hostPath": {"path": located.directory, "type": "Directory"}},
            read_only=backup,
            propagation="HostToContainer",
        ),
        cache_claim=cache_claim_name(owner) if cache else "",
        label=POD_VOLUME_BACKUP_LABEL if backup else POD_VOLUME_RESTORE_LABEL,
        node=located.node,
        tolerations=located.tolerations,
        privileged=request.settings.pod.privileged_fs_backup,
    )
    return build_mover_pod(plan, request.settings)


def init_pod_name(owner: Owner) -> str:
    """Return the fixed name of a repository's init pod, so that no two run at a time."""
    return f"{owner.name}-init"


def build_init_pod(
    owner: Owner, settings: ExposeSettings, *, storage: StorageAccess, block_hash: BlockHash | None = None
) -> Manifest:
    """Return the pod that connects the repository of `owner`, a BackupRepository, or creates it with `block_hash`."""
    spec = complete_spec(InitRepository(block_hash=block_hash), owner, settings.mover)
    return build_mover_pod(MoverPod(owner, init_pod_name(owner), spec, storage), settings)


def validation_pod_name(owner: Owner) -> str:
    """Return the fixed name of the pod that validates a location, so that no two run at a time."""
    return f"{owner.name}-validation"


def build_validation_pod(owner: Owner, settings: ExposeSettings, *, storage: StorageAccess) -> Manifest:
    """Return the pod that validates `owner`, a BackupStorageLocation; it can only read the storage."""
    spec = complete_spec(ValidateLocation(), owner, settings.mover)
    return build_mover_pod(MoverPod(owner, validation_pod_name(owner), spec, storage), settings)


def _choose_for_backup(
    args: MoverArgs, settings: ExposeSettings, *, namespace: str, storage_class: str, excluded: str
) -> MoverArgs:
    """Return `args` with what the settings choose for backups of volumes of this namespace and class.

    `excluded` is what the annotation of the source PVC names.
    """
    compression, mover = settings.compression.of_class(storage_class), settings.backup_mover
    return replace(
        args,
        # Each data mover knows what an absent flag means.
        compression="" if compression is Compression.NONE else str(compression),
        mover="" if mover is BackupMover.PLAIN else str(mover),
        ignore_files=namespace in settings.ignore_files_namespaces,
        exclude=settings.exclusions.exclude(namespace, storage_class, excluded),
        read_all_files=namespace in settings.read_all_files_namespaces,
    )


def _build_args(
    owner: Owner, verb: MoverVerb, kind_flag: str, options: MoverOptions, cache: CacheVolume | None = None
) -> MoverArgs:
    """Return the arguments of the mover of `owner`, without its volume's."""
    return MoverArgs(
        verb=verb,
        kind_flag=kind_flag,
        resource_name=owner.name,
        cache_limit_mib=cache.limit_mib if cache else 0,
        attempt=owner.attempt,
        cluster=options.cluster if verb is MoverVerb.BACKUP else "",
        require_attributes=options.require_attributes and verb is MoverVerb.RESTORE,
        resource_timeout=options.resource_timeout,
        log_level=options.log_level,
        log_format=options.log_format,
    )
