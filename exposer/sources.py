"""The source of a backup: its snapshot is handed over to the transfer, and its volume determines the nodes.

The backup content shares the handle of the source content; the source content is set to Retain, then the source's
snapshot and content are deleted. At any moment at least one content exists whose deletion deletes the snapshot on the
storage. Once the deletion of the source content has begun, the handover is finished and the snapshot on the storage is
the transfer's; until then its source content decides by the deletion policy that it was found with.

The placement is read from source PVC, volume, StorageClass, attachments and nodes. Volumes of Windows nodes are left to
Velero's agents.
Source: Velero v1.18.2, GetVolumeTopology and GetPVCAttachingNodeOS in pkg/util/kube/pvc_pv.go
and its use in pkg/exposer/csi_snapshot.go.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Final, NoReturn

from core.contract import VolumeMode
from core.errors import ContractError, ExposeError
from core.kube import resources as kube
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.types import (
    Manifest,
    NodeSelectorTerm,
    ObjectT,
    PersistentVolumeClaim,
    StorageClass,
    VolumeSnapshot,
    VolumeSnapshotContent,
)
from core.models.base import parse_time
from core.models.names import AGENT_DAEMONSET_WINDOWS, SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer import manifests
from exposer.model import WINDOWS, Pending, PendingError, Reader, RestoreRequest, SnapshotRequest
from exposer.ownership import DELETE, RETAIN, attached_nodes, binds_late, delete_object, patch_if_there, read_owned
from exposer.pod_manifest import Placement
from exposer.template import AgentTemplate


async def read_source(
    reader: Reader, request: SnapshotRequest
) -> tuple[manifests.SnapshotSource, VolumeSnapshotContent]:
    """Return the source and its content.

    Raises:
        ExposeError: snapshot, content or PVC do not exist, the content is another snapshot's,
            or the volume of the PVC or its class is not known.
        PendingError: the snapshot is not ready yet.
    """
    namespace = request.source_namespace
    snapshot = await _read_existing(reader, kube.VOLUME_SNAPSHOTS, namespace, request.volume_snapshot)
    if snapshot["metadata"].get("deletionTimestamp"):
        raise ExposeError(f"VolumeSnapshot {namespace}/{request.volume_snapshot} is being deleted")
    claim = await _read_existing(reader, kube.PERSISTENT_VOLUME_CLAIMS, namespace, request.source_claim)
    _check_volume(request, claim)
    if pending := manifests.diagnose_snapshot(snapshot):
        # Once the storage has taken it, it only makes it ready, for hours with some storage.
        known = pending.blocked or (snapshot.get("status") or {}).get("creationTime")
        bound = None if known else await _read_bound(reader, snapshot)
        raise PendingError(manifests.diagnose_snapshot(snapshot, bound) or pending)
    content_name = snapshot["status"]["boundVolumeSnapshotContentName"]
    content = await _read_existing(reader, kube.VOLUME_SNAPSHOT_CONTENTS, "", content_name)
    if pending := manifests.diagnose_binding(snapshot, content):
        raise PendingError(pending)
    return manifests.parse_snapshot_source(snapshot, content, claim), content


async def take_over_source(
    client: KubeClient,
    request: SnapshotRequest,
    source: manifests.SnapshotSource,
    confirm: Callable[[], Awaitable[None]] | None = None,
) -> Pending | None:
    """Delete the source's snapshot, and its content after it, keeping the snapshot on the storage.

    Only after the snapshot's deletion the content's controller knows that it is unused. `confirm` is called before the
    first write, if there is one; it raises where nothing may be written.
    """
    content = await _read_content(client, source)
    snapshot = await _read_snapshot(client, request.source_namespace, request.volume_snapshot, source)
    if confirm is not None and (content is not None or snapshot is not None):
        await confirm()
    if content is not None:
        await _set_deletion_policy(client, content, RETAIN)
    pending = await delete_object(client, kube.VOLUME_SNAPSHOTS, snapshot) if snapshot is not None else None
    if pending is None and content is not None:
        await delete_object(client, kube.VOLUME_SNAPSHOT_CONTENTS, content)
    return pending


async def delete_source(client: KubeClient, request: SnapshotRequest) -> Pending | None:
    """Delete the source's snapshot, and its content unless that keeps the snapshot on the storage."""
    content = await read_owned(client, request.owner, kube.VOLUME_SNAPSHOT_CONTENTS)
    source = recorded_source(content) if content is not None else None
    if content is None or source is None:
        return await _delete_unrecorded(client, request, handover_began=content is not None)
    if source.deletion_policy == RETAIN and (source_content := await _read_content(client, source)) is not None:
        snapshot = await _read_snapshot(client, request.source_namespace, request.volume_snapshot, source)
        if not _is_handed_over(source_content, snapshot):
            await _set_deletion_policy(client, content, RETAIN)
            return await delete_object(client, kube.VOLUME_SNAPSHOTS, snapshot) if snapshot is not None else None
    if pending := await take_over_source(client, request, source):
        return pending
    left = await _read_content(client, source)
    return await delete_object(client, kube.VOLUME_SNAPSHOT_CONTENTS, left) if left is not None else None


