"""Hands the source snapshot of a DataUpload over to objects of our own.

Knows how the snapshot on the storage changes hands without being lost or left behind. Does
not know what is made of it (`exposer.csi_snapshot`).

A content of our own shares the handle of the source's content; that one is set to Retain,
then snapshot and content of the source are deleted. At any moment at least one content
exists that has the snapshot on the storage deleted with it.
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
from exposer.model import SnapshotRequest, Waiting
from exposer.ownership import CLEANING_UP, belongs, patch_if_there, remove
from exposer.snapshots import (
    SnapshotSource,
    diagnose_snapshot,
    parse_snapshot_source,
    remembered_source,
)

__all__ = ["SourceHandover"]


class SourceHandover:
    """The source of a snapshot: read, taken over, removed."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read(self, request: SnapshotRequest) -> tuple[SnapshotSource, JsonDict] | Waiting:
        """Return the source and its content once the snapshot is ready.

        Raises:
            ExposeError: snapshot, content or claim do not exist.
        """
        namespace = request.source_namespace
        snapshot = await self._existing(VOLUME_SNAPSHOTS, namespace, request.volume_snapshot)
        if snapshot["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"VolumeSnapshot {namespace}/{request.volume_snapshot} is being deleted")
        claim = await self._existing(PERSISTENT_VOLUME_CLAIMS, namespace, request.source_claim)
        waiting = diagnose_snapshot(snapshot)
        if waiting:
            return waiting
        content_name = snapshot["status"]["boundVolumeSnapshotContentName"]
        content = await self._existing(VOLUME_SNAPSHOT_CONTENTS, "", content_name)
        return parse_snapshot_source(snapshot, content, claim), content

    async def take_over(self, request: SnapshotRequest, source: SnapshotSource) -> Waiting | None:
        """Delete the source's snapshot and content, keeping the snapshot on the storage.

        The content is deleted after the snapshot is gone: only then its controller knows
        that nobody uses it.
        """
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
        if content is not None and content["metadata"]["uid"] != source.content_uid:
            content = None
        if content is not None:
            await self._set_deletion_policy(content, "Retain")
        snapshot = await self._client.read(VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
        if snapshot is not None and snapshot["metadata"]["uid"] == source.snapshot_uid:
            waiting = await remove(self._client, VOLUME_SNAPSHOTS, snapshot)
            if waiting:
                return replace(waiting, reason="SnapshotHandover")
        if content is not None:
            await remove(self._client, VOLUME_SNAPSHOT_CONTENTS, content)
        return None

    async def remove(self, request: SnapshotRequest) -> Waiting | None:
        """Have the source's snapshot and content deleted, whether taken over or not."""
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.object_name)
        source = _remembered(content) if content is not None and belongs(content, owner) else None
        if source is not None:
            waiting = await self.take_over(request, source)
            if waiting:
                return replace(waiting, reason=CLEANING_UP)
            left = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
            if left is None or left["metadata"]["uid"] != source.content_uid:
                return None
            return Waiting(CLEANING_UP, f"VolumeSnapshotContent {source.content} is being deleted")
        return await self._remove_untouched(request)

    async def _remove_untouched(self, request: SnapshotRequest) -> Waiting | None:
        """Have the source's snapshot deleted together with what it stands for.

        Nothing tells its UID any more, or not yet. Whoever has seen the load end may have taken
        the next snapshot under the same name by now.
        """
        snapshot = await self._client.read(VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
        if snapshot is None or _came_later(snapshot, request):
            return None
        content_name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName")
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", content_name) if content_name else None
        if content is not None and content["spec"]["volumeSnapshotRef"].get("uid") == snapshot["metadata"]["uid"]:
            await self._set_deletion_policy(content, "Delete")
        return await remove(self._client, VOLUME_SNAPSHOTS, snapshot)

    async def _existing(self, resource: Resource, namespace: str, name: str) -> JsonDict:
        obj = await self._client.read(resource, namespace, name)
        if obj is None:
            place = f"{namespace}/{name}" if namespace else name
            raise ExposeError(f"{resource.kind} {place} does not exist")
        return obj

    async def _set_deletion_policy(self, content: JsonDict, policy: str) -> None:
        meta = content["metadata"]
        if content["spec"].get("deletionPolicy") == policy or meta.get("deletionTimestamp"):
            return
        patch: JsonDict = {"spec": {"deletionPolicy": policy}}
        await patch_if_there(self._client, VOLUME_SNAPSHOT_CONTENTS, content, patch)


def _came_later(snapshot: JsonDict, request: SnapshotRequest) -> bool:
    made_at, created = request.made_at, snapshot["metadata"].get("creationTimestamp")
    return made_at is not None and created is not None and datetime.fromisoformat(created) > made_at


def _remembered(content: JsonDict) -> SnapshotSource | None:
    """Return what our `content` remembers of its source; None where somebody took that off it."""
    try:
        return remembered_source(content)
    except ContractError:
        return None
