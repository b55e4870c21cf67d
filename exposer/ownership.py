"""Identity, creation and deletion of the objects and volumes that belong to one custom resource, and of no others.

Objects are identified by the owner's UID, and deleted by their own.

Kubernetes binds a PVC to any Available volume that matches class, size and mode, whatever its data
source: a static volume, or a released one that was made Available again.
Source: Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go (FindMatchingVolume),
pkg/controller/volume/persistentvolume/pv_controller.go (syncUnboundClaim).
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final, cast

from core.errors import ExposeError
from core.kube import resources as kube
from core.kube.client import Deletion, KubeClient, Selection, is_patched, select_labels
from core.kube.errors import ForbiddenError, KubeError, NotFoundError, UnreachableError
from core.kube.types import (
    Event,
    Manifest,
    Object,
    ObjectT,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    StorageClass,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from core.logs import fields
from core.models import names as wire
from core.models.base import CustomResource
from core.models.reasons import PendingReason
from exposer.manifests import GOING_ON, VOLUME_ANNOTATION, find_code, read_error, recorded_volumes
from exposer.model import Guard, Owner, Pending, Reader

_log = logging.getLogger(__name__)

NO_PRIORITY_CLASS = "no PriorityClass with name"
"""In the rejection of a pod whose class does not exist.

Source: Kubernetes v1.34, plugin/pkg/admission/priority/admission.go.
"""

_NO_ACCOUNT: Final = "error looking up service account"
"""Source: Kubernetes v1.34, plugin/pkg/admission/serviceaccount/admission.go."""


def diagnose_rejection(error: KubeError) -> Pending | None:
    """Return what a pod is pending for that the API server rejected for its ServiceAccount; None for other causes."""
    text = str(error)
    return Pending(PendingReason.SERVICE_ACCOUNT_MISSING, text, blocked=True) if _NO_ACCOUNT in text else None


async def create_pod(client: KubeClient, manifest: Manifest) -> Pod:
    """Create the pod and return it as stored; without its priority class if that does not exist.

    A class can be deleted at any time, and no transfer fails because of it.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    priority_class = spec.get("priorityClassName", "")
    try:
        return await client.create(kube.PODS, manifest)
    except ForbiddenError as e:
        if not priority_class or NO_PRIORITY_CLASS not in str(e):
            raise
        extra = fields(kind=kube.PODS.kind, namespace=meta["namespace"], name=meta["name"])
        _log.warning("PriorityClass %s does not exist, creating the pod without it: %s", priority_class, e, extra=extra)
        spec_without = {key: value for key, value in spec.items() if key != "priorityClassName"}
        return await client.create(kube.PODS, manifest | {"spec": spec_without})


def describe_object(resource: kube.Resource, obj: Object) -> str:
    """Return the object as messages name it: kind, namespace, name."""
    meta = obj["metadata"]
    namespace = meta.get("namespace", "")
    return f"{resource.kind} {namespace}/{meta['name']}" if namespace else f"{resource.kind} {meta['name']}"


def belongs(obj: Object, owner: Owner | CustomResource) -> bool:
    """Return whether `obj` was created for `owner`, by its UID and never by a name."""
    meta = obj["metadata"]
    if (meta.get("labels") or {}).get(wire.OWNER_UID_LABEL) == owner.uid:
        return True
    return any(reference.get("uid") == owner.uid for reference in meta.get("ownerReferences") or [])


def created_by_velero(obj: Mapping[str, Any], owner: Owner) -> bool:
    """Return whether `obj` is the snapshot, or its content, that Velero's node-agent created for `owner`.

    Velero labels neither; but both are named after the owner, refer to each other, and have no
    owner label or reference.
    Source: Velero v1.18, pkg/exposer/csi_snapshot.go; tests/recordings/velero-1.18.2/volumesnapshot*.json.
    """
    meta, spec = obj["metadata"], obj.get("spec") or {}
    labels = meta.get("labels") or {}
    marked = wire.OWNER_UID_LABEL in labels or wire.BASE_SNAPSHOT_LABEL in labels or meta.get("ownerReferences")
    if marked or meta["name"] != owner.name:
        return False
    source = spec.get("source") or {}
    if obj.get("kind") == kube.VOLUME_SNAPSHOTS.kind:
        refers_to = (meta.get("namespace"), source.get("volumeSnapshotContentName"))
        return refers_to == (owner.namespace, owner.name)
    reference = spec.get("volumeSnapshotRef") or {}
    named = (reference.get("namespace"), reference.get("name")) == (owner.namespace, meta["name"])
    return obj.get("kind") == kube.VOLUME_SNAPSHOT_CONTENTS.kind and named and bool(source.get("snapshotHandle"))


