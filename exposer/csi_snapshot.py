"""Exposes a CSI snapshot: a DataUpload's source becomes a volume in a mover pod.

Knows the order of the steps and what each waits for. Does not know what the objects look
like (`exposer.snapshots`, `exposer.claims`, `exposer.pod`), how the source is handed over
(`exposer.handover`), who owns the DataUpload, or what the mover does.
"""

from dataclasses import replace
from datetime import datetime

from core.kube.client import KubeClient
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.models.base import JsonDict
from exposer.causes import CauseFinder
from exposer.claims import build_backup_claim
from exposer.handover import SourceHandover
from exposer.model import Exposed, Guard, SnapshotRequest, Waiting
from exposer.ownership import CLEANING_UP, ExposeRun, belongs, made_by_peer, patch_if_there, remove, remove_owned
from exposer.pod import build_backup_pod
from exposer.snapshots import (
    VOLUME_ANNOTATION,
    build_backup_content,
    build_backup_snapshot,
    diagnose_snapshot,
    remembered_source,
)
from exposer.source_volume import place_backup
from exposer.volumes import condemn_volume_of

__all__ = ["CSISnapshotExposer"]


class CSISnapshotExposer:
    """The `Exposer` of DataUploads."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client = client
        self._causes = causes
        self._source = SourceHandover(client)

    async def check(self, request: SnapshotRequest) -> Waiting | None:
        """Say what the expose still has to wait for; reads only.

        Raises:
            ExposeError: snapshot, content or claim of the source do not exist.
            KubeError: the API server refused a read.
        """
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", request.owner.object_name)
        if content is not None and belongs(content, request.owner):
            # An earlier attempt has taken the snapshot over; the source may be gone.
            return None
        found = await self._source.read(request)
        return found if isinstance(found, Waiting) else None

    async def ensure(self, request: SnapshotRequest, guard: Guard) -> Exposed | Waiting:
        """Take the next steps and return the pod, or what has to be waited for.

        Raises:
            ExposeError: it can never be done.
            NotOwnerError: the DataUpload is somebody else's by now.
            KubeError: the API server refused.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is made last: where it exists, all else was made before it.
            pod = await run.read(PODS, request.owner.object_name) or await self._ensure_all(request, run)
            return await self._causes.judge(pod)

    async def clean_up(self, request: SnapshotRequest) -> Waiting | None:
        """Delete what was made, and the source snapshot; None once nothing is left."""
        owner = request.owner
        waiting = await remove_owned(self._client, owner, PODS, owner.object_name)
        waiting = waiting or await self._remove_claim(request)
        waiting = waiting or await self._source.remove(request)
        waiting = waiting or await remove_owned(self._client, owner, VOLUME_SNAPSHOTS, owner.object_name)
        return waiting or await remove_owned(self._client, owner, VOLUME_SNAPSHOT_CONTENTS, owner.object_name)

    async def _ensure_all(self, request: SnapshotRequest, run: ExposeRun) -> JsonDict | Waiting:
        content = await self._ensure_content(request, run)
        if isinstance(content, Waiting):
            return content
        snapshot = await run.ensure(VOLUME_SNAPSHOTS, build_backup_snapshot(request.owner, content))
        if isinstance(snapshot, Waiting):
            return snapshot
        source = remembered_source(content)
        waiting = await self._source.take_over(request, source)
        if waiting:
            return waiting
        if waiting := diagnose_snapshot(snapshot):
            return replace(waiting, since=datetime.fromisoformat(snapshot["metadata"]["creationTimestamp"]))
        manifest = build_backup_claim(request, size=source.size, mode=source.volume_mode)
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, manifest)
        if isinstance(claim, Waiting):
            return claim
        placement = await place_backup(self._client, request)
        return await run.ensure(PODS, build_backup_pod(request, claim, placement))

    async def _ensure_content(self, request: SnapshotRequest, run: ExposeRun) -> JsonDict | Waiting:
        content = await run.read(VOLUME_SNAPSHOT_CONTENTS, request.owner.object_name)
        if content is not None:
            return content
        found = await self._source.read(request)
        if isinstance(found, Waiting):
            return found
        source, source_content = found
        manifest = build_backup_content(request.owner, source_content, source)
        return await run.ensure(VOLUME_SNAPSHOT_CONTENTS, manifest)

    async def _remove_claim(self, request: SnapshotRequest) -> Waiting | None:
        """Have the claim deleted, and its volume gone before the snapshot may go.

        Some storages cannot delete a snapshot while a volume made from it exists. The
        volume's name is kept on the content: once the claim is gone nothing else tells it.
        """
        owner = request.owner
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", owner.object_name)
        if content is not None and not (belongs(content, owner) or made_by_peer(content, owner)):
            content = None
        claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.object_name)
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
        return Waiting(CLEANING_UP, f"PersistentVolume {volume} of the snapshot is being deleted")

    async def _remember_volume(self, content: JsonDict, volume: str) -> None:
        if (content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION) == volume:
            return
        patch: JsonDict = {"metadata": {"annotations": {VOLUME_ANNOTATION: volume}}}
        await patch_if_there(self._client, VOLUME_SNAPSHOT_CONTENTS, content, patch)
