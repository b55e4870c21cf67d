"""Exposer of CSI snapshots: a DataUpload's source snapshot becomes a volume of a mover pod.

Runs the steps and their cleanup in order; the objects are built by `exposer.snapshots`,
`exposer.claims` and `exposer.pods`.

Handover: the backup content shares the handle of the source content; the source content is set to
Retain, then the source's snapshot and content are deleted. At any moment at least one content
exists whose deletion deletes the snapshot on the storage.
"""

from dataclasses import replace
from datetime import datetime

from core.errors import ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.causes import CauseFinder
from exposer.claims import build_backup_claim
from exposer.model import Exposed, Guard, Pending, Reader, SnapshotRequest
from exposer.ownership import (
    ExposeRun,
    belongs,
    created_by_velero,
    delete_object,
    delete_owned,
    patch_if_there,
)
from exposer.pods import build_backup_pod
from exposer.snapshots import (
    VOLUME_ANNOTATION,
    SnapshotSource,
    build_backup_content,
    build_backup_snapshot,
    diagnose_snapshot,
    parse_snapshot_source,
    parse_source_annotation,
)
from exposer.source_volume import place_backup
from exposer.storage_access import read_storage_access
from exposer.volumes import reclaim_with_claim

__all__ = ["CSISnapshotExposer", "SourceHandover"]


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


class CSISnapshotExposer:
    """The `Exposer` of DataUploads."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client = client
        self._causes = causes
        self._source = SourceHandover(client)

    async def check(self, request: SnapshotRequest, reader: Reader) -> Pending | None:
        """Return why the expose cannot start yet; reads only.

        Raises:
            ExposeError: snapshot, content or PVC of the source do not exist.
            KubeError: the API server rejected a read.
        """
        content = await reader.read(VOLUME_SNAPSHOT_CONTENTS, "", request.owner.name)
        if content is not None and belongs(content, request.owner):
            # An earlier attempt has taken the snapshot over; the source may no longer exist.
            return None
        found = await self._source.read(request, reader)
        return found if isinstance(found, Pending) else None

    async def ensure(self, request: SnapshotRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or why it is pending.

        Raises:
            ExposeError: the expose can never succeed.
            NotOwnerError: the DataUpload is no longer this agent's.
            KubeError: the API server rejected a request.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is created last: where it exists, all other objects were created before it.
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run)
            return await self._causes.inspect(pod)

    async def clean_up(self, request: SnapshotRequest) -> Pending | None:
        """Delete the expose objects and the source snapshot; None once nothing is left."""
        owner = request.owner
        pending = await delete_owned(self._client, owner, PODS, owner.name)
        pending = pending or await self._delete_claim(request)
        pending = pending or await self._source.delete(request)
        pending = pending or await delete_owned(self._client, owner, VOLUME_SNAPSHOTS, owner.name)
        return pending or await delete_owned(self._client, owner, VOLUME_SNAPSHOT_CONTENTS, owner.name)

    async def _ensure_all(self, request: SnapshotRequest, run: ExposeRun) -> JsonDict | Pending:
        content = await self._ensure_content(request, run)
        if isinstance(content, Pending):
            return content
        snapshot = await run.ensure(VOLUME_SNAPSHOTS, build_backup_snapshot(request.owner, content))
        if isinstance(snapshot, Pending):
            return snapshot
        source = parse_source_annotation(content)
        pending = await self._source.take_over(request, source)
        if pending:
            return pending
        if pending := diagnose_snapshot(snapshot):
            return replace(pending, since=datetime.fromisoformat(snapshot["metadata"]["creationTimestamp"]))
        manifest = build_backup_claim(request, size=source.size, mode=source.volume_mode)
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, manifest)
        if isinstance(claim, Pending):
            return claim
        placement = await place_backup(self._client, request)
        storage = await read_storage_access(self._client, request.owner.namespace, request.location)
        return await run.ensure(PODS, build_backup_pod(request, claim, placement, storage=storage))

    async def _ensure_content(self, request: SnapshotRequest, run: ExposeRun) -> JsonDict | Pending:
        content = await run.read(VOLUME_SNAPSHOT_CONTENTS, request.owner.name)
        if content is not None:
            return content
        found = await self._source.read(request, self._client)
        if isinstance(found, Pending):
            return found
        source, source_content = found
        manifest = build_backup_content(request.owner, source_content, source)
        return await run.ensure(VOLUME_SNAPSHOT_CONTENTS, manifest)

    async def _delete_claim(self, request: SnapshotRequest) -> Pending | None:
        """Delete the backup PVC and its volume; the snapshot is deleted after both.

        Some storages cannot delete a snapshot while a volume created from it exists. The volume's
        name is recorded on the content, since the PVC is deleted first.
        """
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.name)
        if content is not None and not (belongs(content, owner) or created_by_velero(content, owner)):
            content = None
        claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
        if claim is not None and belongs(claim, owner):
            volume = claim["spec"].get("volumeName", "")
            if content is not None and volume:
                await self._record_volume(content, volume)
            await reclaim_with_claim(self._client, claim)
            pending = await delete_object(self._client, PERSISTENT_VOLUME_CLAIMS, claim)
            if pending:
                return pending
        elif content is not None:
            volume = (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION, "")
        else:
            return None
        left = await self._client.read(PERSISTENT_VOLUMES, "", volume) if volume else None
        if left is None:
            return None
        return Pending(PendingReason.CLEANING_UP, f"PersistentVolume {volume} of the snapshot is being deleted")

    async def _record_volume(self, content: JsonDict, volume: str) -> None:
        if (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION) == volume:
            return
        patch: JsonDict = {"metadata": {"annotations": {VOLUME_ANNOTATION: volume}}}
        await patch_if_there(self._client, VOLUME_SNAPSHOT_CONTENTS, content, patch)