async def _read_bound(reader: Reader, snapshot: VolumeSnapshot) -> VolumeSnapshotContent | None:
    """Return the content that is bound to the snapshot; None: there is none yet."""
    name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
    content = await reader.read(kube.VOLUME_SNAPSHOT_CONTENTS, "", name) if name else None
    with suppress(ExposeError):
        if content is not None and manifests.diagnose_binding(snapshot, content) is None:
            return content
    return None


async def _read_content(client: KubeClient, source: manifests.SnapshotSource) -> VolumeSnapshotContent | None:
    """Return the source's content; None: it is gone, or another one has its name."""
    content = await client.read(kube.VOLUME_SNAPSHOT_CONTENTS, "", source.content)
    return None if content is None or content["metadata"]["uid"] != source.content_uid else content


async def _read_snapshot(
    client: KubeClient, namespace: str, name: str, source: manifests.SnapshotSource
) -> VolumeSnapshot | None:
    """Return the source's snapshot; None: it is gone, or another one has its name."""
    snapshot = await client.read(kube.VOLUME_SNAPSHOTS, namespace, name)
    return None if snapshot is None or snapshot["metadata"]["uid"] != source.snapshot_uid else snapshot


async def _delete_unrecorded(client: KubeClient, request: SnapshotRequest, *, handover_began: bool) -> Pending | None:
    """Delete the source's snapshot; where its handover began, together with the snapshot on the storage.

    Its UID is not recorded, or no longer. A client that saw the transfer finish may have
    created the next snapshot under the same name by now.
    """
    snapshot = await client.read(kube.VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
    if snapshot is None or _created_later(snapshot, request.requested_at):
        return None
    if handover_began and (content := await _read_bound(client, snapshot)):
        await _set_deletion_policy(client, content, DELETE)
    return await delete_object(client, kube.VOLUME_SNAPSHOTS, snapshot)


async def settle_source(client: KubeClient, content: VolumeSnapshotContent) -> None:
    """Keep or delete the snapshot on the storage with the backup `content`, depending on its source.

    Called before that content is deleted without the cleanup of its transfer. A source whose snapshot
    still exists is restored to the state in which it was found, and so is one whose content had Retain.

    Raises:
        ContractError: the source's content does not name its snapshot.
    """
    source = recorded_source(content)
    await record_handle(client, content)
    if source is None or content["metadata"].get("deletionTimestamp"):
        return
    source_content = await _read_content(client, source)
    if source_content is None:
        return
    reference = source_content["spec"].get("volumeSnapshotRef") or {}
    if not (reference.get("namespace") and reference.get("name")):
        raise ContractError(f"VolumeSnapshotContent {source.content} refers to no VolumeSnapshot")
    snapshot = await _read_snapshot(client, reference["namespace"], reference["name"], source)
    if _is_handed_over(source_content, snapshot):
        return
    if snapshot is None and source.deletion_policy != RETAIN:
        await delete_object(client, kube.VOLUME_SNAPSHOT_CONTENTS, source_content)
        return
    if source.deletion_policy:
        await _set_deletion_policy(client, source_content, source.deletion_policy)
    await _set_deletion_policy(client, content, RETAIN)


async def record_handle(client: KubeClient, content: VolumeSnapshotContent) -> None:
    """Record the handle of a backup `content` that is to be deleted in its status, where its sidecar looks for it.

    The sidecar itself has not, while the driver does not answer: it would delete the content, and leave the snapshot.
    Source: external-snapshotter v8.6.0, pkg/sidecar-controller/snapshot_controller.go (syncContent).
    """
    handle, recorded = manifests.snapshot_handle(content), (content.get("status") or {}).get("snapshotHandle")
    if handle is None or recorded or content["metadata"].get("deletionTimestamp"):
        return
    # The ClusterRole of an earlier version does not permit it.
    with suppress(ForbiddenError):
        status: Manifest = {"status": {"snapshotHandle": handle}}
        await patch_if_there(client, kube.VOLUME_SNAPSHOT_CONTENTS, content, status, subresource="status")


def _is_handed_over(content: VolumeSnapshotContent, snapshot: VolumeSnapshot | None) -> bool:
    """Return whether the handover has begun to delete the source's content, which it does after its snapshot."""
    return snapshot is None and bool(content["metadata"].get("deletionTimestamp"))


async def _set_deletion_policy(client: KubeClient, content: VolumeSnapshotContent, policy: str) -> None:
    """Set what becomes of the snapshot on the storage, also where another client has begun to delete `content`.

    Its sidecar acts once the VolumeSnapshot is being deleted, not before.
    Source: external-snapshotter v8, pkg/sidecar-controller/snapshot_controller.go (shouldDelete).
    """
    await patch_if_there(client, kube.VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": policy}})


async def delete_base(client: KubeClient, request: RestoreRequest) -> Pending | None:
    """Delete the snapshot that was taken for a restore alone; None once there is none."""
    if request.base_snapshot is None:
        return None
    namespace, name = request.base_snapshot
    snapshot = await client.read(kube.VOLUME_SNAPSHOTS, namespace, name)
    if snapshot is None or _created_later(snapshot, request.requested_at):
        return None
    return await delete_object(client, kube.VOLUME_SNAPSHOTS, snapshot)


def _created_later(snapshot: VolumeSnapshot, requested_at: datetime | None) -> bool:
    created = snapshot["metadata"]["creationTimestamp"]
    return requested_at is not None and parse_time(created) > requested_at


def _check_volume(request: SnapshotRequest, claim: PersistentVolumeClaim) -> None:
    """Raise ExposeError unless the volume of the source and its class are known.

    Source: Velero v1.18.2, GetVolumeTopology in pkg/util/kube/pvc_pv.go.
    """
    if not request.storage_class:
        raise ExposeError(
            f"{request.owner.kind} {request.owner.namespace}/{request.owner.name} has no csiSnapshot.storageClass"
        )
    if not claim["spec"].get("volumeName"):
        place = f"PersistentVolumeClaim {request.source_namespace}/{request.source_claim}"
        raise ExposeError(f"{place} has no PersistentVolume")


def recorded_source(content: VolumeSnapshotContent) -> manifests.SnapshotSource | None:
    """Return the source recorded on the backup `content`; None where that is missing or invalid."""
    try:
        return manifests.parse_source_annotation(content)
    except ContractError:
        return None


async def _read_existing(reader: Reader, resource: kube.Resource[ObjectT], namespace: str, name: str) -> ObjectT:
    obj = await reader.read(resource, namespace, name)
    if obj is None:
        place = f"{namespace}/{name}" if namespace else name
        raise ExposeError(f"{resource.kind} {place} does not exist")
    return obj


_FAST_CLONE_ANNOTATION: Final = "csi.vsphere.volume/fast-provisioning"
_OS_LABEL: Final = "kubernetes.io/os"
_FS_TYPE: Final = "csi.storage.k8s.io/fstype"
_WINDOWS_FS: Final = "ntfs"
WINDOWS_ONLY: Final = "the volume requires a Windows node"


def leave_to_velero(template: AgentTemplate) -> NoReturn:
    """Raise PendingError: Velero's agent carries out what requires a Windows node; ExposeError if there is none."""
    if not template.windows:
        raise ExposeError(f"{WINDOWS_ONLY}, and there is no DaemonSet {AGENT_DAEMONSET_WINDOWS} of Velero's agents")
    raise PendingError(Pending(PendingReason.LEFT_TO_VELERO, f"{WINDOWS_ONLY}: left to Velero's node agent there"))


async def needs_windows(reader: Reader, request: SnapshotRequest) -> bool:
    """Return whether the volume of the snapshot can only be read on a Windows node."""
    claim = await reader.read(kube.PERSISTENT_VOLUME_CLAIMS, request.source_namespace, request.source_claim)
    if claim is None:
        return False
    return await _is_for_windows(reader, request, claim, await _read_class(reader, request.storage_class))


async def place_backup(reader: Reader, request: SnapshotRequest) -> Placement:
    """Return the nodes where the volume created from the snapshot can be read; ExposeError: only Windows nodes can.

    A source PVC that no longer exists adds no restriction.
    """
    rules = request.settings.nodes.choose(request.backup_class)
    claim = await reader.read(kube.PERSISTENT_VOLUME_CLAIMS, request.source_namespace, request.source_claim)
    if claim is None:
        return Placement(alternatives=rules)
    storage_class = await _read_class(reader, request.storage_class)
    if await _is_for_windows(reader, request, claim, storage_class):
        # Velero's agent accepted it, or there is none.
        raise ExposeError(WINDOWS_ONLY)
    if binds_late(storage_class) and request.backup_class != request.storage_class:
        storage_class = await _read_class(reader, request.backup_class)
    avoided = list[str]()
    if _FAST_CLONE_ANNOTATION in (claim["metadata"].get("annotations") or {}) | request.backup_pvc.annotations:
        # A linked clone cannot be attached where its source is.
        avoided = await _attached_nodes(reader, claim)
    return Placement(
        avoid_nodes=tuple(avoided), alternatives=rules, topology=await _read_topology(reader, claim, storage_class)
    )


async def _read_class(reader: Reader, name: str) -> StorageClass | None:
    return await reader.read(kube.STORAGE_CLASSES, "", name) if name else None


async def _read_topology(
    reader: Reader, claim: PersistentVolumeClaim, storage_class: StorageClass | None
) -> tuple[NodeSelectorTerm, ...]:
    """Return the topology of the source volume, as `nodeSelectorTerms`, for a backup PVC of `storage_class`.

    Needed for late-binding classes only: the backup PVC would be provisioned on any node that the
    mover pod is scheduled to. Other classes provision first, perhaps elsewhere, and the scheduler follows the volume:
    Velero, which goes by the class of the source alone, restricts the pod to another zone then. A source that was not
    bound late is restricted by neither: many snapshots can be restored in other zones, which the settings may ask for.
    """
    volume = claim["spec"].get("volumeName")
    if not volume or not binds_late(storage_class):
        return ()
    found = await reader.read(kube.PERSISTENT_VOLUMES, "", volume)
    affinity = (found["spec"].get("nodeAffinity") or {}) if found else {}
    return tuple((affinity.get("required") or {}).get("nodeSelectorTerms") or [])


async def _is_for_windows(
    reader: Reader, request: SnapshotRequest, claim: PersistentVolumeClaim, storage_class: StorageClass | None
) -> bool:
    """Return whether only Windows nodes can read the volume.

    Where no agent of Velero's runs on Windows, the nodes are not read: a volume is for Linux unless its class
    declares a Windows file system.
    """
    if manifests.volume_mode(claim) is VolumeMode.BLOCK:
        return False
    if request.settings.template.windows:
        selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION)
        name = next(iter(await _attached_nodes(reader, claim)), selected)
        node = await reader.read(kube.NODES, "", name) if name else None
        if node is not None and (found := (node["metadata"].get("labels") or {}).get(_OS_LABEL)):
            return found == WINDOWS
    parameters = (storage_class.get("parameters") or {}) if storage_class else {}
    return str(parameters.get(_FS_TYPE, "")).lower() == _WINDOWS_FS


async def _attached_nodes(reader: Reader, claim: PersistentVolumeClaim) -> list[str]:
    volume = claim["spec"].get("volumeName")
    return await attached_nodes(reader, volume) if volume else []
