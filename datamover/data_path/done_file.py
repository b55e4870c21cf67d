"""The done file of a PodVolumeRestore: it ends the init container `restore-wait`, and says that all is restored.

A tenant may have changed the volume meanwhile, so no link in it is followed.
Source: Velero v1.18.2, pkg/podvolume/restore_micro_service.go (writeCompletionMark), cmd/velero-restore-helper.
"""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.kopia.process import FULL
from datamover.runtime.tree import open_below, open_root

__all__ = ["has_done_file", "write_done_file"]

_DONE_DIRECTORY: Final = ".velero"
_ROOT: Final = "."
"""Where the done directory leads, as a link, in a volume without room for it."""


def write_done_file(volume: Path, owner_uid: str) -> None:
    """Write the done file, which ends the init container `restore-wait`: empty, named after the Restore's UID.

    Files of an earlier restore, or of the backup itself, are removed from its directory first.

    Raises:
        DataPathError: it cannot be written.
    """
    try:
        with open_root(volume) as root:
            _remove(_DONE_DIRECTORY, root)
            try:
                os.mkdir(_DONE_DIRECTORY, mode=0o755, dir_fd=root)
                with open_below(root, _DONE_DIRECTORY.encode()) as directory:
                    _let_remove(directory, root)
                    _create_empty(owner_uid, directory)
            except OSError as e:
                if e.errno not in FULL:
                    raise
                _write_without_block(owner_uid, root)
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
        with open_root(volume) as root, open_below(root, _done_directory(root)) as directory:
            return stat.S_ISREG(os.stat(owner_uid, dir_fd=directory, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise DataPathError(f"cannot read done file {volume / _DONE_DIRECTORY / owner_uid}: {e.strerror}") from e


def _done_directory(root: int) -> bytes:
    with suppress(OSError):
        if os.readlink(_DONE_DIRECTORY, dir_fd=root) == _ROOT:
            return b""
    return _DONE_DIRECTORY.encode()


def _write_without_block(owner_uid: str, root: int) -> None:
    """Write the done file into the root of a full volume, where a link finds it: only a directory needs a block.

    Velero's helper leaves the file there.
    """
    _remove(_DONE_DIRECTORY, root)
    os.symlink(_ROOT, _DONE_DIRECTORY, dir_fd=root)
    with suppress(FileNotFoundError):
        os.unlink(owner_uid, dir_fd=root)
    _create_empty(owner_uid, root)


def _create_empty(name: str, directory: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, mode=0o644, dir_fd=directory), "wb") as file:
        _let_read(file.fileno(), 0o644)


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


def _remove(name: str, root: int) -> None:
    """Remove a directory with its content, or a file or link, in the directory `root`."""
    try:
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        # It follows no links, since it is given a descriptor.
        shutil.rmtree(name, dir_fd=root)