def is_copy_for(obj: Object, owner: Owner) -> bool:
    """Return whether the Secret or ConfigMap `obj` was copied for `owner`, by this agent or by Velero's."""
    return bool((obj["metadata"].get("labels") or {}).get(wire.COPY_LABEL) == owner.uid)


def check_copy(resource: kube.Resource, obj: Object) -> Pending:
    """Return what a transfer is pending for if `obj`, which is not its own, has the name of a copy that it needs.

    Raises:
        ExposeError: it is no copy of this agent, which no other transfer will delete.
    """
    meta, place = obj["metadata"], describe_object(resource, obj)
    labels = meta.get("labels") or {}
    if wire.COPY_LABEL not in labels or labels.get(wire.OWNER_UID_LABEL) != labels[wire.COPY_LABEL]:
        raise ExposeError(f"{place} already exists and is no copy of this node agent, which needs that name for one")
    return copy_in_use(resource.kind, meta["name"])


def copy_in_use(kind: str, name: str) -> Pending:
    """Return that another transfer has the copy; not which, as the message would change with each that ends."""
    text = f"the copy of {kind} {name} is in use by another transfer, until that is cleaned up"
    return Pending(PendingReason.COPY_IN_USE, text)


def name_other_restore(claim: PersistentVolumeClaim, restore: str | None) -> str | None:
    """Return the name of the restore that made the PVC, if that is another one than `restore`; None: that is unknown.

    A backup may have saved the name of an earlier one with the annotation.
    """
    meta = claim["metadata"]
    marks = (
        (meta.get("annotations") or {}).get(wire.RESTORE_ANNOTATION),
        (meta.get("labels") or {}).get(wire.VELERO_RESTORE_LABEL),
    )
    return None if restore is None or restore in marks else marks[1] or marks[0]


async def patch_if_there(
    client: KubeClient, resource: kube.Resource, obj: Object, patch: Manifest, *, subresource: str = ""
) -> None:
    """Apply `patch` to `obj`, as it was just read, or its subresource, unless it has it already, or was replaced."""
    if is_patched(obj, patch):
        return
    meta = obj["metadata"]
    guarded = patch | {"metadata": patch.get("metadata", {}) | {"uid": meta["uid"]}}
    try:
        await client.patch(resource, meta.get("namespace", ""), meta["name"], guarded, subresource=subresource)
    except NotFoundError:
        _log.debug("object was deleted before it was patched", extra=fields(kind=resource.kind, name=meta["name"]))


async def delete_object(
    client: KubeClient, resource: kube.Resource, obj: Object, *, unchanged: bool = False, forced: bool = False
) -> Pending | None:
    """Delete `obj`, as it was just read, by its UID; None once it is deleted.

    `unchanged`: not if it was changed since; call again after another read. `forced`, only where nothing is written: a
    pod may still run on a node that is unreachable. Otherwise its deletion ends when its kubelet reports its end, or
    when the Node is deleted or tainted as out of service.
    Source: Kubernetes v1.34, pkg/controller/podgc/gc_controller.go.
    """
    meta = obj["metadata"]
    namespace, name, uid = meta.get("namespace", ""), meta["name"], meta["uid"]
    node = cast("Pod", obj)["spec"].get("nodeName", "") if resource == kube.PODS else ""
    on_node = f" on node {node}" if node else ""
    message = f"{describe_object(resource, obj)} is being deleted{on_node}"
    pending = Pending(PendingReason.CLEANING_UP, message, operation=f"deletion of {uid}")
    if meta.get("deletionTimestamp") and not forced:
        finalizers = ", ".join(meta.get("finalizers") or [])
        held = f" (finalizers: {finalizers})" if finalizers else ""
        # The driver's sidecar reports there why it could not delete a snapshot.
        error = read_error(cast("VolumeSnapshot", obj)) if resource == kube.VOLUME_SNAPSHOT_CONTENTS else None
        return replace(pending, message=f"{message}{held}{f': {error}' if error else ''}")
    version = meta["resourceVersion"] if unchanged else ""
    if forced:
        deletion = await client.force_delete(resource, namespace, name, uid=uid)
    else:
        deletion = await client.delete(resource, namespace, name, uid=uid, resource_version=version)
    if deletion is Deletion.CONFLICT:
        left = await client.read(resource, namespace, name)
        return pending if left is not None and left["metadata"]["uid"] == uid else None
    if deletion is not Deletion.NOT_FOUND:
        extra = fields(kind=resource.kind, namespace=namespace, name=name, uid=uid)
        _log.info("deleting object", extra=extra)
    return pending if deletion is Deletion.STARTED else None


