"""Builders and parsers of the PVCs, VolumeSnapshots and VolumeSnapshotContents of an expose.

Does no I/O. An annotation keeps what is needed of the source after its deletion.
Source: Velero v1.18, pkg/exposer, as recorded in tests/recordings/velero-1.18.2 (pvc-of-*.json, volumesnapshot*.json);
Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go (annotations of a binding); external-snapshotter v8,
pkg/utils/util.go (annotations of a content).
"""

import re
from contextlib import suppress
from typing import Final, cast

from core.contract import TrackedSnapshot, VolumeMode
from core.errors import ContractError, ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from core.kube.types import (
    Manifest,
    PersistentVolume,
    PersistentVolumeClaim,
    SnapshotError,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from core.models.base import SparseModel, parse_time
from core.models.names import MANAGED_BY_LABEL, OWNER_KIND_ANNOTATION, SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from core.models.units import parse_quantity
from exposer.model import Owner, Pending, SnapshotRequest
from exposer.settings import CacheVolume, copy_marks

_BINDING_ANNOTATIONS: Final = (
    "pv.kubernetes.io/bind-completed",
    "pv.kubernetes.io/bound-by-controller",
    "volume.beta.kubernetes.io/storage-provisioner",
    "volume.kubernetes.io/storage-provisioner",
    SELECTED_NODE_ANNOTATION,
)
"""What controllers record on one PVC about its own volume; another PVC must not have it."""

_WRITABLE: Final = "ReadWriteOnce"
READ_ONLY: Final = "ReadOnlyMany"
ONE_POD: Final = "ReadWriteOncePod"

_COPIED_SPEC: Final = ("accessModes", "resources", "storageClassName", "volumeMode", "volumeAttributesClassName")
"""What a volume must match to be bound to the target PVC later."""


def volume_mode(volume: PersistentVolume | PersistentVolumeClaim) -> VolumeMode:
    """Return the volume mode of a PersistentVolume or a PVC; absent means Filesystem."""
    return VolumeMode(volume["spec"].get("volumeMode") or VolumeMode.FILESYSTEM)


def build_claim_reference(namespace: str, name: str) -> Manifest:
    """Return the `claimRef` of a PersistentVolume that is reserved for that PVC."""
    return {"apiVersion": "v1", "kind": PERSISTENT_VOLUME_CLAIMS.kind, "namespace": namespace, "name": name}


def point_at_claim(namespace: str, name: str, uid: str | None = None) -> Manifest:
    """Return the patch of the `claimRef` of a PersistentVolume for that PVC; without a UID it is only reserved."""
    return build_claim_reference(namespace, name) | {"uid": uid, "resourceVersion": None}


def cache_claim_name(owner: Owner) -> str:
    """Return the name of the cache PVC."""
    return f"{owner.name}-cache"


def build_backup_claim(request: SnapshotRequest, *, size: str, mode: VolumeMode) -> Manifest:
    """Return the PVC that is provisioned from the backup VolumeSnapshot; `size` is a quantity, `mode` the source's."""
    settings = request.backup_pvc
    writable = ONE_POD if settings.one_pod else _WRITABLE
    mode = VolumeMode.BLOCK if request.by_block else mode
    spec = build_snapshot_spec(request.owner.name, request.backup_class, size=size, mode=mode)
    spec["accessModes"] = [READ_ONLY if settings.read_only else writable]
    return _build_claim(request.owner, request.owner.name, spec, annotations=dict(settings.annotations))


def build_snapshot_spec(snapshot: str, storage_class: str, *, size: str, mode: VolumeMode) -> Manifest:
    """Return the `spec` of a PVC that is provisioned from a VolumeSnapshot of its namespace; `size` is a quantity."""
    return {
        "accessModes": [_WRITABLE],
        "dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot},
        "resources": {"requests": {"storage": size}},
        # Absent, it would become the cluster's default class.
        "storageClassName": storage_class,
        "volumeMode": str(mode),
    }


def build_restore_claim(
    owner: Owner,
    target: PersistentVolumeClaim,
    *,
    node: str | None,
    excluded: tuple[str, ...],
    volume: PersistentVolume | None = None,
    by_block: bool = False,
) -> Manifest:
    """Return a PVC like `target` (a v1 PersistentVolumeClaim as JSON dict) for `volume`; None: for a new one.

    It has neither the target's selector nor its data source nor its binding: the volume is
    provisioned empty. `node`: where the volume must be reachable; None: anywhere. `excluded`: how
    the keys of annotations and labels begin that it does not get either. `by_block`: it is for a device.
    """
    annotations = copy_marks(target, "annotations", (*excluded, *_BINDING_ANNOTATIONS))
    if node:
        annotations[SELECTED_NODE_ANNOTATION] = node
    spec: Manifest = {key: target["spec"][key] for key in _COPIED_SPEC if key in target["spec"]}
    if by_block:
        spec["volumeMode"] = str(VolumeMode.BLOCK)
    if volume is not None:
        spec |= {
            "volumeName": volume["metadata"]["name"],
            "storageClassName": volume["spec"].get("storageClassName", ""),
        }
    claim = _build_claim(owner, owner.name, spec, annotations=annotations)
    claim["metadata"]["labels"] = copy_marks(target, "labels", excluded) | owner.temporary_labels
    return claim


_PROVISIONER_IDENTITY: Final = "storage.kubernetes.io/csiProvisionerIdentity"
"""An attribute of a volume: the process that created it, under its old name."""


def changed_name(volume: str) -> str:
    """Return the name of the PersistentVolume that replaces this one, with another volume mode."""
    return f"{volume}-fs"


def build_changed_volume(volume: PersistentVolume, *, fs_type: str | None) -> Manifest:
    """Return a PersistentVolume with the storage and all marks of `volume`, which has a file system instead.

    `fs_type` is None where that is not known. Neither mode nor handle of an existing one can change.
    Source: Velero main at d2241adba, RebindPV in pkg/util/kube/pvc_pv.go; Kubernetes v1.34,
    pkg/apis/core/validation (ValidatePersistentVolumeUpdate).
    """
    meta, spec = volume["metadata"], cast("Manifest", volume["spec"])
    spec = spec | {"volumeMode": str(VolumeMode.FILESYSTEM)}
    if csi := spec.get("csi"):
        attributes = csi.get("volumeAttributes") or {}
        kept = {key: value for key, value in attributes.items() if key != _PROVISIONER_IDENTITY}
        spec["csi"] = csi | {"volumeAttributes": kept} | ({"fsType": fs_type} if fs_type else {})
    copied = {key: meta.get(key) or {} for key in ("labels", "annotations")}
    return PERSISTENT_VOLUMES.build({"name": changed_name(meta["name"])} | copied, spec=spec)


def build_cache_claim(owner: Owner, cache: CacheVolume, *, node: str | None) -> Manifest:
    """Return the PVC of a restore's cache; `node` as for the restore PVC."""
    spec: Manifest = {
        "accessModes": [_WRITABLE],
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
        "labels": owner.temporary_labels,
        "annotations": annotations | {OWNER_KIND_ANNOTATION: owner.kind},
    }
    return PERSISTENT_VOLUME_CLAIMS.build(meta, spec=spec)


SOURCE_ANNOTATION: Final = "nodeagent.io/snapshot-source"
"""On the backup content: what is needed of the source after its deletion, as JSON."""

VOLUME_ANNOTATION: Final = "nodeagent.io/snapshot-volume"
"""On the backup content: the volumes created from its snapshot, one for each attempt, which must be deleted first."""

GROUP_ANNOTATION: Final = "nodeagent.io/snapshot-group"
"""On the backup content: the group of its snapshot, if the driver deletes the snapshots of a group only together."""

_MODE_CHANGE_ANNOTATION: Final = "snapshot.storage.kubernetes.io/allow-volume-mode-change"
"""On the backup content: a PVC from its snapshot may have another volume mode than the source.

Source: external-provisioner v5, pkg/controller/controller.go (getSnapshotSource); Velero main at d2241adba,
pkg/exposer/csi_snapshot.go (createBackupVSC), which sets it on every one.
"""

_CONTROLLER_ANNOTATIONS: Final = frozenset(
    {
        "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle",
        "snapshot.storage.kubernetes.io/volumesnapshot-being-created",
        "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted",
        SOURCE_ANNOTATION,
        VOLUME_ANNOTATION,
    }
)
"""Annotations about one content object; all others (the deletion secret's name, a driver's own)
describe the snapshot on the storage and are copied with its handle."""

_VSPHERE_CHANGE: Final = "csi.vsphere.volume/change-id"
_VSPHERE_SNAPSHOT: Final = "csi.vsphere.volume/snapshot"
"""The last one has the ID of the volume and, after a plus, the one of the snapshot."""

_SUFFIXES: Final = ((30, "Gi"), (20, "Mi"), (10, "Ki"))

_CONTROLLER_GROUPS: Final = ("snapshot.storage.kubernetes.io/", "groupsnapshot.storage.kubernetes.io/")
"""How the keys begin that snapshot controllers and sidecars set on a VolumeSnapshot."""


class SnapshotSource(SparseModel, omit_defaults=True):
    """Identity of the source of a backup snapshot, and the properties of its volume.

    `size` is a quantity. `deletion_policy` is the source content's before its handover; None
    where an earlier version recorded the source. `group` is the handle of the group that the
    snapshot was taken in; None: alone. `volume_handle` is the storage's of the volume; None: not known.
    """

    snapshot_uid: str
    content: str
    content_uid: str
    size: str
    volume_mode: VolumeMode
    deletion_policy: str | None = None
    group: str | None = None
    volume_handle: str | None = None


def parse_snapshot_source(
    snapshot: VolumeSnapshot, content: VolumeSnapshotContent, claim: PersistentVolumeClaim
) -> SnapshotSource:
    """Return what is needed of a source after its deletion, from its snapshot, content and PVC."""
    return SnapshotSource(
        snapshot_uid=snapshot["metadata"]["uid"],
        content=content["metadata"]["name"],
        content_uid=content["metadata"]["uid"],
        size=_restore_size(content, claim),
        volume_mode=volume_mode(claim),
        deletion_policy=content["spec"]["deletionPolicy"],
        group=find_group(content),
        # A content that was not taken dynamically does not say of which volume its snapshot is.
        volume_handle=(content["spec"].get("source") or {}).get("volumeHandle") or None,
    )


def parse_source_annotation(content: VolumeSnapshotContent) -> SnapshotSource:
    """Return the source that is recorded on the backup content; raise ContractError if that is missing or invalid."""
    meta = content["metadata"]
    try:
        return SnapshotSource.from_json((meta.get("annotations") or {}).get(SOURCE_ANNOTATION, ""))
    except ContractError as e:
        raise ContractError(
            f"VolumeSnapshotContent {meta['name']}: annotation {SOURCE_ANNOTATION}, "
            "which records the source snapshot, is missing or invalid"
        ) from e


def recorded_volumes(content: VolumeSnapshotContent) -> list[str]:
    """Return the names of the volumes that are recorded on the backup `content`."""
    return [
        name for name in (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION, "").split(",") if name
    ]


def snapshot_handle(content: VolumeSnapshotContent) -> str | None:
    """Return the storage's handle of the snapshot; None while it has none."""
    status = content.get("status") or {}
    return status.get("snapshotHandle") or (content["spec"].get("source") or {}).get("snapshotHandle") or None


def track_snapshot(
    snapshot: VolumeSnapshot, content: VolumeSnapshotContent, source: SnapshotSource
) -> TrackedSnapshot | None:
    """Return how the driver knows the backup `snapshot` with its `content`; None: not all of it is known.

    The driver of vSphere has names of its own for both.
    Source: Velero main at d2241adba, pkg/exposer/csi_snapshot.go (getCBTInfo).
    """
    annotations = snapshot["metadata"].get("annotations") or {}
    change_id, volume_id = snapshot_handle(content), source.volume_handle
    if any(annotations.get(key) for key in (_VSPHERE_CHANGE, _VSPHERE_SNAPSHOT)):
        change_id = annotations.get(_VSPHERE_CHANGE)
        volume_id, _, snapshot_id = annotations.get(_VSPHERE_SNAPSHOT, "").partition("+")
        volume_id = volume_id if snapshot_id else None
    if not (change_id and volume_id):
        return None
    return TrackedSnapshot(change_id, volume_id, snapshot["metadata"]["name"])


def find_group(content: VolumeSnapshotContent) -> str | None:
    """Return the handle of the group that a `content` is in; None: none, or that is not known.

    A source content has it from the group's own objects, a backup content from its driver, which names the group if
    it deletes its snapshots only together. The sidecar does not ask it to delete one then, and the snapshot controller
    does not make the VolumeSnapshot ready once the group's own objects are gone, which Velero deletes as soon as the
    group is taken.
    Source: CSI 1.12, spec.md (group_snapshot_id); external-snapshotter v8.6.0, pkg/sidecar-controller and
    pkg/common-controller, snapshot_controller.go; Velero main, pkg/backup/actions/csi/pvc_action.go.
    """
    status = content.get("status") or {}
    return str(status.get("volumeGroupSnapshotHandle") or "") or None if status.get("readyToUse") else None


def diagnose_group(content: VolumeSnapshotContent, group: str) -> Pending:
    """Return that the snapshot of a backup `content`, which is in this group, will not be deleted."""
    spec = content["spec"]
    snapshot = spec["volumeSnapshotRef"]
    return Pending(
        PendingReason.SNAPSHOT_IN_GROUP,
        f"VolumeSnapshot {snapshot['namespace']}/{snapshot['name']} is of the group {group}, whose snapshots driver "
        f"{spec.get('driver', '')} deletes only together: {snapshot_handle(content) or 'it'} stays on the storage",
        blocked=True,
    )


def diagnose_snapshot(snapshot: VolumeSnapshot, content: VolumeSnapshotContent | None = None) -> Pending | None:
    """Return why a VolumeSnapshot is pending; None once it is ready to use.

    `content` is the one that is bound to it: the sidecar of the driver reports errors there first.
    """
    meta, status = snapshot["metadata"], snapshot.get("status") or {}
    place = f"VolumeSnapshot {meta['namespace']}/{meta['name']}"
    if status.get("readyToUse") and status.get("boundVolumeSnapshotContentName"):
        return None
    reporting: VolumeSnapshot | VolumeSnapshotContent | None = snapshot if read_error(snapshot) else content
    if reporting is None or not (error := read_error(reporting)):
        return Pending(PendingReason.SNAPSHOT_NOT_READY, f"{place} is not ready yet")
    if _is_over(snapshot, reporting["status"]["error"]):
        return Pending(PendingReason.SNAPSHOT_NOT_READY, f"{place} is not ready yet; last error: {error}")
    return Pending(PendingReason.SNAPSHOT_ERROR, f"{place} is not ready: {error}", blocked=True)


GOING_ON: Final = frozenset({"Aborted", "Canceled", "DeadlineExceeded", "Unavailable"})
"""Codes by which a driver has not refused what it was asked for. Source: external-provisioner v6.3, checkError."""

_CODE: Final = re.compile(r"\bcode = (\w+)")
_CONFLICT: Final = "the object has been modified"


def find_code(message: str) -> str | None:
    """Return the code of the error that a driver has answered, from the message of its sidecar; None: it has none."""
    found = _CODE.search(message)
    return found[1] if found else None


def _is_over(snapshot: VolumeSnapshot, error: SnapshotError) -> bool:
    """Return whether the `error` was not the driver's last word: it was before the snapshot was taken, or a moment's.

    The sidecar leaves an error in the status until the snapshot is ready.
    Source: external-snapshotter v8.6.0, pkg/sidecar-controller/snapshot_controller.go (updateSnapshotContentStatus)
    and pkg/common-controller/snapshot_controller.go (updateSnapshotStatus).
    """
    taken, at, message = (snapshot.get("status") or {}).get("creationTime"), error.get("time"), error["message"]
    if not taken:
        return False
    earlier = at is not None and parse_time(at) <= parse_time(taken)
    return earlier or find_code(message) in {*GOING_ON, "ResourceExhausted"} or _CONFLICT in message


def read_error(obj: VolumeSnapshot | VolumeSnapshotContent) -> str | None:
    """Return the error that a VolumeSnapshot or VolumeSnapshotContent reports, on one line; None: none."""
    error = ((obj.get("status") or {}).get("error") or {}).get("message")
    return " ".join(error.split()) if error else None


def diagnose_binding(snapshot: VolumeSnapshot, content: VolumeSnapshotContent) -> Pending | None:
    """Return why the `content` that the status of `snapshot` names is not bound to it yet; None once it is.

    The status alone proves nothing: a tenant may write it. The reference of a content is set by an
    administrator or the snapshot controller; its UID is set at the binding.
    Source: external-snapshotter v8, pkg/utils/util.go (IsVolumeSnapshotRefSet) and
    pkg/common-controller/snapshot_controller.go (checkandBindSnapshotContent).

    Raises:
        ExposeError: the content belongs to another VolumeSnapshot.
    """
    meta, reference = snapshot["metadata"], content["spec"].get("volumeSnapshotRef") or {}
    place, name = f"VolumeSnapshot {meta['namespace']}/{meta['name']}", content["metadata"]["name"]
    uid = reference.get("uid", "")
    other = f"{reference.get('namespace', '')}/{reference.get('name', '')}"
    if other != f"{meta['namespace']}/{meta['name']}" or uid not in {"", meta["uid"]}:
        raise ExposeError(
            f"VolumeSnapshotContent {name} in the status of {place} (UID {meta['uid']}) "
            f"belongs to VolumeSnapshot {other} (UID {uid})"
        )
    if not uid:
        return Pending(PendingReason.SNAPSHOT_NOT_READY, f"{place} is not bound to VolumeSnapshotContent {name} yet")
    return None


def build_backup_content(
    owner: Owner, content: VolumeSnapshotContent, source: SnapshotSource, *, by_block: bool = False
) -> Manifest:
    """Return the backup content, which shares the snapshot handle of the source's `content`.

    `by_block`: a volume with a file system may be read as a device. Errors are as for `build_shared_content`.
    """
    manifest = build_shared_content(content, owner.namespace, owner.name, deletion_policy="Delete")
    meta = manifest["metadata"]
    meta["labels"] |= owner.labels
    meta["annotations"] |= {SOURCE_ANNOTATION: source.to_json()}
    if by_block and source.volume_mode is not VolumeMode.BLOCK:
        meta["annotations"][_MODE_CHANGE_ANNOTATION] = "true"
    return manifest


def build_shared_content(
    content: VolumeSnapshotContent, namespace: str, name: str, *, deletion_policy: str
) -> Manifest:
    """Return another content with the snapshot handle of `content`, for the VolumeSnapshot of its own name.

    Raises:
        ExposeError: the content has no handle to share, or no driver.
    """
    handle = snapshot_handle(content)
    source, spec = content["metadata"], content["spec"]
    for part, value in (("snapshot handle", handle), ("driver", spec.get("driver"))):
        if not value:
            raise ExposeError(f"VolumeSnapshotContent {source['name']} is ready but has no {part}")
    annotations = {
        key: value for key, value in (source.get("annotations") or {}).items() if key not in _CONTROLLER_ANNOTATIONS
    }
    kept = {key: value for key, value in (source.get("labels") or {}).items() if key == MANAGED_BY_LABEL}
    shared: Manifest = {
        "deletionPolicy": deletion_policy,
        "driver": spec["driver"],
        "source": {"snapshotHandle": handle},
        "volumeSnapshotRef": {
            "apiVersion": VOLUME_SNAPSHOTS.api_version,
            "kind": VOLUME_SNAPSHOTS.kind,
            "namespace": namespace,
            "name": name,
        },
    }
    if snapshot_class := spec.get("volumeSnapshotClassName"):
        shared["volumeSnapshotClassName"] = snapshot_class
    meta = {"name": name, "labels": kept, "annotations": annotations}
    return VOLUME_SNAPSHOT_CONTENTS.build(meta, spec=shared)


def build_backup_snapshot(
    owner: Owner, content: VolumeSnapshotContent, source: VolumeSnapshot | None, *, excluded: tuple[str, ...]
) -> Manifest:
    """Return the VolumeSnapshot that is bound to the backup `content`.

    It has the annotations of the `source` VolumeSnapshot whose keys begin with none of `excluded`; None:
    the source no longer exists. Some drivers read them when they create a volume.
    """
    annotations = copy_marks(source, "annotations", (*excluded, *_CONTROLLER_GROUPS)) if source is not None else {}
    manifest = build_bound_snapshot(content, owner.namespace, owner.name)
    manifest["metadata"] |= {"labels": owner.temporary_labels, **({"annotations": annotations} if annotations else {})}
    return manifest


def build_bound_snapshot(content: Manifest | VolumeSnapshotContent, namespace: str, name: str) -> Manifest:
    """Return the VolumeSnapshot of this name that is bound to a `content` with a handle."""
    spec: Manifest = {"source": {"volumeSnapshotContentName": content["metadata"]["name"]}}
    if snapshot_class := content["spec"].get("volumeSnapshotClassName"):
        spec["volumeSnapshotClassName"] = snapshot_class
    return VOLUME_SNAPSHOTS.build({"name": name, "namespace": namespace}, spec=spec)


def _restore_size(content: VolumeSnapshotContent, claim: PersistentVolumeClaim) -> str:
    """Return the minimum size of a volume for the snapshot; a driver may report none, or zero.

    It is what the driver reports, however large: many round up, and some report a whole file store. Only the content
    is read for it, which tenants cannot write; the VolumeSnapshot has a copy.
    Source: github.com/kubernetes-csi/external-provisioner/issues/727; aws-ebs-csi-driver/issues/1209.

    Raises:
        ExposeError: neither the content nor the PVC has a size.
    """
    restore_bytes = (content.get("status") or {}).get("restoreSize") or 0
    if restore_bytes > 0:
        fits = (f"{restore_bytes >> power}{suffix}" for power, suffix in _SUFFIXES if not restore_bytes % 2**power)
        return next(fits, str(restore_bytes))
    requested = ((claim["spec"].get("resources") or {}).get("requests") or {}).get("storage")
    with suppress(ValueError):
        if requested is not None and parse_quantity(requested) > 0:
            return str(requested)
    meta = claim["metadata"]
    raise ExposeError(f"PersistentVolumeClaim {meta['namespace']}/{meta['name']} requests no storage")
