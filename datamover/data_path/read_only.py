"""Entries of a target that the user of a restore owns, and may not write to, such as files of an earlier restore.

kopia opens what is there already for writing, and sets the mode afterward. Root needs no mode, an ordinary user does.
Source: kopia 0.23.1, snapshot/restore/local_fs_output.go (createDirectory, copyFileContent).
"""

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.data_path.links import TargetLinks, read_entries
from datamover.data_path.run import DataPath
from datamover.kopia.long_lists import open_output
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import join, open_below, open_root, walk_tree

__all__ = ["allow_writing"]

_EFFECTIVE: Final = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_OVERRIDE: Final = 1 << 1
"""Source: linux/capability.h, CAP_DAC_OVERRIDE."""


async def allow_writing(
    repository: Repository, snapshot: Snapshot, target: Path, *, data_path: DataPath, files: bool
) -> None:
    """Let the owner write to directories, and with `files` to files, that kopia sets the modes of later.

    Raises:
        DataPathError: the target cannot be read, or a mode not be changed.
    """
    if _overrides_modes():
        return
    with open_output(repository.work_dir) as file:
        found = TargetLinks(file)
        walk = partial(_find, target, found=found, files=files)
        await data_path.run_in_thread(walk, "looking for read-only files in the target", lambda: found.entries)
        for part in found.in_parts():
            entries = await read_entries(repository, snapshot, [path for path in part.paths if path])
            wanted = [path for path in part.paths if not path or path in entries]
            await data_path.run_in_thread(partial(_change, target, wanted), "making files in the target writable")


def _overrides_modes() -> bool:
    found = _EFFECTIVE.search(Path("/proc/self/status").read_text())
    return found is not None and bool(int(found[1], 16) & _OVERRIDE)


def _find(target: Path, stop: ShouldStop, found: TargetLinks, *, files: bool) -> None:
    """Add the root, and each entry whose owner may not write to it."""
    user = os.geteuid()
    found.add(b"")
    try:
        for directory, entries in walk_tree(target, stop):
            for entry in entries:
                found.entries += 1
                # It may be deleted meanwhile, or its directory be unreadable.
                with suppress(FileNotFoundError, PermissionError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == user and _missing(status.st_mode, files=files):
                        found.add(join(directory, entry.name))
    except OSError as e:
        raise DataPathError(f"cannot read target {target}: {e.strerror}") from e


def _missing(mode: int, *, files: bool = True) -> int:
    """Return the bits of a mode that the owner lacks to write to a directory or file."""
    wanted = stat.S_IRWXU if stat.S_ISDIR(mode) else stat.S_IWUSR if files and stat.S_ISREG(mode) else 0
    return wanted & ~mode


def _change(target: Path, paths: Sequence[bytes], _: ShouldStop) -> None:
    with open_root(target) as root:
        for path in paths:
            directory, name = os.path.split(path)
            with suppress(FileNotFoundError, NotADirectoryError), open_below(root, directory) as above:
                fd = os.open(name or b".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
                try:
                    status = os.fstat(fd)
                    if status.st_uid == os.geteuid() and (missing := _missing(status.st_mode)):
                        # Of what was opened: meanwhile, a link may be there.
                        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(status.st_mode) | missing)  # noqa: PTH101
                finally:
                    os.close(fd)
