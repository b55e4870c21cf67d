"""Identity, creation and deletion of the objects that belong to one custom resource, and of no others.

Objects are identified by the owner's UID, and deleted by their own. A pod is created without its
PriorityClass where that no longer exists: a class can be deleted at any time, and no transfer fails
because of it.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from core.errors import ExposeError
from core.kube.client import Deletion, KubeClient
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.resources import PODS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.kube.types import Manifest, Object, Pod, VolumeSnapshot
from core.logs import fields
from core.models.names import COPY_LABEL, OWNER_UID_LABEL
from core.models.reasons import PendingReason
from exposer.model import Owner, Pending
from exposer.snapshots import read_error

__all__ = [
    "NO_PRIORITY_CLASS",
    "belongs",
    "check_copy",
    "copy_in_use",
    "create_pod",
    "created_by_velero",
    "delete_object",
    "delete_owned",
    "describe_object",
    "is_copy_for",
    "patch_if_there",
]


_log = logging.getLogger(__name__)


NO_PRIORITY_CLASS = "no PriorityClass with name"
"""In the rejection of a pod whose class does not exist.

Source: Kubernetes v1.34, plugin/pkg/admission/priority/admission.go.
"""


async def create_pod(client: KubeClient, manifest: Manifest) -> Pod:
    """Create the pod and return it as stored; without its priority class if that does not exist.

    Raises:
        AlreadyExistsError: one of that name exists.
        KubeError: the API server rejected the pod for another reason.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    priority_class = spec.get("priorityClassName", "")
    extra = fields(kind=PODS.kind, namespace=meta["namespace"], name=meta["name"])
    try:
        created = await client.create(PODS, manifest)
    except ForbiddenError as e:
        if not priority_class or NO_PRIORITY_CLASS not in str(e):
            raise
        _log.warning("PriorityClass %s does not exist, creating the pod without it: %s", priority_class, e, extra=extra)
        spec_without = {key: value for key, value in spec.items() if key != "priorityClassName"}
        return await client.create(PODS, manifest | {"spec": spec_without})
    if priority_class:
        _log.debug("created pod with PriorityClass %s", priority_class, extra=extra)
    return created


def describe_object(resource: Resource, obj: Object) -> str:
    """Return the object as messages name it: kind, namespace, name."""
    meta = obj["metadata"]
    namespace = meta.get("namespace", "")
    return f"{resource.kind} {namespace}/{meta['name']}" if namespace else f"{resource.kind} {meta['name']}"


