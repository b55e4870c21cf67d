"""Exposer of CSI snapshots: a DataUpload's source snapshot becomes a volume of a mover pod."""

import logging
from dataclasses import replace
from typing import Final

from core.errors import ExposeError
from core.kube import resources as kube
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, MalformedObjectError
from core.kube.types import Manifest, MetadataServiceSpec, Pod, VolumeSnapshot, VolumeSnapshotContent
from core.models.phases import Interruption, InterruptionCause
from core.models.reasons import PendingReason
from exposer import manifests, ownership, sources
from exposer.causes import CauseFinder
from exposer.expose_run import ExposeRun, MoverExposer, check_copies, delete_copies, ensure_copies
from exposer.leaked_objects import keep_base_snapshot, replace_base_snapshots
from exposer.model import Exposed, Guard, Owner, Pending, PendingError, Reader, SnapshotRequest, or_pending
from exposer.pods import build_backup_pod
from exposer.settings import read_exclusions

_logger = logging.getLogger(__name__)

_MIGRATED: Final = "pv.kubernetes.io/migrated-to"
"""On a PVC whose class is of an in-tree plugin: the CSI driver that serves it."""

_LONGEST_END_SECONDS: Final = 120.0
"""Of a pod, which has 30 seconds: the kubelet of a lost node never ends it."""


