"""The plan of a restore into volumes that exist: what would be written and deleted, before anything is changed.

First a VolumeSnapshot of each volume is made, for the way back. A Job of a data mover compares a scratch volume from it
with the backup. That is in the agents' namespace, where the Job has the credentials, so the snapshot gets a second
VolumeSnapshot there, whose deletion deletes no data. Scratch objects are named after the transfer, and removed however
the plan ends; what a command that was killed has left goes when it is repeated.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, cast

from client.install.options import place_of
from client.mover_jobs import end_jobs, find_subject, list_mounting, plan_job, run_job
from client.restores.in_place import InPlaceRestore, delete_snapshots, make_snapshot, wait_until_ready
from client.restores.manifests import PlannedRestore
from client.restores.sources import RestoreError
from client.session import REQUEST_TIMEOUT, Session
from core.clock import Deadline
from core.contract import VolumeMode
from core.errors import AgentError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.kube.types import Manifest, PersistentVolumeClaim, VolumeSnapshot, VolumeSource
from core.models.base import Int64, SparseModel, WireModel
from core.models.names import EXCLUDE_LABEL, RESTORE_PLAN_LABEL, label_value
from core.models.transfer_settings import PLAN_LINE, InPlacePlan
from core.mover_specs import PlanRestore
from exposer.manifests import (
    build_bound_snapshot,
    build_shared_content,
    build_snapshot_spec,
    diagnose_binding,
    parse_snapshot_source,
)
from exposer.ownership import RETAIN, delete_object, delete_with_volume
from exposer.pod_manifest import MoverVolume

_JOB_TIMEOUT: Final = timedelta(hours=1)
_REMOVAL_TIMEOUT: Final = timedelta(minutes=5)
_POLL_SECONDS: Final = 1.0


class VolumeReport(SparseModel, omit_defaults=True):
    """What a restore would do with one volume, the PersistentVolume `volume` of a PVC.

    `snapshot` is the VolumeSnapshot for the way back. `total_bytes` is the size of the backup; 0: not
    known. `device`: all of it is written. `plan` is None if only the total is known.
    """

    namespace: str
    claim: str
    volume: str
    snapshot: str | None = None
    total_bytes: Int64 = 0
    device: bool = False
    plan: InPlacePlan | None = None


class InPlaceReport(WireModel):
    """What a restore would do with its volumes."""

    restore: str
    volumes: list[VolumeReport]


async def prepare_in_place(
    tools: Session, plans: Sequence[InPlaceRestore], decide: Callable[[Sequence[VolumeReport]], bool]
) -> bool:
    """Make the snapshots and the plan of each volume, and return what `decide` returns for it.

    If that is False, or after an error or an interruption, the snapshots are deleted again.

    Raises:
        RestoreError: a snapshot failed, or a restore would be refused.
        JobError: a plan could not be computed.
    """
    made, agreed = list[Manifest](), False
    wanted = [plan.snapshot for plan in plans if plan.snapshot is not None]
    try:
        for snapshot in wanted:
            tools.on_progress(f"making {place_of(snapshot)}")
            # It may exist although there was no answer.
            made.append(snapshot)
            await make_snapshot(tools, snapshot)
        reports = [await _report(tools, plan) for plan in plans]
        agreed = decide(reports)
        return agreed
    finally:
        if agreed:
            for snapshot in made:
                tools.on_note(f"{place_of(snapshot)} has the data before the restore")
        else:
            await tools.finish("delete the snapshots", REQUEST_TIMEOUT, partial(delete_snapshots, tools, made))


async def _report(tools: Session, plan: InPlaceRestore) -> VolumeReport:
    one, found, ready = plan.one, None, None
    device = one.volume.by_block or plan.mode is VolumeMode.BLOCK
    if plan.snapshot is not None:
        tools.on_progress(f"waiting for {place_of(plan.snapshot)}")
        ready = await wait_until_ready(tools, plan.snapshot)
    if ready is not None and plan.claim is not None and not device:
        try:
            found = await _Scratch(tools, one, plan.claim).compare(ready)
        except AgentError as e:
            raise RestoreError(
                f"PVC {one.target}: the restore could not be planned, nothing was changed: {e} "
                "(--no-snapshot restores without a plan and a way back)"
            ) from e
        if found.refusal:
            raise RestoreError(f"PVC {one.target}: {found.refusal} (--delete-extra-files)")
    return VolumeReport(
        namespace=one.target.namespace,
        claim=one.target.name,
        volume=one.existing,
        snapshot=plan.snapshot["metadata"]["name"] if plan.snapshot else None,
        total_bytes=one.volume.size_bytes,
        device=device,
        plan=found,
    )


class _Scratch:
    """The scratch objects for the plan of one volume, all with one name."""

    def __init__(self, tools: Session, one: PlannedRestore, claim: PersistentVolumeClaim) -> None:
        self._tools = tools
        self._one = one
        self._claim = claim
        self._name = f"{one.name}-plan"
        self._labels = {RESTORE_PLAN_LABEL: label_value(one.name), EXCLUDE_LABEL: "true"}

    async def compare(self, snapshot: VolumeSnapshot) -> InPlacePlan:
        """Return what the restore does with the data in a snapshot that is ready, and remove all scratch objects."""
        one, tools = self._one, self._tools
        how = one.request.in_place
        source: VolumeSource = {"persistentVolumeClaim": {"claimName": self._name}}
        spec = PlanRestore(
            volume_namespace=one.volume.repository,
            snapshot=one.volume.snapshot_id,
            incremental=how is not None and how.incremental,
            delete_extra_files=how is not None and how.delete_extra_files,
        )
        subject = await find_subject(tools, "plan", one.volume.location, one.volume.repository)
        job = await plan_job(tools, subject, spec, volume=MoverVolume(source, read_only=True))
        await self._remove()
        try:
            await self._make(snapshot)
            answer = await run_job(tools, job, "plan", _JOB_TIMEOUT)
        finally:
            await tools.finish("remove the scratch volume", 2 * _REMOVAL_TIMEOUT, self._remove)
        (found,) = answer.find(PLAN_LINE)
        return found

    async def _make(self, snapshot: VolumeSnapshot) -> None:
        client, namespace = self._tools.client, self._tools.namespace
        original = await client.get(
            VOLUME_SNAPSHOT_CONTENTS, "", (snapshot.get("status") or {})["boundVolumeSnapshotContentName"]
        )
        if pending := diagnose_binding(snapshot, original):
            raise RestoreError(pending.message)
        content = build_shared_content(original, namespace, self._name, deletion_policy=RETAIN)
        await self._create(VOLUME_SNAPSHOT_CONTENTS, content)
        shared = build_bound_snapshot(content, namespace, self._name)
        await self._create(VOLUME_SNAPSHOTS, shared)
        self._tools.on_progress(f"waiting for VolumeSnapshot {namespace}/{self._name}")
        await wait_until_ready(self._tools, shared)
        size = parse_snapshot_source(snapshot, original, self._claim).size
        # A PVC without a class has no snapshot.
        storage_class = self._claim["spec"].get("storageClassName") or ""
        spec = build_snapshot_spec(self._name, storage_class, size=size, mode=VolumeMode.FILESYSTEM)
        claim = PERSISTENT_VOLUME_CLAIMS.build({"name": self._name, "namespace": namespace}, spec=spec)
        await self._create(PERSISTENT_VOLUME_CLAIMS, claim)

    async def _create(self, resource: Resource, manifest: Manifest) -> None:
        """Create the object; a cancellation is raised once that is done, so that nothing comes after the removal."""
        meta = manifest["metadata"]
        meta["labels"] = (meta.get("labels") or {}) | self._labels
        create = partial(self._tools.client.create, resource, manifest)
        await self._tools.finish(f"create {resource.kind} {self._name}", REQUEST_TIMEOUT, create)

    async def _remove(self) -> None:
        """Delete the Jobs of the plan and its scratch objects, and return once they are gone; name what stays.

        The snapshot goes last: some storages keep one while a volume from it exists.
        """
        deadline = Deadline.after(self._tools.clock, _REMOVAL_TIMEOUT)
        for resource in (PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS):
            if not await self._is_removed(resource, deadline):
                return

    async def _is_removed(self, resource: Resource, deadline: Deadline) -> bool:
        tools = self._tools
        client, namespace = tools.client.patiently(), tools.namespace if resource.namespaced else ""
        try:
            while (left := await client.read(resource, namespace, self._name)) is not None:
                if not self._labels.items() <= (left["metadata"].get("labels") or {}).items():
                    # Of something else, and it stays.
                    return True
                if resource == PERSISTENT_VOLUME_CLAIMS:
                    await end_jobs(tools, await list_mounting(tools, RESTORE_PLAN_LABEL, self._name), _REMOVAL_TIMEOUT)
                    pending = await delete_with_volume(client, cast("PersistentVolumeClaim", left))
                else:
                    pending = await delete_object(client, resource, left)
                if pending is None:
                    return True
                if deadline.expired:
                    raise RestoreError(pending.message)
                await tools.clock.sleep(_POLL_SECONDS)
        except AgentError as e:
            command = f"kubectl {f'-n {namespace} ' if namespace else ''}delete {resource.plural} {self._name}"
            tools.on_note(f"{resource.kind} {self._name} of the plan is left, to delete by {command}: {e}")
            return False
        return True
