"""Builders of the PVCs of an expose: for a snapshot, for a restored volume and for a cache.

Does no I/O.
Source: Velero v1.18, pkg/exposer, as recorded in tests/recordings/velero-1.18.2/pvc-of-*.json;
Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go (annotations of a binding).
"""

from typing import Final

from core.contract import VolumeMode
from core.kube.types import Manifest, PersistentVolume, PersistentVolumeClaim
from core.models.names import OWNER_KIND_ANNOTATION, SELECTED_NODE_ANNOTATION
from core.models.units import parse_quantity
from exposer.model import Owner, SnapshotRequest
from exposer.settings import CacheVolume
from exposer.tenant_metadata import copy_annotations, copy_labels

__all__ = [
    "build_backup_claim",
    "build_cache_claim",
    "build_restore_claim",
    "cache_claim_name",
    "claim_for_one_pod",
    "claim_read_only",
    "claim_size_gib",
    "claim_volume_mode",
]

_BINDING_ANNOTATIONS: Final = (
    "pv.kubernetes.io/bind-completed",
    "pv.kubernetes.io/bound-by-controller",
    "volume.beta.kubernetes.io/storage-provisioner",
    "volume.kubernetes.io/storage-provisioner",
    SELECTED_NODE_ANNOTATION,
)
"""What controllers record on one PVC about its own volume; another PVC must not have it."""

_BYTES_IN_A_GIB: Final = 1 << 30

_READ_ONLY: Final = "ReadOnlyMany"
_ONE_POD: Final = "ReadWriteOncePod"

_COPIED_SPEC: Final = (
    "accessModes",
    "resources",
    "storageClassName",
    "volumeMode",
    "volumeAttributesClassName",
)
"""What a volume must match to be bound to the target PVC later."""


def claim_volume_mode(claim: PersistentVolumeClaim) -> VolumeMode:
    """Return the volume mode of a PVC; absent means Filesystem."""
    return VolumeMode(claim["spec"].get("volumeMode") or VolumeMode.FILESYSTEM)


def claim_for_one_pod(claim: PersistentVolumeClaim) -> bool:
    """Return whether a single pod may use the PVC."""
    return bool(claim["spec"].get("accessModes") == [_ONE_POD])


def claim_read_only(claim: PersistentVolumeClaim) -> bool:
    """Return whether the PVC's volume is read-only."""
    return bool(claim["spec"].get("accessModes") == [_READ_ONLY])


def cache_claim_name(owner: Owner) -> str:
    """Return the name of the cache PVC."""
    return f"{owner.name}-cache"


def build_backup_claim(request: SnapshotRequest, *, size: str, mode: VolumeMode) -> Manifest:
    """Return the PVC whose volume is provisioned from the backup VolumeSnapshot.

    `size` is a quantity.
    """
    settings = request.backup_pvc
    writable = _ONE_POD if settings.one_pod else "ReadWriteOnce"
    spec: Manifest = {
        "accessModes": [_READ_ONLY if settings.read_only else writable],
        "dataSource": {
            "apiGroup": "snapshot.storage.k8s.io",
            "kind": "VolumeSnapshot",
            "name": request.owner.name,
        },
        "resources": {"requests": {"storage": size}},
        # Absent, it would become the cluster's default class.
        "storageClassName": request.backup_class,
        "volumeMode": str(mode),
    }
    return _build_claim(request.owner, request.owner.name, spec, annotations=dict(settings.annotations))


def build_restore_claim(
    owner: Owner,
    target: PersistentVolumeClaim,
    *,
    node: str,
    excluded: tuple[str, ...],
    volume: PersistentVolume | None = None,
) -> Manifest:
    """Return a PVC like `target` (a v1 PersistentVolumeClaim as JSON dict) for `volume`; None: for a new one.

    It has neither the target's selector nor its data source nor its binding: the volume is
    provisioned empty. `node`: where the volume must be reachable; empty: anywhere. `excluded`: how
    the keys of annotations and labels begin that it does not get either.
    """
    annotations = copy_annotations(target, (*excluded, *_BINDING_ANNOTATIONS))
    if node:
        annotations[SELECTED_NODE_ANNOTATION] = node
    spec: Manifest = {key: target["spec"][key] for key in _COPIED_SPEC if key in target["spec"]}
    if volume is not None:
        spec |= {
            "volumeName": volume["metadata"]["name"],
            "storageClassName": volume["spec"].get("storageClassName", ""),
        }
    claim = _build_claim(owner, owner.name, spec, annotations=annotations)
    claim["metadata"]["labels"] = copy_labels(target, excluded) | owner.labels
    return claim


def claim_size_gib(claim: PersistentVolumeClaim) -> int:
    """Return the whole GiB that a PVC as JSON dict requests."""
    return int(parse_quantity(claim["spec"]["resources"]["requests"]["storage"])) // _BYTES_IN_A_GIB


def build_cache_claim(owner: Owner, cache: CacheVolume, *, node: str) -> Manifest:
    """Return the PVC of a restore's cache; `node` as for the restore PVC."""
    spec: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{cache.size_gib}Gi"}},
        "storageClassName": cache.storage_class,
        "volumeMode": str(VolumeMode.FILESYSTEM),
    }
    annotations = {SELECTED_NODE_ANNOTATION: node} if node else {}
    return _build_claim(owner, cache_claim_name(owner), spec, annotations=annotations)


def _build_claim(owner: Owner, name: str, spec: Manifest, *, annotations: dict[str, str]) -> Manifest:
    """Return a PVC without an owner reference.

    By that Kubernetes would delete it together with its custom resource, and with it the only name of
    a volume that is retained, or still being created.
    """
    meta: Manifest = {
        "name": name,
        "namespace": owner.namespace,
        "labels": owner.labels,
        "annotations": annotations | {OWNER_KIND_ANNOTATION: owner.kind},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