def belongs(obj: Object, owner: Owner) -> bool:
    """Return whether `obj` was created for `owner`, by its UID and never by a name."""
    meta = obj["metadata"]
    if (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid:
        return True
    return any(reference.get("uid") == owner.uid for reference in meta.get("ownerReferences") or [])


def created_by_velero(obj: Mapping[str, Any], owner: Owner) -> bool:
    """Return whether `obj` is the snapshot, or its content, that Velero's node-agent created for `owner`.

    Velero labels neither; but both are named after the owner, refer to each other, and have no
    owner label or reference.
    Source: Velero v1.18, pkg/exposer/csi_snapshot.go; tests/recordings/velero-1.18.2/volumesnapshot*.json.
    """
    meta, spec = obj["metadata"], obj.get("spec") or {}
    marked = OWNER_UID_LABEL in (meta.get("labels") or {}) or meta.get("ownerReferences")
    if marked or meta["name"] != owner.name:
        return False
    source = spec.get("source") or {}
    if obj.get("kind") == VOLUME_SNAPSHOTS.kind:
        refers_to = (meta.get("namespace"), source.get("volumeSnapshotContentName"))
        return refers_to == (owner.namespace, owner.name)
    reference = spec.get("volumeSnapshotRef") or {}
    named = (reference.get("namespace"), reference.get("name")) == (owner.namespace, meta["name"])
    return obj.get("kind") == VOLUME_SNAPSHOT_CONTENTS.kind and named and bool(source.get("snapshotHandle"))


def is_copy_for(obj: Object, owner: Owner) -> bool:
    """Return whether the Secret or ConfigMap `obj` was copied for `owner`, by this agent or by Velero's."""
    return bool((obj["metadata"].get("labels") or {}).get(COPY_LABEL) == owner.uid)


def check_copy(resource: Resource, obj: Object) -> Pending:
    """Return what a transfer is pending for if `obj`, which is not its own, has the name of a copy that it needs.

    Raises:
        ExposeError: it is no copy of this agent, which no other transfer will delete.
    """
    meta, place = obj["metadata"], describe_object(resource, obj)
    labels = meta.get("labels") or {}
    if COPY_LABEL not in labels or labels.get(OWNER_UID_LABEL) != labels[COPY_LABEL]:
        raise ExposeError(f"{place} already exists and is no copy of this node agent, which needs that name for one")
    return copy_in_use(resource.kind, meta["name"])


def copy_in_use(kind: str, name: str) -> Pending:
    """Return that another transfer has the copy.

    It is not named: with each that ends, the message of all others would change.
    """
    text = f"the copy of {kind} {name} is in use by another transfer, until that is cleaned up"
    return Pending(PendingReason.COPY_IN_USE, text)


async def patch_if_there(
    client: KubeClient, resource: Resource, obj: Object, patch: Manifest, *, subresource: str = ""
) -> None:
    """Apply `patch` to `obj`, as it was just read, or its subresource, unless it was deleted or recreated."""
    meta = obj["metadata"]
    guarded = patch | {"metadata": patch.get("metadata", {}) | {"uid": meta["uid"]}}
    try:
        await client.patch(resource, meta.get("namespace", ""), meta["name"], guarded, subresource=subresource)
    except NotFoundError:
        _log.debug("object was deleted before it was patched", extra=fields(kind=resource.kind, name=meta["name"]))


async def delete_object(
    client: KubeClient, resource: Resource, obj: Object, *, unchanged: bool = False, forced: bool = False
) -> Pending | None:
    """Delete `obj`, as it was just read, by its UID; None once it is deleted.

    `unchanged`: not if it was changed since; call again after another read.

    `forced` only where nothing is written: a pod may still run on a node that is unreachable. Otherwise its deletion
    ends when its kubelet reports that it terminated, or when the Node is deleted or tainted as out of service.
    Source: Kubernetes v1.34, pkg/controller/podgc/gc_controller.go.
    """
    meta = obj["metadata"]
    namespace, name, uid = meta.get("namespace", ""), meta["name"], meta["uid"]
    node = cast("Pod", obj)["spec"].get("nodeName", "") if resource == PODS else ""
    on_node = f" on node {node}" if node else ""
    message = f"{describe_object(resource, obj)} is being deleted{on_node}"
    pending = Pending(PendingReason.CLEANING_UP, message, operation=f"deletion of {uid}")
    if meta.get("deletionTimestamp") and not forced:
        finalizers = ", ".join(meta.get("finalizers") or [])
        held = f" (finalizers: {finalizers})" if finalizers else ""
        # The driver's sidecar reports there why it could not delete a snapshot.
        error = read_error(cast("VolumeSnapshot", obj)) if resource == VOLUME_SNAPSHOT_CONTENTS else None
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


async def delete_owned(
    client: KubeClient, owner: Owner, resource: Resource, name: str, *, forced: bool = False
) -> Pending | None:
    """Delete the owner's object of that name, also one of Velero; None once there is none.

    `forced`: as in `delete_object`.
    """
    namespace = owner.namespace if resource.namespaced else ""
    obj = await client.read(resource, namespace, name)
    if obj is None or not (belongs(obj, owner) or created_by_velero(obj, owner)):
        return None
    return await delete_object(client, resource, obj, forced=forced)
