"""Exposes a CSI snapshot: a DataUpload's source becomes a volume in a mover pod.

Knows the order of the steps and what each waits for. Does not know what the objects look
like (`exposer.snapshots`, `exposer.claims`, `exposer.pods`), how the source is handed over
(`exposer.csi_snapshot`), who owns the DataUpload, or what the mover does.

Hands the source snapshot of a DataUpload over to objects of our own.

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
from exposer.ownership import ExposeRun, belongs, made_by_velero, patch_if_there, remove, remove_owned
from exposer.pods import build_backup_pod
from exposer.snapshots import (
    VOLUME_ANNOTATION,
    SnapshotSource,
    build_backup_content,
    build_backup_snapshot,
    diagnose_snapshot,
    parse_snapshot_source,
    remembered_source,
)
from exposer.source_volume import place_backup
from exposer.volumes import condemn_volume_of

__all__ = ["CSISnapshotExposer", "SourceHandover"]


class SourceHandover:
    """The source of a snapshot: read, taken over, removed."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def read(self, request: SnapshotRequest, reader: Reader) -> tuple[SnapshotSource, JsonDict] | Pending:
        """Return the source and its content once the snapshot is ready.

        Raises:
            ExposeError: snapshot, content or claim do not exist.
        """
        namespace = request.source_namespace
        snapshot = await _read_existing(reader, VOLUME_SNAPSHOTS, namespace, request.volume_snapshot)
        if snapshot["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"VolumeSnapshot {namespace}/{request.volume_snapshot} is being deleted")
        claim = await _read_existing(reader, PERSISTENT_VOLUME_CLAIMS, namespace, request.source_claim)
        waiting = diagnose_snapshot(snapshot)
        if waiting:
            return waiting
        content_name = snapshot["status"]["boundVolumeSnapshotContentName"]
        content = await _read_existing(reader, VOLUME_SNAPSHOT_CONTENTS, "", content_name)
        return parse_snapshot_source(snapshot, content, claim), content

    async def take_over(self, request: SnapshotRequest, source: SnapshotSource) -> Pending | None:
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
                return replace(waiting, reason=PendingReason.SNAPSHOT_HANDOVER)
        if content is not None:
            await remove(self._client, VOLUME_SNAPSHOT_CONTENTS, content)
        return None

    async def remove(self, request: SnapshotRequest) -> Pending | None:
        """Have the source's snapshot and content deleted, whether taken over or not."""
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.name)
        source = _remembered(content) if content is not None and belongs(content, owner) else None
        if source is not None:
            waiting = await self.take_over(request, source)
            if waiting:
                return replace(waiting, reason=PendingReason.CLEANING_UP)
            left = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
            if left is None or left["metadata"]["uid"] != source.content_uid:
                return None
            return Pending(PendingReason.CLEANING_UP, f"VolumeSnapshotContent {source.content} is being deleted")
        return await self._remove_untouched(request)

    async def _remove_untouched(self, request: SnapshotRequest) -> Pending | None:
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
        """Say what the expose still has to wait for; reads only.

        Raises:
            ExposeError: snapshot, content or claim of the source do not exist.
            KubeError: the API server refused a read.
        """
        content = await reader.read(VOLUME_SNAPSHOT_CONTENTS, "", request.owner.name)
        if content is not None and belongs(content, request.owner):
            # An earlier attempt has taken the snapshot over; the source may be gone.
            return None
        found = await self._source.read(request, reader)
        return found if isinstance(found, Pending) else None

    async def ensure(self, request: SnapshotRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or what has to be waited for.

        Raises:
            ExposeError: it can never be done.
            NotOwnerError: the DataUpload is somebody else's by now.
            KubeError: the API server refused.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is made last: where it exists, all else was made before it.
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run)
            return await self._causes.judge(pod)

    async def clean_up(self, request: SnapshotRequest) -> Pending | None:
        """Delete what was made, and the source snapshot; None once nothing is left."""
        owner = request.owner
        waiting = await remove_owned(self._client, owner, PODS, owner.name)
        waiting = waiting or await self._remove_claim(request)
        waiting = waiting or await self._source.remove(request)
        waiting = waiting or await remove_owned(self._client, owner, VOLUME_SNAPSHOTS, owner.name)
        return waiting or await remove_owned(self._client, owner, VOLUME_SNAPSHOT_CONTENTS, owner.name)

    async def _ensure_all(self, request: SnapshotRequest, run: ExposeRun) -> JsonDict | Pending:
        content = await self._ensure_content(request, run)
        if isinstance(content, Pending):
            return content
        snapshot = await run.ensure(VOLUME_SNAPSHOTS, build_backup_snapshot(request.owner, content))
        if isinstance(snapshot, Pending):
            return snapshot
        source = remembered_source(content)
        waiting = await self._source.take_over(request, source)
        if waiting:
            return waiting
        if waiting := diagnose_snapshot(snapshot):
            return replace(waiting, since=datetime.fromisoformat(snapshot["metadata"]["creationTimestamp"]))
        manifest = build_backup_claim(request, size=source.size, mode=source.volume_mode)
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, manifest)
        if isinstance(claim, Pending):
            return claim
        placement = await place_backup(self._client, request)
        return await run.ensure(PODS, build_backup_pod(request, claim, placement))

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

    async def _remove_claim(self, request: SnapshotRequest) -> Pending | None:
        """Have the claim deleted, and its volume gone before the snapshot may go.

        Some storages cannot delete a snapshot while a volume made from it exists. The
        volume's name is kept on the content: once the claim is gone nothing else tells it.
        """
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.name)
        if content is not None and not (belongs(content, owner) or made_by_velero(content, owner)):
            content = None
        claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
        if claim is not None and belongs(claim, owner):
            volume = claim["spec"].get("volumeName", "")
            if content is not None and volume:
                await self._remember_volume(content, volume)
            await condemn_volume_of(self._client, claim)
            waiting = await remove(self._client, PERSISTENT_VOLUME_CLAIMS, claim)
            if waiting:
                return waiting
        elif content is not None:
            volume = (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION, "")
        else:
            return None
        left = await self._client.read(PERSISTENT_VOLUMES, "", volume) if volume else None
        if left is None:
            return None
        return Pending(PendingReason.CLEANING_UP, f"PersistentVolume {volume} of the snapshot is being deleted")

    async def _remember_volume(self, content: JsonDict, volume: str) -> None:
        if (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION) == volume:
            return
        patch: JsonDict = {"metadata": {"annotations": {VOLUME_ANNOTATION: volume}}}
        await patch_if_there(self._client, VOLUME_SNAPSHOT_CONTENTS, content, patch)
