"""Creates the objects of a planned backup: all snapshots first, then all transfers. A repetition creates none twice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, cast

from client.backups.manifests import PlannedVolume
from client.backups.methods import BackupError, Method
from client.backups.plan import BackupTools
from core.aio import run_shielded
from core.clock import Deadline
from core.errors import AgentError
from core.kube.errors import AlreadyExistsError, KubeError, UnauthorizedError, UnreachableError
from core.kube.resources import VOLUME_SNAPSHOTS, Resource
from core.kube.types import Manifest, UncheckedObject
from core.models.base import parse_time
from core.models.names import BACKUP_LABEL

__all__ = ["check_backup", "start_backup", "sum_up_missing"]

_CREATION_TIMEOUT: Final = timedelta(minutes=15)

_OLDEST_SNAPSHOT: Final = timedelta(hours=1)
"""Of an earlier run that made no transfer of it: the data of an older one is not what the user asks for now."""

_SHOWN_MISSING: Final = 3


async def start_backup(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> list[str]:
    """Create the snapshots and the transfers of these volumes, and return why some are missing in the backup.

    An interruption lets it finish. Of a volume whose transfer is rejected nevertheless, the snapshot is deleted.

    Raises:
        BackupError: none of the volumes could be started, or the API server does not respond.
    """
    deadline = Deadline.after(tools.clock, _CREATION_TIMEOUT)
    try:
        missing = await run_shielded(lambda: _create_all(tools, volumes), name="create the backup", deadline=deadline)
    except TimeoutError as e:
        raise BackupError(f"not created within {_CREATION_TIMEOUT.seconds // 60} minutes: repeat the command") from e
    if missing and len(missing) == len(volumes):
        raise BackupError(f"{sum_up_missing(missing)}; nothing was started")
    return missing


def sum_up_missing(missing: Sequence[str]) -> str:
    """Return the first reasons why volumes are missing, and how many more there are."""
    more = len(missing) - _SHOWN_MISSING
    return "; ".join([*missing[:_SHOWN_MISSING], *([f"and {more} more"] if more > 0 else [])])


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


def _objects(volume: PlannedVolume) -> list[tuple[Resource, Manifest]]:
    snapshot = volume.build_snapshot()
    transfer = (volume.resource, volume.build_transfer())
    return [transfer] if snapshot is None else [(VOLUME_SNAPSHOTS, snapshot), transfer]


async def _create_all(tools: BackupTools, volumes: Sequence[PlannedVolume]) -> list[str]:
    missing: list[str] = []
    ready = []
    for volume in volumes:
        snapshot = volume.build_snapshot()
        with _noted(volume, missing):
            if snapshot is not None:
                await _ensure(tools, volume, VOLUME_SNAPSHOTS, snapshot)
            ready.append(volume)
    for volume in ready:
        with _noted(volume, missing):
            await _start_transfer(tools, volume)
    return missing


@contextmanager
def _noted(volume: PlannedVolume, missing: list[str]) -> Iterator[None]:
    """Note that the volume is missing in the backup if an object was rejected in the block.

    Raises:
        BackupError: the API server does not respond, so it is not asked about other volumes.
    """
    try:
        yield
    except (UnreachableError, UnauthorizedError) as e:
        raise BackupError(f"not all volumes were started, repeat the command: PVC {_name(volume)}: {e}") from e
    except AgentError as e:
        missing.append(f"PVC {_name(volume)} is missing in the backup: {e}")


async def _start_transfer(tools: BackupTools, volume: PlannedVolume) -> None:
    """Create the transfer; without one, nothing takes the snapshot over, and it is deleted.

    A request that failed may have created the transfer nevertheless.
    """
    manifest = volume.build_transfer()
    try:
        await _ensure(tools, volume, volume.resource, manifest)
    except KubeError:
        if await _clean_up(tools, volume):
            raise
        await _check_same(tools, volume, volume.resource, manifest)


def _name(volume: PlannedVolume) -> str:
    return f"{volume.claim.namespace}/{volume.claim.name}"


async def _ensure(tools: BackupTools, volume: PlannedVolume, resource: Resource, manifest: Manifest) -> None:
    """Create the object; one of an earlier run may stay."""
    try:
        await tools.client.create(resource, manifest)
    except AlreadyExistsError:
        await _check_same(tools, volume, resource, manifest)


async def _check_same(tools: BackupTools, volume: PlannedVolume, resource: Resource, manifest: Manifest) -> None:
    """Check that the stored object is the one that would be created: of the same backup, about the same PVC.

    Raises:
        BackupError: it is another one, is being deleted, or is a snapshot that is too old.
    """
    meta = manifest["metadata"]
    stored = await tools.client.get(resource, meta["namespace"], meta["name"])
    labels, spec = stored["metadata"].get("labels") or {}, cast("UncheckedObject", stored).get("spec") or {}
    differs = labels.get(BACKUP_LABEL) != meta["labels"][BACKUP_LABEL] or any(
        spec.get(key) != value for key, value in manifest["spec"].items() if value
    )
    place = f"{resource.kind} {meta['namespace']}/{meta['name']}"
    if differs:
        raise BackupError(f"{place} exists already, and is of another backup: choose another name")
    if stored["metadata"].get("deletionTimestamp"):
        raise BackupError(f"{place} is being deleted: repeat the command later")
    if resource is VOLUME_SNAPSHOTS:
        created, now = parse_time(stored["metadata"]["creationTimestamp"]), tools.date()
        if now is None or now - created <= _OLDEST_SNAPSHOT or await _has_transfer(tools, volume):
            return
        hours = int((now - created).total_seconds() / 3600)
        raise BackupError(f"{place} is {hours}h old: delete it ({_deletion(volume)})")


async def _has_transfer(tools: BackupTools, volume: PlannedVolume) -> bool:
    return await tools.client.read(volume.resource, volume.request.namespace, volume.name) is not None


async def _clean_up(tools: BackupTools, volume: PlannedVolume) -> bool:
    """Delete the snapshot that no transfer will take over; return whether there is no transfer, as far as is known."""
    try:
        if await _has_transfer(tools, volume):
            return False
        if volume.method is Method.CSI_SNAPSHOT:
            await tools.client.delete(VOLUME_SNAPSHOTS, volume.claim.namespace, volume.name)
    except KubeError as e:
        if volume.method is Method.CSI_SNAPSHOT:
            place = f"VolumeSnapshot {volume.claim.namespace}/{volume.name}"
            tools.on_note(f"{place} was not deleted ({_deletion(volume)}): {e}")
    return True


def _deletion(volume: PlannedVolume) -> str:
    return f"kubectl -n {volume.claim.namespace} delete volumesnapshot {volume.name}"
