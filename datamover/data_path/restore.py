"""Restore of a kopia snapshot into a volume.

Knows which snapshots may be restored, the arguments of `restore`, and that a restore is
complete once its data is on the disk.
Source: kopia 0.23.1, cli/command_restore.go.
"""

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from core.contract import RestoreResult, VolumeMode, VolumePath
from core.errors import DataPathError
from datamover.data_path.block import restore_device
from datamover.data_path.links import TargetLinks, find_links, read_entries, remove_links, show_path
from datamover.data_path.resume import ResumeSettings, open_resumable
from datamover.data_path.run import DataPath
from datamover.kinds import UploaderSettings
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.kopia.storage_calls import KopiaCaller
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.tree import open_below

__all__ = ["RestoreParameters", "has_done_file", "restore", "restore_workers", "write_done_file"]

_logger = logging.getLogger(__name__)

_DONE_DIRECTORY: Final = ".velero"


@dataclass(frozen=True)
class RestoreParameters:
    """What to restore, where to, with how many workers, and whether zeros become holes.

    `in_use`: a workload pod may change the target meanwhile. `resume`: the files that are finished are listed in the
    target, which only data movers of one transfer have. `again`: an earlier attempt may have written to the device.
    `done`: an earlier attempt has written everything.
    """

    snapshot_id: str
    target: Path
    mode: VolumeMode
    workers: int
    sparse: bool = False
    in_use: bool = False
    resume: ResumeSettings | None = None
    again: bool = False
    done: bool = False


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
    if parameters.done:
        _logger.info("an earlier attempt completed the restore of target %s: nothing is written", parameters.target)
    elif parameters.mode is VolumeMode.BLOCK:
        await restore_device(repository, snapshot, parameters.target, data_path=data_path, compare=parameters.again)
    else:
        await _restore_files(repository, snapshot, parameters, data_path=data_path)
        written = data_path.clock.monotonic()
        await data_path.wait_for(sync_file_system(parameters.target), WRITING)
        _logger.info("the disk took %.1f s for what was not on it yet", data_path.clock.monotonic() - written)
    return RestoreResult(
        target=VolumePath(by_path=str(parameters.target), volume_mode=str(parameters.mode)),
        total_bytes=snapshot.size_bytes,
    )


async def _restore_files(
    repository: Repository, snapshot: Snapshot, parameters: RestoreParameters, *, data_path: DataPath
) -> None:
    target = parameters.target
    await data_path.run_in_thread(partial(_make_target, target), f"opening target {target}")
    resumable = None
    if parameters.resume:
        resumable = await open_resumable(snapshot, target, parameters.resume, data_path)
    links = await _replace_links(repository, snapshot, target, data_path=data_path)
    run = partial(
        data_path.run,
        repository.kopia,
        f"restore snapshot {snapshot.snapshot_id} to {target}",
        "restore",
        snapshot.snapshot_id,
        str(target),
        # Without it, kopia writes an archive if the target is named like one.
        "--mode=local",
        f"--parallel={parameters.workers}",
        *(["--write-sparse-files"] if parameters.sparse else []),
        *(resumable.flags if resumable else []),
        files=KopiaFiles(volume=VolumeAccess(target, writable=True, in_use=parameters.in_use)),
    )
    run_kopia = partial(repository.run, run)
    answer = await (resumable.record_during(run_kopia) if resumable else run_kopia())
    answer.check()
    await _check_links(repository, snapshot, target, expected=links, data_path=data_path)
    if resumable:
        await resumable.end()


def _make_target(target: Path, _: ShouldStop) -> None:
    try:
        # In local mode it may be missing, and kopia is confined to it.
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as e:
        raise DataPathError(f"target {target} is not a directory") from e
    except OSError as e:
        raise DataPathError(f"cannot create target {target}: {e.strerror}") from e


