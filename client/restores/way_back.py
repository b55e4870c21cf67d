"""The VolumeSnapshot of a volume before it is restored into: for the way back, and for the plan of the restore."""

import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Final

from client.backups.manifests import BackupError, Method, SnapshotWay, choose_method
from client.backups.plan import read_classes
from client.restores.manifests import PlannedRestore
from client.restores.sources import RestoreError
from client.restores.waiting_pods import RestoreTools
from core.aio import run_shielded
from core.clock import Deadline
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, KubeError
from core.kube.resources import VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.kube.types import Manifest, PersistentVolumeClaim, VolumeSnapshot
from core.models.names import COMMAND_ANNOTATION, RESTORE_LABEL, label_value
from exposer.manifests import read_error
from exposer.ownership import DELETE, RETAIN, patch_if_there

__all__ = [
    "REQUEST_TIMEOUT",
    "check_creation",
    "delete_snapshots",
    "make_snapshot",
    "plan_snapshot",
    "wait_until_ready",
]

REQUEST_TIMEOUT: Final = timedelta(seconds=90)
"""More than the retries of a client take."""

_READY_TIMEOUT: Final = timedelta(minutes=10)
_POLL_SECONDS: Final = 1.0


async def plan_snapshot(tools: RestoreTools, one: PlannedRestore, claim: PersistentVolumeClaim) -> Manifest:
    """Return the VolumeSnapshot for the way back.

    Raises:
        RestoreError: none is possible, or could not be created.
    """
    try:
        way = choose_method(claim, Method.CSI_SNAPSHOT, await read_classes(tools.client), ())
    except BackupError as e:
        raise RestoreError(f"{e}: --no-snapshot restores without a way back") from e
    if not isinstance(way, SnapshotWay):
        raise RestoreError(f"PVC {one.target}: no snapshot is possible: --no-snapshot restores without a way back")
    kind = VOLUME_SNAPSHOTS
    meta = {
        "name": await _find_free_name(tools, one),
        "namespace": one.target.namespace,
        "labels": {RESTORE_LABEL: label_value(one.request.name)},
        "annotations": {COMMAND_ANNOTATION: secrets.token_hex(8)},
    }
    spec = {
        "volumeSnapshotClassName": way.snapshot_class,
        "source": {"persistentVolumeClaimName": one.target.name},
    }
    snapshot = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": spec}
    await check_creation(tools, one, kind, snapshot)
    return snapshot


async def _find_free_name(tools: RestoreTools, one: PlannedRestore) -> str:
    """Return a name for the snapshot that no other one has, which may be of older data."""
    name, number = f"{one.name}-before", 1
    while await tools.client.read(VOLUME_SNAPSHOTS, one.target.namespace, name) is not None:
        number += 1
        name = f"{one.name}-before-{number}"
    return name


async def check_creation(tools: RestoreTools, one: PlannedRestore, resource: Resource, manifest: Manifest) -> None:
    """Check by a dry run that the object could be created.

    Raises:
        RestoreError: it could not be.
    """
    try:
        with suppress(AlreadyExistsError):
            await tools.client.try_create(resource, manifest)
    except KubeError as e:
        raise RestoreError(f"PVC {one.target} cannot be restored, nothing was changed: {e}") from e


async def make_snapshot(tools: RestoreTools, snapshot: Manifest) -> None:
    """Create the VolumeSnapshot; a cancellation is raised once that is done.

    Raises:
        RestoreError: another run has created it.
    """

    async def create() -> None:
        await tools.client.create(VOLUME_SNAPSHOTS, snapshot)

    deadline = Deadline.after(tools.clock, REQUEST_TIMEOUT)
    try:
        await run_shielded(create, name="create the snapshot", deadline=deadline)
    except AlreadyExistsError as e:
        if await _read_own(tools, snapshot) is not None:
            # The answer to an earlier attempt was lost.
            return
        # It may have been made long before.
        raise RestoreError(f"{_place(snapshot)} was made meanwhile, nothing was changed: repeat the command") from e


async def wait_until_ready(tools: RestoreTools, snapshot: Manifest) -> VolumeSnapshot:
    """Return the VolumeSnapshot once it can be restored.

    Raises:
        RestoreError: it is not ready in time, or failed.
    """
    meta, deadline = snapshot["metadata"], Deadline.after(tools.clock, _READY_TIMEOUT)
    while True:
        stored = await tools.client.get(VOLUME_SNAPSHOTS, meta["namespace"], meta["name"])
        status = stored.get("status") or {}
        if status.get("readyToUse") and status.get("boundVolumeSnapshotContentName"):
            return stored
        if deadline.expired:
            error = read_error(stored)
            raise RestoreError(f"{_place(snapshot)} is not ready, nothing was changed{f': {error}' if error else ''}")
        await tools.clock.sleep(_POLL_SECONDS)


async def delete_snapshots(tools: RestoreTools, snapshots: Iterable[Manifest]) -> None:
    """Delete the VolumeSnapshots of these that this run has created, with their data; name what stays."""
    for snapshot in snapshots:
        meta = snapshot["metadata"]
        try:
            if (stored := await _read_own(tools, snapshot)) is not None:
                await _let_delete(tools.client, stored)
                await tools.client.delete(
                    VOLUME_SNAPSHOTS, meta["namespace"], meta["name"], uid=stored["metadata"]["uid"]
                )
        except KubeError as e:
            command = f"kubectl -n {meta['namespace']} delete volumesnapshot {meta['name']}"
            tools.on_note(f"{_place(snapshot)} is left, to delete by {command}: {e}")


async def _read_own(tools: RestoreTools, snapshot: Manifest) -> VolumeSnapshot | None:
    """Return the VolumeSnapshot as stored; None: it does not exist, or another run has created it."""
    meta = snapshot["metadata"]
    stored = await tools.client.read(VOLUME_SNAPSHOTS, meta["namespace"], meta["name"])
    own = stored is not None and meta["annotations"].items() <= (stored["metadata"].get("annotations") or {}).items()
    return stored if own else None


async def _let_delete(client: KubeClient, snapshot: VolumeSnapshot) -> None:
    """Have the storage's snapshot deleted too, also if the class retains snapshots: nothing would name it."""
    name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName", "")
    content = await client.read(VOLUME_SNAPSHOT_CONTENTS, "", name) if name else None
    if content is None or content["spec"].get("deletionPolicy") != RETAIN:
        return
    if (content["spec"].get("volumeSnapshotRef") or {}).get("uid") == snapshot["metadata"]["uid"]:
        await patch_if_there(client, VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": DELETE}})


def _place(snapshot: Manifest) -> str:
    return f"{VOLUME_SNAPSHOTS.kind} {snapshot['metadata']['namespace']}/{snapshot['metadata']['name']}"
