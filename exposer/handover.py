"""Handover: a source snapshot becomes the backup content of a transfer, in the agent's namespace.

The backup content shares the handle of the source content; the source content is set to Retain, then
the source's snapshot and content are deleted. At any moment at least one content exists whose
deletion deletes the snapshot on the storage.
"""

from dataclasses import replace
from datetime import datetime

from core.errors import ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.model import Pending, Reader, SnapshotRequest
from exposer.ownership import belongs, delete_object, patch_if_there
from exposer.snapshots import (
    SnapshotSource,
    diagnose_snapshot,
    parse_snapshot_source,
    parse_source_annotation,
)

__all__ = ["SourceHandover"]


class SourceHandover:
    """The handover of a source snapshot: reads, takes over and deletes it."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read(self, request: SnapshotRequest, reader: Reader) -> tuple[SnapshotSource, JsonDict] | Pending:
        """Return the source and its content once the snapshot is ready.

        Raises:
            ExposeError: snapshot, content or PVC do not exist.
        """
        namespace = request.source_namespace
        snapshot = await _read_existing(reader, VOLUME_SNAPSHOTS, namespace, request.volume_snapshot)
        if snapshot["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"VolumeSnapshot {namespace}/{request.volume_snapshot} is being deleted")
        claim = await _read_existing(reader, PERSISTENT_VOLUME_CLAIMS, namespace, request.source_claim)
        pending = diagnose_snapshot(snapshot)
        if pending:
            return pending
        content_name = snapshot["status"]["boundVolumeSnapshotContentName"]
        content = await _read_existing(reader, VOLUME_SNAPSHOT_CONTENTS, "", content_name)
        return parse_snapshot_source(snapshot, content, claim), content

    async def take_over(self, request: SnapshotRequest, source: SnapshotSource) -> Pending | None:
        """Delete the source's snapshot and content, keeping the snapshot on the storage.

        The content is deleted after the snapshot: only then its controller knows that it is
        unused.
        """
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
        if content is not None and content["metadata"]["uid"] != source.content_uid:
            content = None
        if content is not None:
            await self._set_deletion_policy(content, "Retain")
        snapshot = await self._client.read(VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
        if snapshot is not None and snapshot["metadata"]["uid"] == source.snapshot_uid:
            pending = await delete_object(self._client, VOLUME_SNAPSHOTS, snapshot)
            if pending:
                return replace(pending, reason=PendingReason.SNAPSHOT_HANDOVER)
        if content is not None:
            await delete_object(self._client, VOLUME_SNAPSHOT_CONTENTS, content)
        return None

    async def delete(self, request: SnapshotRequest) -> Pending | None:
        """Delete the source's snapshot and content, whether taken over or not."""
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.name)
        source = _recorded_source(content) if content is not None and belongs(content, owner) else None
        if source is not None:
            pending = await self.take_over(request, source)
            if pending:
                return replace(pending, reason=PendingReason.CLEANING_UP)
            left = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
            if left is None or left["metadata"]["uid"] != source.content_uid:
                return None
            return Pending(PendingReason.CLEANING_UP, f"VolumeSnapshotContent {source.content} is being deleted")
        return await self._delete_untouched(request)

    async def _delete_untouched(self, request: SnapshotRequest) -> Pending | None:
        """Delete the source's snapshot together with the snapshot on the storage.

        Its UID is not recorded, or no longer. A client that saw the transfer finish may have
        created the next snapshot under the same name by now.
        """
        snapshot = await self._client.read(VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
        if snapshot is None or _created_later(snapshot, request):
            return None
        content_name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", content_name) if content_name else None
        if content is not None and content["spec"]["volumeSnapshotRef"].get("uid") == snapshot["metadata"]["uid"]:
            await self._set_deletion_policy(content, "Delete")
        return await delete_object(self._client, VOLUME_SNAPSHOTS, snapshot)

    async def _set_deletion_policy(self, content: JsonDict, policy: str) -> None:
        meta = content["metadata"]
        if content["spec"].get("deletionPolicy") == policy or meta.get("deletionTimestamp"):
            return
        patch: JsonDict = {"spec": {"deletionPolicy": policy}}
        await patch_if_there(self._client, VOLUME_SNAPSHOT_CONTENTS, content, patch)


def _created_later(snapshot: JsonDict, request: SnapshotRequest) -> bool:
    requested_at, created = request.requested_at, snapshot["metadata"].get("creationTimestamp")
    return requested_at is not None and created is not None and datetime.fromisoformat(created) > requested_at


def _recorded_source(content: JsonDict) -> SnapshotSource | None:
    """Return the source recorded on the backup `content`; None where that is missing or invalid."""
    try:
        return parse_source_annotation(content)
    except ContractError:
        return None


async def _read_existing(reader: Reader, resource: Resource, namespace: str, name: str) -> JsonDict:
    obj = await reader.read(resource, namespace, name)
    if obj is None:
        place = f"{namespace}/{name}" if namespace else name
        raise ExposeError(f"{resource.kind} {place} does not exist")
    return obj