class CSISnapshotExposer(MoverExposer):
    """Exposes the snapshots of DataUploads: each step can be interrupted and repeated."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        super().__init__(client, causes)
        self._since: dict[tuple[str, str], float] = {}

    @or_pending
    async def check(self, request: SnapshotRequest, reader: Reader) -> None:
        """Return why the expose cannot start yet; raise ExposeError if objects of the source are gone. Reads only."""
        content = await reader.read(kube.VOLUME_SNAPSHOT_CONTENTS, "", request.owner.name)
        if content is None or not ownership.belongs(content, request.owner):
            # Otherwise an earlier attempt has taken the snapshot over; the source may no longer exist.
            await sources.read_source(reader, request)
        await check_copies(reader, request.copies)
        template = request.settings.template
        if template.windows and await sources.needs_windows(reader, request):
            sources.leave_to_velero(template)

    @or_pending
    async def ensure(self, request: SnapshotRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or why it is pending.

        ExposeError: it can never succeed. NotOwnerError: the DataUpload is no longer this agent's.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            if request.fell_back and (pending := await self._drop_device(request.owner)):
                return pending
            try:
                # The pod is created last: where it exists, all other objects were created before it.
                pod = await run.read(kube.PODS, request.owner.name)
            except PendingError:
                if self._lasts(request.owner, "pod", _LONGEST_END_SECONDS):
                    # It only reads.
                    await ownership.delete_owned(self._client, request.owner, kube.PODS, forced=True)
                raise
            self._since.pop((request.owner.uid, "pod"), None)
            return await self._causes.inspect(pod or await self._ensure_all(request, run), by_block=request.by_block)

    def _lasts(self, owner: Owner, what: str, seconds: float) -> bool:
        """Return whether the deletion of an object has been waited for so long."""
        now = self._causes.clock.monotonic()
        return now - self._since.setdefault((owner.uid, what), now) >= seconds

    async def confirm(self, request: SnapshotRequest) -> None:
        """Raise ExposeError if the volume of the backup PVC, which is bound by now, is not of the snapshot.

        It existed before, or its provisioner is of no CSI driver, and has ignored that the PVC names a snapshot. A CSI
        driver that serves a class of an in-tree plugin creates a volume of that plugin.
        Source: sig-storage-lib-external-provisioner v13, controller/controller.go (provisionClaimOperation);
        external-provisioner v6.3, pkg/controller/controller.go (Provision).
        """
        owner = request.owner
        claim = await self._client.read(kube.PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
        name = claim["spec"].get("volumeName") if claim is not None else ""
        volume = await self._client.read(kube.PERSISTENT_VOLUMES, "", name) if name else None
        if claim is None or volume is None:
            return
        by_driver = volume["spec"].get("csi") or _MIGRATED in (claim["metadata"].get("annotations") or {})
        if ownership.is_provisioned(volume) and by_driver:
            return
        place, existing = f"{owner.namespace}/{owner.name}", "" if ownership.is_provisioned(volume) else "existing "
        why = "" if existing else f": StorageClass {request.backup_class} is of no CSI driver"
        raise ExposeError(
            f"PersistentVolumeClaim {place} was bound to the {existing}PersistentVolume {name}, "
            f"which was not created from VolumeSnapshot {place}{why}"
        )

    async def withdraw(self, request: SnapshotRequest, last: Interruption, guard: Guard) -> Pending | None:
        """Delete the mover pod and, unless only the mover ended, the backup PVC: the next one may be on another node.

        On a lost node the pod would stay for as long as the node does; it only reads. So does the volume, which the
        next attempt does not wait for, but the cleanup.
        """
        owner, lost = request.owner, last.cause is InterruptionCause.NODE_LOST
        pending = await ownership.delete_owned(self._client, owner, kube.PODS, forced=lost, guard=guard)
        if pending or last.in_place:
            return pending
        claim = await ownership.read_owned(self._client, owner, kube.PERSISTENT_VOLUME_CLAIMS, guard=guard)
        if claim is None:
            return None
        content = await ownership.read_owned(self._client, owner, kube.VOLUME_SNAPSHOT_CONTENTS)
        return await ownership.delete_with_volume(self._client, claim, *([content] if content else []))

    async def clean_up(self, request: SnapshotRequest) -> Pending | None:
        """Delete the owner's expose objects, then the source snapshot, at any stage; None once nothing is left."""
        owner = request.owner
        if pending := await ownership.delete_owned(self._client, owner, kube.PODS):
            return pending
        content = await ownership.read_owned(self._client, owner, kube.VOLUME_SNAPSHOT_CONTENTS)
        pending = await self._delete_claim(request, content)
        pending = pending or await delete_copies(self._client, request.copies)
        pending = pending or await sources.delete_source(self._client, request)
        replaces = request.by_block and request.completed
        if pending is None and content is not None:
            await sources.record_handle(self._client, content)
            pending = await self._keep_base(request, content) if replaces else None
        if pending is None and (snapshot := await ownership.read_owned(self._client, owner, kube.VOLUME_SNAPSHOTS)):
            pending = await ownership.delete_backup_snapshot(self._client, snapshot)
        pending = pending or await ownership.delete_owned(self._client, owner, kube.VOLUME_SNAPSHOT_CONTENTS)
        if pending is None and replaces:
            pending = await replace_base_snapshots(self._client, request)
        if pending is None:
            for what in ("content", "pod"):
                self._since.pop((owner.uid, what), None)
        elif content is not None:
            return await self._keep_refused(request, content) or pending
        return pending

    async def _keep_base(self, request: SnapshotRequest, content: VolumeSnapshotContent) -> Pending | None:
        """Keep the snapshot for the next backup, if the driver can tell what has changed since; None: not kept."""
        source = sources.recorded_source(content)
        if source and ownership.belongs(content, request.owner) and await self._read_metadata_service(content):
            return await keep_base_snapshot(self._client, request, content, source)
        return None

    async def _ensure_all(self, request: SnapshotRequest, run: ExposeRun) -> Pod:
        content = await self._ensure_content(request, run)
        source = manifests.parse_source_annotation(content)
        if (request.source_namespace, request.volume_snapshot) == (request.owner.namespace, request.owner.name):
            # A command gives both the same name: the source's snapshot makes room for the backup's.
            await self._take_over(request, run, source)
        snapshot = await self._ensure_snapshot(request, run, content, source=source)
        await self._take_over(request, run, source)
        if pending := manifests.diagnose_snapshot(snapshot, content):
            pending = await self._leave_group(run, content) or pending
            raise PendingError(replace(pending, operation=f"readiness of {snapshot['metadata']['uid']}"))
        await ensure_copies(run, request.copies)
        manifest = manifests.build_backup_claim(request, size=source.size, mode=source.volume_mode)
        claim = await run.ensure(kube.PERSISTENT_VOLUME_CLAIMS, manifest)
        placement = await sources.place_backup(self._client, request)
        storage = await run.read_storage_access(request.location)
        annotated = request.source_namespace in request.settings.exclusions.annotation_namespaces
        named = request.source_namespace, request.source_claim
        excluded = read_exclusions(
            await self._client.read(kube.PERSISTENT_VOLUME_CLAIMS, *named) if annotated else None
        )
        tracked = manifests.track_snapshot(snapshot, content, source) if request.by_block else None
        service = await self._read_metadata_service(content) if tracked else None
        pod = build_backup_pod(
            request, claim, placement, storage=storage, excluded=excluded, tracked=tracked, service=service
        )
        return await run.ensure(kube.PODS, pod)

    async def _read_metadata_service(self, content: VolumeSnapshotContent) -> MetadataServiceSpec | None:
        """Return where the driver of a `content` says what has changed; None: it does not, or that cannot be read."""
        try:
            found = await self._client.read(kube.SNAPSHOT_METADATA_SERVICES, "", content["spec"]["driver"])
        except (ForbiddenError, MalformedObjectError) as e:
            _logger.warning("the whole device will be read: %s", e)
            return None
        return found["spec"] if found else None

    async def _drop_device(self, owner: Owner) -> Pending | None:
        """Delete the backup PVC that was refused as a device, and its pod before it; None once there is none."""
        claim = await ownership.read_owned(self._client, owner, kube.PERSISTENT_VOLUME_CLAIMS)
        if claim is None or not ownership.is_refused(claim):
            return None
        pending = await ownership.delete_owned(self._client, owner, kube.PODS)
        return pending or await ownership.delete_with_volume(self._client, claim)

    async def _ensure_content(self, request: SnapshotRequest, run: ExposeRun) -> VolumeSnapshotContent:
        content = await run.read(kube.VOLUME_SNAPSHOT_CONTENTS, request.owner.name)
        if content is not None:
            return content
        source, source_content = await sources.read_source(self._client, request)
        manifest = manifests.build_backup_content(request.owner, source_content, source, by_block=request.by_block)
        return await run.ensure(kube.VOLUME_SNAPSHOT_CONTENTS, manifest)

    async def _take_over(self, request: SnapshotRequest, run: ExposeRun, source: manifests.SnapshotSource) -> None:
        if pending := await sources.take_over_source(self._client, request, source, run.confirm):
            raise PendingError(replace(pending, reason=PendingReason.SNAPSHOT_HANDOVER))

    async def _ensure_snapshot(
        self,
        request: SnapshotRequest,
        run: ExposeRun,
        content: VolumeSnapshotContent,
        *,
        source: manifests.SnapshotSource,
    ) -> VolumeSnapshot:
        found = await run.read(kube.VOLUME_SNAPSHOTS, request.owner.name)
        if found is not None:
            return found
        original = await self._client.read(kube.VOLUME_SNAPSHOTS, request.source_namespace, request.volume_snapshot)
        if original is not None and original["metadata"]["uid"] != source.snapshot_uid:
            original = None
        excluded = request.settings.excluded_metadata
        manifest = manifests.build_backup_snapshot(request.owner, content, original, excluded=excluded)
        return await run.ensure(kube.VOLUME_SNAPSHOTS, manifest)

    async def _leave_group(self, run: ExposeRun, content: VolumeSnapshotContent) -> Pending | None:
        """Let the backup snapshot become ready although its group's objects are gone; None: it is in no group.

        What cannot be deleted is kept before: the sidecar would ask the driver again and again.
        """
        group = manifests.find_group(content)
        if not group:
            return None
        await run.confirm()
        pending = await self._keep(content, group)
        without: Manifest = {"status": {"volumeGroupSnapshotHandle": None}}
        await ownership.patch_if_there(
            self._client, kube.VOLUME_SNAPSHOT_CONTENTS, content, without, subresource="status"
        )
        return pending

    async def _keep_refused(self, request: SnapshotRequest, content: VolumeSnapshotContent) -> Pending | None:
        """Keep a member of a group that its driver does not delete within the operation timeout; None: go on.

        A driver that cannot list snapshots does not name their group.
        Source: external-snapshotter v8.6.0, pkg/snapshotter/snapshotter.go (GetSnapshotStatus).
        """
        source = sources.recorded_source(content)
        if source is None or not source.group or content["spec"]["deletionPolicy"] != ownership.DELETE:
            return None
        if not content["metadata"].get("deletionTimestamp"):
            return None
        limit = request.settings.mover_options(request.operation_timeout).resource_timeout
        if not self._lasts(request.owner, "content", limit.total_seconds()):
            return None
        return await self._keep(content, source.group)

    async def _keep(self, content: VolumeSnapshotContent, group: str) -> Pending:
        """Leave the snapshot of a group on the storage when its content is deleted; return that."""
        kept: Manifest = {
            "metadata": {"annotations": {manifests.GROUP_ANNOTATION: group}},
            "spec": {"deletionPolicy": ownership.RETAIN},
        }
        await ownership.patch_if_there(self._client, kube.VOLUME_SNAPSHOT_CONTENTS, content, kept)
        return manifests.diagnose_group(content, group)

    async def _delete_claim(self, request: SnapshotRequest, content: VolumeSnapshotContent | None) -> Pending | None:
        """Delete the backup PVC and its volume; the snapshot is deleted after both, as some storages require."""
        contents = [content] if content is not None else []
        claim = await ownership.read_owned(self._client, request.owner, kube.PERSISTENT_VOLUME_CLAIMS)
        if claim is not None and (pending := await ownership.delete_with_volume(self._client, claim, *contents)):
            return pending
        own = claim["spec"].get("volumeName") if claim is not None else None
        recorded = (name for one in contents for name in manifests.recorded_volumes(one))
        return await ownership.find_snapshot_volume(self._client, {*recorded, *([own] if own else [])})
