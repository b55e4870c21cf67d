"""Creates the objects of a planned backup: all snapshots first, then all transfers. A repetition creates none twice."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline
from core.errors import AgentError
from core.kube.errors import AlreadyExistsError, KubeError
from core.kube.resources import VOLUME_SNAPSHOTS, Resource
from core.models.base import JsonDict, parse_time
from core.models.names import BACKUP_LABEL
from nodeagent.operations.backups.methods import BackupError, Method
from nodeagent.operations.backups.objects import PlannedVolume
from nodeagent.operations.backups.plan import BackupTools

__all__ = ["check_backup", "start_backup"]

_CREATION_TIMEOUT: Final = timedelta(minutes=15)

_OLDEST_SNAPSHOT: Final = timedelta(hours=1)
"""Of an earlier run that made no transfer of it: the data of an older one is not what the user asks for now."""


async def start_backup(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> None:
    """Create the snapshots and the transfers of these volumes.

    An interruption lets it finish. If an object is rejected nevertheless, snapshots without a transfer are deleted.

    Raises:
        BackupError: an object cannot be created; the message names its volume, and what there is of the backup.
    """
    deadline = Deadline.after(tools.clock, _CREATION_TIMEOUT)
    try:
        await run_shielded(lambda: _create_all(tools, volumes), name="create the backup", deadline=deadline)
    except TimeoutError as e:
        raise BackupError(f"not created within {_CREATION_TIMEOUT.seconds // 60} minutes: repeat the command") from e


async def check_backup(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> None:
    """Check by a dry run that every object could be created: permissions, quotas, webhooks, labels.

    Raises:
        BackupError: one could not be; the message names its volume.
    """
    for volume in volumes:
        for resource, manifest in _objects(volume):
            try:
                await tools.client.try_create(resource, manifest)
            except AlreadyExistsError:
                await _check_same(tools, volume, resource, manifest)
            except KubeError as e:
                raise BackupError(f"PVC {_name(volume)} cannot be backed up, nothing was created: {e}") from e


def _objects(volume: PlannedVolume) -> list[tuple[Resource, JsonDict]]:
    snapshot = volume.build_snapshot()
    transfer = (volume.resource, volume.build_transfer())
    return [transfer] if snapshot is None else [(VOLUME_SNAPSHOTS, snapshot), transfer]


async def _create_all(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> None:
    for index, volume in enumerate(volumes):
        if (snapshot := volume.build_snapshot()) is not None:
            async with _explained(tools, volumes, started=0, current=index, snapshots=index):
                await _ensure(tools, volume, VOLUME_SNAPSHOTS, snapshot)
    for index, volume in enumerate(volumes):
        async with _explained(tools, volumes, started=index, current=index, snapshots=len(volumes)):
            await _ensure(tools, volume, volume.resource, volume.build_transfer())


@asynccontextmanager
async def _explained(
    tools: BackupTools, volumes: Sequence[PlannedVolume], *, started: int, current: int, snapshots: int
) -> AsyncIterator[None]:
    """Name the volume whose object could not be created in the block, and delete the snapshots that are of no use.

    `started` volumes have their transfer, and those before `snapshots` their snapshot.
    """
    try:
        yield
    except AgentError as e:
        started += await _clean_up(tools, volumes[started:snapshots])
        state = f"{started} of {len(volumes)} volumes were started: repeat the command, or cancel the backup"
        what = state if started else "nothing was started"
        raise BackupError(f"PVC {_name(volumes[current])} is missing in the backup: {e}; {what}") from e


def _name(volume: PlannedVolume) -> str:
    return f"{volume.claim.namespace}/{volume.claim.name}"


async def _ensure(tools: BackupTools, volume: PlannedVolume, resource: Resource, manifest: JsonDict) -> None:
    """Create the object; one of an earlier run may stay."""
    try:
        await tools.client.create(resource, manifest)
    except AlreadyExistsError:
        await _check_same(tools, volume, resource, manifest)


async def _check_same(tools: BackupTools, volume: PlannedVolume, resource: Resource, manifest: JsonDict) -> None:
    """Check that the stored object is the one that would be created: of the same backup, about the same PVC.

    Raises:
        BackupError: it is another one, is being deleted, or is a snapshot that is too old.
    """
    meta = manifest["metadata"]
    stored = await tools.client.get(resource, meta["namespace"], meta["name"])
    labels, spec = stored["metadata"].get("labels") or {}, stored.get("spec") or {}
    differs = labels.get(BACKUP_LABEL) != meta["labels"][BACKUP_LABEL] or any(
        spec.get(key) != value for key, value in manifest["spec"].items() if value
    )
    place = f"{resource.kind} {meta['namespace']}/{meta['name']}"
    if differs:
        raise BackupError(f"{place} exists already, and is of another backup: choose another name")
    if stored["metadata"].get("deletionTimestamp"):
        raise BackupError(f"{place} is being deleted: repeat the command later")
    if resource is VOLUME_SNAPSHOTS:
        age = tools.clock.now() - parse_time(stored["metadata"]["creationTimestamp"])
        if age > _OLDEST_SNAPSHOT and not await _has_transfer(tools, volume):
            raise BackupError(f"{place} is {int(age.total_seconds() / 3600)}h old: delete it ({_deletion(volume)})")


async def _has_transfer(tools: BackupTools, volume: PlannedVolume) -> bool:
    return await tools.client.read(volume.resource, volume.request.namespace, volume.name) is not None


async def _clean_up(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> int:
    """Delete snapshots that no transfer will take over, and return how many of the volumes have their transfer.

    A request without an answer may have created one nevertheless.
    """
    started = 0
    for volume in volumes:
        try:
            if await _has_transfer(tools, volume):
                started += 1
            elif volume.method is Method.CSI_SNAPSHOT:
                await tools.client.delete(VOLUME_SNAPSHOTS, volume.claim.namespace, volume.name)
        except KubeError as e:
            if volume.method is Method.CSI_SNAPSHOT:
                tools.on_note(
                    f"VolumeSnapshot {volume.claim.namespace}/{volume.name} was not deleted ({_deletion(volume)}): {e}"
                )
    return started


def _deletion(volume: PlannedVolume) -> str:
    return f"kubectl -n {volume.claim.namespace} delete volumesnapshot {volume.name}"