_LEFT_FINALIZER: Final = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"
"""On a VolumeSnapshot that a PVC was to be created from: some provisioners leave it if no volume was created.

Source: github.com/kubernetes-csi/external-provisioner/issues/1507.
"""


async def delete_backup_snapshot(client: KubeClient, snapshot: VolumeSnapshot) -> Pending | None:
    """Delete a VolumeSnapshot of ours, as it was just read, whose PVC is deleted; None once it is deleted."""
    finalizers = snapshot["metadata"].get("finalizers") or []
    if _LEFT_FINALIZER in finalizers:
        kept = [one for one in finalizers if one != _LEFT_FINALIZER]
        # The Role of an earlier version does not permit it.
        with suppress(ForbiddenError, NotFoundError):
            await client.patch_if_unchanged(kube.VOLUME_SNAPSHOTS, snapshot, {"metadata": {"finalizers": kept}})
    return await delete_object(client, kube.VOLUME_SNAPSHOTS, snapshot)


async def read_owned(
    client: KubeClient,
    owner: Owner,
    resource: kube.Resource[ObjectT],
    name: str | None = None,
    guard: Guard | None = None,
) -> ObjectT | None:
    """Return the owner's object of its name or `name`, also a snapshot or content of Velero; None: there is none.

    `guard` is called after the read: what it then lets be deleted is no object of a later attempt.
    """
    obj = await client.read(resource, owner.namespace if resource.namespaced else "", name or owner.name)
    if obj is None or not (belongs(obj, owner) or created_by_velero(obj, owner)):
        return None
    if guard is not None:
        await guard(sure=True)
    return obj


async def delete_owned(
    client: KubeClient, owner: Owner, resource: kube.Resource, *, forced: bool = False, guard: Guard | None = None
) -> Pending | None:
    """Delete the owner's object of its name; None once there is none. `forced`: as in `delete_object`."""
    obj = await read_owned(client, owner, resource, guard=guard)
    return None if obj is None else await delete_object(client, resource, obj, forced=forced)


DELETE = "Delete"

RETAIN = "Retain"

_PROVISIONER_ANNOTATIONS: Final = frozenset(
    {"volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner"}
)

_LABELS: Final = (wire.OWNER_UID_LABEL, wire.IN_PLACE_LABEL)
_ANNOTATIONS: Final = (wire.IN_PLACE_CLAIM_ANNOTATION, wire.RECLAIM_POLICY_ANNOTATION, wire.RELEASED_CLAIM_ANNOTATION)
"""Ours on a volume while a transfer owns it."""

_PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"
BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"


def is_provisioned(volume: PersistentVolume) -> bool:
    """Return whether `volume` was created for the PVC that it refers to, and did not exist before.

    A provisioner names a volume after the UID of the PVC, or a part of it, and creates it with its reference; a volume
    that gets that later is annotated in the same write, except one that already referred to a PVC of that name.
    Source: sig-storage-lib-external-provisioner v11, controller/controller.go (provisionClaimOperation);
    external-provisioner v5, pkg/controller/controller.go (makeVolumeName); Kubernetes v1.34,
    component-helpers/storage/volume/pv_helpers.go (GetBindVolumeToClaim).
    """
    meta, uid = volume["metadata"], (volume["spec"].get("claimRef") or {}).get("uid")
    if not uid or wire.IN_PLACE_LABEL in (meta.get("labels") or {}):
        return False
    annotations = meta.get("annotations") or {}
    return uid in meta["name"] or (_PROVISIONED_BY in annotations and BOUND_BY_CONTROLLER not in annotations)


