"""What a restore in place deletes: what the snapshot does not have, except what its backup may have left out."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from core.errors import DataPathError
from core.models.transfer_settings import DELETE_EXTRA_FILES, Exclusions
from datamover.data_path.file_names import mangle
from datamover.data_path.links import named, show_path
from datamover.data_path.stage import STAGE_PATTERN, is_kept_at_root
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import join, open_below

__all__ = ["ExtraFiles", "find_unexplained"]

_Delete = Callable[[str, int, bytes], bool]
"""Deletes an entry of an open directory with all in it, by its name, and returns whether it is gone; the last argument
is its path. A plan deletes nothing."""


def find_unexplained(snapshot: Snapshot) -> str:
    """Return why extra files may be what the backup left out by rules that the snapshot does not name; empty: none is.

    kopia counts what patterns, `.kopiaignore` files and marks of caches leave out, not what is too large or mounted.
    """
    patterns = {*snapshot.exclusions.patterns}
    # A stage that was left out counts once, and once more if kopia scans the volume for an estimate. So one is nothing
    # else, and two may be.
    own = 1 if STAGE_PATTERN in patterns else 0
    if snapshot.excluded <= own or patterns - {STAGE_PATTERN}:
        return ""
    return (
        f"snapshot {snapshot.snapshot_id} lacks {snapshot.excluded} files and directories that its backup left out by "
        f"policies of the repository, .kopiaignore files or CACHEDIR.TAG, and they would be deleted. Nothing was "
        f"changed: restore without {DELETE_EXTRA_FILES}"
    )


@dataclass
class ExtraFiles:
    """Deletes extra files, if that is `allowed`; what `exclude` names stays, and what is mounted.

    `on_kept` gets the path of each that stays. `steps` counts what was looked at, `deleted` the entries that are gone,
    each with all in it.
    """

    exclude: Exclusions
    allowed: bool
    mounts: list[bytes] = field(default_factory=list)
    on_kept: Callable[[bytes], None] = lambda _: None
    steps: int = 0
    deleted: int = 0

    def may_delete(self, path: bytes) -> bool:
        """Return whether a directory may be deleted with all in it: nothing is mounted there, or above it."""
        inner, mounts = path + b"/", [mount + b"/" for mount in self.mounts]
        mounted = any(mount.startswith(inner) or inner.startswith(mount) for mount in mounts)
        return self.allowed and not mounted

    def may_replace(self, fd: int, directory: bytes, name: str, stop: ShouldStop) -> bool:
        """Return whether a directory with this name in an open one may be deleted, since a file is to be there."""
        holding = self.find_holding(fd, directory, name, stop)
        return self.may_delete(join(directory, name)) and not holding and not stop()

    def find_holding(self, fd: int, directory: bytes, name: str, stop: ShouldStop) -> set[bytes]:
        """Return the directories that hold something excluded: the one with this name in an open one, and below it.

        The result is not complete if `stop` ends the search.
        """
        found, left = set[bytes](), [name] if self.exclude and self.allowed else []
        while left and not stop():
            below = left.pop()
            with (
                suppress(NotADirectoryError, FileNotFoundError),
                open_below(fd, os.fsencode(below)) as opened,
                os.scandir(opened) as entries,
            ):
                for entry in entries:
                    if stop():
                        return found
                    self.steps += 1
                    path = f"{below}/{entry.name}"
                    if self._is_excluded(opened, entry, join(directory, path)):
                        _add_above(found, directory, below)
                    elif entry.is_dir(follow_symlinks=False):
                        left.append(path)
        return found

    def delete(
        self,
        delete: _Delete,
        fd: int,
        directory: bytes,
        is_wanted: Callable[[str], bool],
        stop: ShouldStop,
        *,
        holding: set[bytes] | None = None,
    ) -> None:
        """Delete what is not wanted in an open directory.

        `holding` are all directories below that hold something excluded; None: that is not known yet.

        Raises:
            DataPathError: something cannot be deleted; names it.
        """
        if directory and self.exclude.excludes_path(mangle(directory), is_dir=True):
            return
        search, holding = holding is None, set() if holding is None else holding
        left = [""]
        while left and not stop():
            below = left.pop()
            with open_below(fd, os.fsencode(below)) as opened:
                above = join(directory, below) if below else directory
                wanted, known = (_is_nothing, True) if below else (is_wanted, not search)
                names = self._delete_in(delete, opened, above, wanted, stop, holding=holding, known=known)
            left += [f"{below}/{name}" if below else name for name in names]

    def _delete_in(
        self,
        delete: _Delete,
        fd: int,
        directory: bytes,
        is_wanted: Callable[[str], bool],
        stop: ShouldStop,
        *,
        holding: set[bytes],
        known: bool,
    ) -> set[str]:
        """Delete what is not wanted, and return the names of what holds something excluded."""
        found, names = True, set[str]()
        # A file system may leave out entries of a directory that changes while it is read.
        while found and not stop():
            found = False
            with os.scandir(fd) as entries:
                for entry in entries:
                    path, name = join(directory, entry.name), entry.name
                    if is_wanted(name) or name in names:
                        continue
                    if (not directory and is_kept_at_root(name)) or (
                        self.exclude and self._is_excluded(fd, entry, path)
                    ):
                        self.on_kept(path)
                        continue
                    if not known:
                        holding |= self.find_holding(fd, directory, name, stop)
                    if stop():
                        return names
                    if path in holding:
                        names.add(name)
                        continue
                    found |= self._delete_one(delete, fd, name, path)
        return names

    def _delete_one(self, delete: _Delete, fd: int, name: str, path: bytes) -> bool:
        if not self.may_delete(path):
            raise DataPathError(f"cannot delete {show_path(path)}: another volume is mounted in it")
        with named(path, "delete"):
            gone = delete(name, fd, path)
        self.deleted += gone
        return gone

    def _is_excluded(self, fd: int, entry: "os.DirEntry[str]", path: bytes) -> bool:
        """Return whether the exclusions of the backup name an entry itself: it stays as it is."""
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        is_dir = stat.S_ISDIR(status.st_mode)
        if self.exclude.excludes_name(mangle(path), is_dir=is_dir):
            return True
        if self.exclude.one_file_system and status.st_dev != os.fstat(fd).st_dev:
            return True
        return not is_dir and self.exclude.excludes_size(status.st_size)


def _add_above(found: set[bytes], directory: bytes, path: str) -> None:
    """Add a path and all above it, down from the open directory."""
    while path and (whole := join(directory, path)) not in found:
        found.add(whole)
        path = os.path.dirname(path)  # noqa: PTH120 - names need not be UTF-8


def _is_nothing(_: str) -> bool:
    """Return False: the snapshot has no entry of that name."""
    return False
