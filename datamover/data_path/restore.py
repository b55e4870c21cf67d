"""Restore of a kopia snapshot into a volume.

Knows which snapshots may be restored, the arguments of `restore`, and that a restore is
complete once its data is on the disk.
Source: kopia 0.23.1, cli/command_restore.go.
"""

import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from core.contract import RestoreResult, VolumeMode, VolumePath
from core.errors import DataPathError
from datamover.data_path.block import restore_device
from datamover.data_path.run import DataPath
from datamover.kinds import UploaderSettings
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.resources import ResourceLimits

__all__ = ["RestoreParameters", "restore", "restore_workers", "write_done_file"]

_logger = logging.getLogger(__name__)

_DONE_DIRECTORY: Final = ".velero"


@dataclass(frozen=True)
class RestoreParameters:
    """What to restore, where to, with how many workers, and whether zeros become holes."""

    snapshot_id: str
    target: Path
    mode: VolumeMode
    workers: int
    sparse: bool = False


def restore_workers(settings: UploaderSettings, limits: ResourceLimits) -> int:
    """Return how many files to restore in parallel: the setting, else what memory and CPUs allow."""
    requested = settings.parallel_download
    if requested is None:
        return limits.restore_workers
    if requested > limits.fitting_restore_workers:
        _logger.warning(
            "ParallelFilesDownload=%d may need more memory than the container's limit, which suffices for %d",
            requested,
            max(1, limits.fitting_restore_workers),
        )
    return requested


async def restore(repository: Repository, parameters: RestoreParameters, data_path: DataPath) -> RestoreResult:
    """Write the snapshot to the target, wait until it is on the disk, and return the result.

    Raises:
        KopiaError: the snapshot does not exist, or kopia failed.
        RepositoryError: the data path stalled, and the repository does not answer.
        DataPathError: the snapshot is incomplete, or the target cannot be written.
    """
    snapshot = await repository.open(partial(read_snapshot, repository, parameters.snapshot_id), read_only=True)
    if snapshot.fault:
        raise DataPathError(f"cannot restore snapshot {parameters.snapshot_id}: {snapshot.fault}")
    data_path.meter.total_bytes = snapshot.size_bytes
    if parameters.mode is VolumeMode.BLOCK:
        await restore_device(repository, snapshot, parameters.target, data_path=data_path)
    else:
        await _restore_files(repository, snapshot, parameters, data_path=data_path)
        await data_path.wait_for(sync_file_system(parameters.target), WRITING)
    return RestoreResult(
        target=VolumePath(by_path=str(parameters.target), volume_mode=str(parameters.mode)),
        total_bytes=snapshot.size_bytes,
    )


async def _restore_files(
    repository: Repository, snapshot: Snapshot, parameters: RestoreParameters, *, data_path: DataPath
) -> None:
    run = partial(
        data_path.run,
        repository.kopia,
        f"restore snapshot {snapshot.snapshot_id} to {parameters.target}",
        "restore",
        snapshot.snapshot_id,
        str(parameters.target),
        # Without it, kopia writes an archive if the target is named like one.
        "--mode=local",
        f"--parallel={parameters.workers}",
        *(["--write-sparse-files"] if parameters.sparse else []),
    )
    (await repository.run(run)).check()


def write_done_file(volume: Path, owner_uid: str) -> None:
    """Write the done file, which ends the init container `restore-wait`: empty, named after the Restore's UID.

    Files of an earlier restore, or of the backup itself, are removed from its directory first.

    Raises:
        DataPathError: it cannot be written.
    """
    directory = volume / _DONE_DIRECTORY
    try:
        if directory.is_dir() and not directory.is_symlink():
            shutil.rmtree(directory)
        else:
            directory.unlink(missing_ok=True)
        # The init container runs as another user and only checks that the file exists.
        directory.mkdir(mode=0o755)
        (directory / owner_uid).touch(mode=0o644)
    except OSError as e:
        raise DataPathError(f"cannot write done file {directory / owner_uid}: {e.strerror}") from e