async def _replace_links(kopia: KopiaCaller, snapshot: Snapshot, target: Path, *, data_path: DataPath) -> int:
    """Remove the links in the target that are in the way of the snapshot's directories and files, and report it.

    Returns:
        How many symbolic links the target has after the restore.
    """
    found = await _find_links(target, data_path, hard=True)
    entries = await read_entries(kopia, snapshot, found.paths)
    if replaced := found.in_the_way(entries):
        await data_path.run_in_thread(lambda _: remove_links(target, replaced), "replacing links in the target")
        await data_path.warn(
            f"replaced {len(replaced)} links in the target by what the kopia snapshot has there, "
            f"for example {show_path(replaced[0])}"
        )
    return snapshot.links + sum(path not in entries for path in found.symbolic)


async def _check_links(
    kopia: KopiaCaller, snapshot: Snapshot, target: Path, *, expected: int, data_path: DataPath
) -> None:
    """Check that no directory or file of the snapshot became a link during the restore.

    The snapshot is not read if there are as many links as expected: it may have links in thousands of directories. A
    tenant could remove a link for each one that replaces something, but could as well remove what is restored.

    Raises:
        DataPathError: one became a link.
    """
    found = await _find_links(target, data_path)
    if len(found.symbolic) == expected:
        return
    if links := found.in_the_way(await read_entries(kopia, snapshot, found.symbolic)):
        raise DataPathError(f"{show_path(links[0])} became a link during the restore, so it is not restored")


async def _find_links(target: Path, data_path: DataPath, *, hard: bool = False) -> TargetLinks:
    found = TargetLinks()
    walk = partial(find_links, target, found=found, hard=hard)
    return await data_path.run_in_thread(walk, "looking for links in the target", lambda: found.entries)


def write_done_file(volume: Path, owner_uid: str) -> None:
    """Write the done file, which ends the init container `restore-wait`: empty, named after the Restore's UID.

    Files of an earlier restore, or of the backup itself, are removed from its directory first.

    Raises:
        DataPathError: it cannot be written.
    """
    try:
        with _open_directory(volume) as root:
            _remove(_DONE_DIRECTORY, root)
            os.mkdir(_DONE_DIRECTORY, mode=0o755, dir_fd=root)
            with open_below(root, _DONE_DIRECTORY.encode()) as directory:
                _let_remove(directory, root)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(owner_uid, flags, mode=0o644, dir_fd=directory), "wb") as file:
                    _let_read(file.fileno(), 0o644)
    except OSError as e:
        raise DataPathError(f"cannot write done file {volume / _DONE_DIRECTORY / owner_uid}: {e.strerror}") from e


def has_done_file(volume: Path, owner_uid: str) -> bool:
    """Return whether an earlier attempt wrote the done file: the restore is complete, and a pod may use the volume.

    A tenant who writes the file itself loses only data of its own: the rest of this volume is not restored. The
    restore helper removes the file before the pod's containers start, so without one the pod may have started too.

    Raises:
        DataPathError: it cannot be read.
    """
    try:
        with _open_directory(volume) as root, open_below(root, _DONE_DIRECTORY.encode()) as directory:
            return stat.S_ISREG(os.stat(owner_uid, dir_fd=directory, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise DataPathError(f"cannot read done file {volume / _DONE_DIRECTORY / owner_uid}: {e.strerror}") from e


def _let_remove(directory: int, root: int) -> None:
    """Let everyone read the directory, and remove it who may write to the volume, as the init container may."""
    volume = os.fstat(root)
    with suppress(OSError):
        os.fchown(directory, volume.st_uid, volume.st_gid)
    _let_read(directory, (volume.st_mode & 0o777) | 0o755)


def _let_read(fd: int, mode: int) -> None:
    """Set the mode whatever the umask: the init container may run as any user."""
    # A file system without modes has the same ones for all files.
    with suppress(OSError):
        os.fchmod(fd, mode)


@contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _remove(name: str, root: int) -> None:
    """Remove a directory with its content, or a file or link, in the directory `root`."""
    try:
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        # It follows no links, since it is given a descriptor.
        shutil.rmtree(name, dir_fd=root)