async def attached_nodes(reader: Reader, *volumes: str, names: Iterable[str] = ()) -> list[str]:
    """Return the nodes to which the PersistentVolumes of these names are attached, or being detached from, sorted.

    A VolumeAttachment cannot be selected by its volume: without the `names` of those to look at, all are listed.
    """
    selections = [Selection(kube.VOLUME_ATTACHMENTS, field_selector=f"metadata.name={name}") for name in names]
    listed = [await reader.list(one) for one in selections or [Selection(kube.VOLUME_ATTACHMENTS)]]
    specs = [attachment["spec"] for some in listed for attachment in some]
    return sorted({s["nodeName"] for s in specs if s["source"].get("persistentVolumeName") in volumes})


def attachment_names(volume: PersistentVolume, nodes: Iterable[str]) -> list[str]:
    """Return the names of the VolumeAttachments of a volume on these nodes; none if it is of no CSI driver.

    Source: Kubernetes v1.34, pkg/volume/csi/csi_attacher.go (getAttachmentName).
    """
    csi = volume["spec"].get("csi")
    shown = f"{csi.get('volumeHandle')}{csi.get('driver')}" if csi else ""
    return [f"csi-{sha256(f'{shown}{node}'.encode()).hexdigest()}" for node in nodes if shown]


async def find_detaching(reader: Reader, volume: str, names: Iterable[str] = ()) -> Pending | None:
    """Return that the PersistentVolume of that name must be detached first; None: it is on no node.

    `names`: as for `attached_nodes`.
    """
    nodes = await attached_nodes(reader, volume, names=names)
    text = f"PersistentVolume {volume} is being detached from node {', '.join(nodes)}"
    return Pending(PendingReason.DETACHING, text) if nodes else None


async def set_reclaim_policy(
    client: KubeClient, volume: PersistentVolume, policy: str, *, marks: Manifest | None = None
) -> PersistentVolume:
    """Return `volume` with that reclaim policy, and the labels and annotations of `marks` beside its own."""
    patch: Manifest = {"metadata": marks or {}, "spec": {"persistentVolumeReclaimPolicy": policy}}
    return await patch_volume(client, volume, patch)


async def patch_volume(client: KubeClient, volume: PersistentVolume, patch: Manifest) -> PersistentVolume:
    """Return `volume`, as it was just read, with this patch, which is not sent if the volume has it already."""
    if is_patched(volume, patch):
        return volume
    return await client.patch_if_unchanged(kube.PERSISTENT_VOLUMES, volume, patch)


async def replace_volume(client: KubeClient, owner: Owner, volume: PersistentVolume, manifest: Manifest) -> None:
    """Create the PersistentVolume of `manifest` for the storage of `volume`, as it was just read, then delete `volume`.

    Repeat it until `volume` is gone. Only a retained one is deleted, so that its storage stays. Raise ExposeError if a
    volume that is not the owner's has the name.
    """
    name = manifest["metadata"]["name"]
    found = await client.read(kube.PERSISTENT_VOLUMES, "", name) or await client.create(
        kube.PERSISTENT_VOLUMES, manifest
    )
    if not belongs(found, owner):
        raise ExposeError(f"PersistentVolume {name} already exists and does not belong to {owner.kind} {owner.name}")
    retained = volume["spec"].get("persistentVolumeReclaimPolicy") == RETAIN
    if retained and not found["metadata"].get("deletionTimestamp"):
        await delete_object(client, kube.PERSISTENT_VOLUMES, volume, unchanged=True)


async def restore_reclaim_policy(client: KubeClient, volume: PersistentVolume, policy: str) -> PersistentVolume:
    """Return `volume` with its original reclaim policy and without our marks: no transfer owns it any more."""
    return await patch_volume(client, volume, without_marks(volume, policy))


