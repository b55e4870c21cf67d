"""A snapshot becomes a volume again.

Knows which snapshots may be restored, the arguments of `restore`, and that success is said
after the data is on the disk. Does not know custom resources or who waits for the result.
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
from datamover.kopia.process import Kopia
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.resources import ResourceLimits

__all__ = ["RestoreParameters", "restore", "restore_workers", "write_done_file"]

_logger = logging.getLogger(__name__)

_DONE_FOLDER: Final = ".velero"


@dataclass(frozen=True)
class RestoreParameters:
    """What to restore, where to, with how many workers, and whether holes stay holes."""

    snapshot_id: str
    target: Path
    mode: VolumeMode
    workers: int
    sparse: bool = False


def restore_workers(settings: UploaderSettings, limits: ResourceLimits) -> int:
    """Return how many files are restored at a time: what was asked for, else what memory and CPUs hold."""
    asked = settings.parallel_download
    if asked is None:
        return limits.restore_workers
    if asked > limits.fitting_restore_workers:
        _logger.warning(
            "ParallelFilesDownload=%d may need more memory than this container's limit: it holds %d",
            asked,
            max(1, limits.fitting_restore_workers),
        )
    return asked


async def restore(repository: Repository, request: RestoreParameters, transfer: DataPath) -> RestoreResult:
    """Write the snapshot into the target, onto the disk, and return the result.

    Raises:
        KopiaError: the snapshot is absent or incomplete, or kopia failed.
        RepositoryError: the repository went away for good.
        DataPathError: the target cannot take the data.
    """
    kopia = repository.kopia
    snapshot = await repository.open(partial(read_snapshot, kopia, request.snapshot_id), read_only=True)
    if snapshot.fault:
        raise DataPathError(f"snapshot {request.snapshot_id} is not restored: {snapshot.fault}")
    transfer.meter.total_bytes = snapshot.size_bytes
    if request.mode is VolumeMode.BLOCK:
        await restore_device(kopia, snapshot, request.target, transfer=transfer)
    else:
        await _restore_files(kopia, snapshot, request, transfer=transfer)
        await transfer.wait_for(sync_file_system(request.target), WRITING)
    return RestoreResult(
        target=VolumePath(by_path=str(request.target), volume_mode=str(request.mode)),
        total_bytes=snapshot.size_bytes,
    )


async def _restore_files(kopia: Kopia, snapshot: Snapshot, request: RestoreParameters, *, transfer: DataPath) -> None:
    answer = await transfer.run(
        kopia,
        f"restore snapshot {snapshot.snapshot_id} to {request.target}",
        "restore",
        snapshot.snapshot_id,
        str(request.target),
        # By default a target that is called like an archive would become one.
        "--mode=local",
        f"--parallel={request.workers}",
        *(["--write-sparse-files"] if request.sparse else []),
    )
    answer.check()


def write_done_file(volume: Path, owner_uid: str) -> None:
    """Leave the file that ends the init container `restore-wait`: empty, named after the Restore's UID.

    What an earlier restore, or the backup itself, left in its folder is removed first.

    Raises:
        DataPathError: it cannot be written.
    """
    folder = volume / _DONE_FOLDER
    try:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        # The init container is another user and only looks.
        folder.mkdir(mode=0o755)
        (folder / owner_uid).touch(mode=0o644)
    except OSError as e:
        raise DataPathError(f"the done file {folder / owner_uid} cannot be written: {e.strerror}") from e
