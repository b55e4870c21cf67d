"""Base snapshots: the storage's snapshot of the last backup by block stays, for the next one to know what has changed.

Some drivers can tell that only while it exists. After a backup is complete, its content is kept without a
VolumeSnapshot, with the policy Retain, so that nothing else deletes it: one for each PVC. The next complete backup
replaces it. It is deleted with its DataUpload (`exposer.leaked_objects`): then no backup has it as parent. Beside a
Velero server, as there, the deletion policy of the snapshot decides whether it stays at all.
Source: Velero, pull request 10307 (the policy of the snapshot's class); external-snapshotter v8.6.0,
pkg/common-controller and pkg/sidecar-controller, snapshot_controller.go (a content whose VolumeSnapshot was deleted).
"""

from collections.abc import Mapping
from typing import Any

from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import VOLUME_SNAPSHOT_CONTENTS
from core.kube.types import Manifest, VolumeSnapshotContent
from core.kube.velero_server import has_velero_server
from core.models.base import parse_time
from core.models.names import BASE_CLAIM_LABEL, BASE_SNAPSHOT_LABEL, OWNER_UID_LABEL, label_value
from exposer.manifests import GROUP_ANNOTATION, SnapshotSource
from exposer.model import Pending, SnapshotRequest
from exposer.ownership import DELETE, RETAIN, delete_object, patch_if_there

__all__ = ["delete_base_snapshot", "is_in_namespace", "keep_base_snapshot", "replace_base_snapshots"]


async def keep_base_snapshot(
    client: KubeClient, request: SnapshotRequest, content: VolumeSnapshotContent, source: SnapshotSource
) -> None:
    """Keep the snapshot of a complete backup, whose `content` is still the transfer's, unless the policy forbids it.

    Raises:
        KubeError: the API server rejected a request.
    """
    # A driver may refuse to delete a member of a group, and the next backup would wait for it.
    in_group = source.group or GROUP_ANNOTATION in (content["metadata"].get("annotations") or {})
    if in_group or not source.volume_handle:
        return
    if source.deletion_policy != RETAIN and await has_velero_server(client, request.owner.namespace):
        return
    labels = {OWNER_UID_LABEL: None, BASE_SNAPSHOT_LABEL: request.owner.uid, BASE_CLAIM_LABEL: _claim_value(request)}
    kept: Manifest = {"metadata": {"labels": labels}, "spec": {"deletionPolicy": RETAIN}}
    await patch_if_there(client, VOLUME_SNAPSHOT_CONTENTS, content, kept)


async def replace_base_snapshots(client: KubeClient, request: SnapshotRequest) -> Pending | None:
    """Delete all base snapshots of the volume but the newest; that too if it is older than a backup that has none.

    Raises:
        KubeError: the API server rejected a request.
    """
    selector = select_labels({BASE_CLAIM_LABEL: _claim_value(request)})
    found = await client.list(Selection(VOLUME_SNAPSHOT_CONTENTS, label_selector=selector))
    own = sorted((one for one in found if is_in_namespace(one, request.owner.namespace)), key=_created)
    kept = own[-1:]
    if kept and request.requested_at is not None and parse_time(_created(kept[0])[0]) < request.requested_at:
        kept = []
    pending = [await delete_base_snapshot(client, one) for one in own if one not in kept]
    return next(filter(None, pending), None)


async def delete_base_snapshot(client: KubeClient, content: VolumeSnapshotContent) -> Pending | None:
    """Delete a base snapshot and its content; None once there is none.

    Raises:
        KubeError: the API server rejected a request.
    """
    if content["spec"].get("deletionPolicy") != DELETE and not content["metadata"].get("deletionTimestamp"):
        await patch_if_there(client, VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": DELETE}})
    return await delete_object(client, VOLUME_SNAPSHOT_CONTENTS, content)


def is_in_namespace(content: VolumeSnapshotContent, namespace: str) -> bool:
    """Return whether the agents of that namespace keep a base snapshot."""
    return (content["spec"].get("volumeSnapshotRef") or {}).get("namespace") == namespace


def _claim_value(request: SnapshotRequest) -> str:
    # A namespace has no dot.
    return label_value(f"{request.source_namespace}.{request.source_claim}")


def _created(obj: Mapping[str, Any]) -> tuple[str, str]:
    return obj["metadata"]["creationTimestamp"], obj["metadata"]["name"]