def original_policy(volume: PersistentVolume) -> str:
    """Return the reclaim policy that the volume had before it was retained for a restore in place."""
    recorded = (volume["metadata"].get("annotations") or {}).get(wire.RECLAIM_POLICY_ANNOTATION)
    return recorded or volume["spec"].get("persistentVolumeReclaimPolicy", RETAIN)


def without_marks(volume: PersistentVolume, policy: str | None = None) -> Manifest:
    """Return the patch that removes our labels and annotations, and restores the reclaim policy.

    `policy`: the one that is recorded elsewhere; None: the one that the volume itself records, or has.
    """
    meta = volume["metadata"]
    found = {
        "labels": {key: None for key in _LABELS if key in (meta.get("labels") or {})},
        "annotations": {key: None for key in _ANNOTATIONS if key in (meta.get("annotations") or {})},
    }
    marks = {field: keys for field, keys in found.items() if keys}
    return {"metadata": marks, "spec": {"persistentVolumeReclaimPolicy": policy or original_policy(volume)}}


async def delete_with_volume(
    client: KubeClient, claim: PersistentVolumeClaim, *contents: VolumeSnapshotContent, marks: Manifest | None = None
) -> Pending | None:
    """Delete `claim`, as it was just read, and have its volume reclaimed, whatever its class specifies.

    The volume gets the `marks`, if there are any. Before, the volume is recorded on the `contents`, whose snapshots
    must be deleted after it: nothing else names it then. A claim that is being provisioned is waited for if nothing
    would name the volume. One that is bound to another PVC, or was not provisioned for this one, is left alone.
    """
    name = claim["spec"].get("volumeName")
    for content in contents:
        names = recorded_volumes(content)
        if name and name not in names:
            recorded: Manifest = {"metadata": {"annotations": {VOLUME_ANNOTATION: ",".join([*names, name])}}}
            await patch_if_there(client, kube.VOLUME_SNAPSHOT_CONTENTS, content, recorded)
    if await is_being_provisioned(client, claim):
        place = describe_object(kube.PERSISTENT_VOLUME_CLAIMS, claim)
        return Pending(PendingReason.CLEANING_UP, f"{place} is being provisioned, will be deleted with its volume")
    volume = await client.read(kube.PERSISTENT_VOLUMES, "", name) if name else None
    claimed = volume is not None and (volume["spec"].get("claimRef") or {}).get("uid") == claim["metadata"]["uid"]
    if volume is not None and claimed and is_provisioned(volume):
        with suppress(NotFoundError):
            await set_reclaim_policy(client, volume, DELETE, marks=marks)
    # Its provisioning may have begun since it was read.
    return await delete_object(client, kube.PERSISTENT_VOLUME_CLAIMS, claim, unchanged=not name)


def describe_reclaim(volume: PersistentVolume, what: str = "") -> Pending:
    """Return that the PersistentVolume is being deleted, and why it could not be, if it says so; `what` describes it.

    Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go (reclaimVolume).
    """
    error = " ".join(str((volume.get("status") or {}).get("message") or "").split())
    text = f"{describe_object(kube.PERSISTENT_VOLUMES, volume)}{what} is being deleted{f': {error}' if error else ''}"
    return Pending(PendingReason.CLEANING_UP, text)


async def find_snapshot_volume(client: KubeClient, names: Iterable[str]) -> Pending | None:
    """Return that a PersistentVolume of these, created from a snapshot, must be deleted first; None: they were.

    One whose PVC was deleted by others may still have the policy of its class.
    """
    for name in sorted(names):
        volume = await client.read(kube.PERSISTENT_VOLUMES, "", name)
        if volume is not None and is_provisioned(volume):
            if (volume.get("status") or {}).get("phase") == "Released":
                with suppress(NotFoundError):
                    await set_reclaim_policy(client, volume, DELETE)
            return describe_reclaim(volume, " of the snapshot")
    return None


_REFUSED_ANNOTATION: Final = "nodeagent.io/provisioning-refused"
"""On a PVC whose provisioner has answered that it makes no such volume: none is created any more."""


async def mark_refused(client: KubeClient, claim: PersistentVolumeClaim) -> None:
    """Record on `claim`, as it was just read, that its provisioner makes no such volume."""
    patch: Manifest = {"metadata": {"annotations": {_REFUSED_ANNOTATION: "true"}}}
    await patch_if_there(client, kube.PERSISTENT_VOLUME_CLAIMS, claim, patch)


def is_refused(claim: PersistentVolumeClaim) -> bool:
    """Return whether the provisioner of `claim` makes no such volume."""
    return _REFUSED_ANNOTATION in (claim["metadata"].get("annotations") or {})


def binds_late(storage_class: StorageClass | None) -> bool:
    """Return whether volumes of the StorageClass are provisioned on the node of their first pod."""
    return storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"


_ANSWER_SECONDS: Final = 5.0
"""Events may be in an etcd of their own that does not answer."""


async def read_events(client: KubeClient, obj: Object) -> list[Event]:
    """Return the Events about `obj`; UnreachableError: there is no answer soon."""
    meta = obj["metadata"]
    selection = Selection(kube.EVENTS, meta["namespace"], field_selector=f"involvedObject.uid={meta['uid']}")
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await client.list(selection)
    except TimeoutError as e:
        raise UnreachableError(f"no answer about Events within {_ANSWER_SECONDS:.0f} s") from e


async def is_being_provisioned(client: KubeClient, claim: PersistentVolumeClaim) -> bool:
    """Return whether a provisioner may create a volume for `claim` that nothing would name once that is deleted.

    So it is if the volume would be retained, unless its driver has refused to create it, or if the driver still copies
    it from a snapshot: without PVC and snapshot, the provisioner does not learn of its end.
    The volume controller names the provisioner when it asks for a volume, not before. A provisioner that has no room
    for it on the selected node removes the node, and makes no volume until a pod has another one.
    Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go
    (provisionClaimOperationExternal); sig-storage-lib-external-provisioner v11, controller/controller.go
    (shouldProvision, rescheduleProvisioning); github.com/kubernetes-csi/external-provisioner/issues/1449.
    """
    annotations = claim["metadata"].get("annotations") or {}
    if claim["spec"].get("volumeName") or is_refused(claim) or not annotations.keys() & _PROVISIONER_ANNOTATIONS:
        return False
    class_name = claim["spec"].get("storageClassName") or ""
    found = await client.read(kube.STORAGE_CLASSES, "", class_name) if class_name else None
    if found is None or (binds_late(found) and not annotations.get(wire.SELECTED_NODE_ANNOTATION)):
        return False
    retained = found.get("reclaimPolicy", DELETE) != DELETE
    if not retained and not claim["spec"].get("dataSource"):
        return False
    events = await read_events(client, claim)
    failures = [one for one in events if one.get("reason") == "ProvisioningFailed"]
    last = max(failures, key=lambda event: str(event.get("lastTimestamp") or ""), default=None)
    if last is None:
        # The driver has not answered its first call yet.
        return retained or any(one.get("reason") == "Provisioning" for one in events)
    code = find_code(last.get("message") or "")
    return code not in _REFUSALS if retained else code in GOING_ON


_REFUSALS: Final = frozenset(
    {"FailedPrecondition", "InvalidArgument", "NotFound", "OutOfRange", "ResourceExhausted", "Unimplemented"}
)
"""Codes by which a driver refuses to create a volume. Source: CSI 1.12, spec.md (CreateVolume)."""


async def delete_claim(
    client: KubeClient, owner: Owner, name: str, *, marks: Manifest | None = None, guard: Guard | None = None
) -> Pending | None:
    """Delete the owner's PVC of that name with its volume, which gets the `marks`; None once there is no such PVC."""
    claim = await read_owned(client, owner, kube.PERSISTENT_VOLUME_CLAIMS, name, guard)
    return None if claim is None else await delete_with_volume(client, claim, marks=marks)


async def find_marked_volume(client: KubeClient, owner: Owner) -> Pending | None:
    """Return that a PersistentVolume with the owner's label must be deleted first; None: none is to be."""
    marked = await client.list(Selection(kube.PERSISTENT_VOLUMES, label_selector=select_labels(owner.labels)))
    found = (one for one in marked if one["spec"].get("persistentVolumeReclaimPolicy") == DELETE)
    return next(map(describe_reclaim, found), None)
