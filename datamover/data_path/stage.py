"""The stage of a restore in place: a directory in the volume's root, from where what is restored moves to its place.

kopia writes there, under numbers as names. So a file in the volume is the old or the new one at any moment, and another
name of it never changes. Directories that are deleted are moved there first, each into the same one: none is read while
it is below another, so no depth matters. What a process that was killed has left there goes when the next one begins.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import DIRECTORY, open_root

__all__ = ["STAGE_PATTERN", "OpenStage", "Stage", "find_mounts", "has_stage", "is_kept_at_root", "is_stage"]

_STAGE: Final = ".nodeagent-restore-files"
STAGE_PATTERN: Final = f"/{_STAGE}/"
"""What leaves it out of a backup: kopia would take the placeholders in it for what they stand for."""

_NEW: Final = "new"
_OLD: Final = "old"

_KEPT: Final = frozenset({"lost+found", ".velero"})
_KEPT_PREFIX: Final = ".nodeagent-restore-"

_MOUNTS: Final = Path("/proc/self/mountinfo")
_POINT: Final = 4
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")

_AT_A_TIME: Final = 1000
"""Names of what is to be deleted."""

_NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def is_kept_at_root(name: str) -> bool:
    """Return whether an entry of a volume's root is never deleted: the file system's, Velero's or ours."""
    return name in _KEPT or name.startswith(_KEPT_PREFIX)


def is_stage(name: str) -> bool:
    """Return whether an entry of a volume's root is the stage."""
    return name == _STAGE


def has_stage(volume: Path) -> bool:
    """Return whether a restore in place that was killed has left its stage in a volume."""
    return os.path.isdir(volume / _STAGE)  # noqa: PTH112 - it raises no error


def find_mounts(target: Path) -> list[bytes]:
    """Return the relative paths at which something is mounted below `target`, as this process sees it.

    Source: proc_pid_mountinfo(5).
    """
    above = os.fsencode(target.resolve()) + b"/"
    points = (line.split()[_POINT] for line in _MOUNTS.read_bytes().splitlines())
    found = (_ESCAPED.sub(lambda one: bytes([int(one[1], 8)]), point) for point in points)
    return [point[len(above) :] for point in found if point.startswith(above)]


class OpenStage:
    """The stage, open; `root` is the root of the volume, `new` is where kopia writes."""

    def __init__(self, root: int, new: int, old: int, stage: "Stage") -> None:
        self.root = root
        self.new = new
        self._old = old
        self._stage = stage

    def delete(self, name: str, directory: int) -> None:
        """Delete an entry of an open directory; `empty` deletes what is in it.

        Raises:
            OSError: it cannot be deleted, for example since something is mounted there.
        """
        self._stage.steps += 1
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            self._take_away(name, directory)

    def place(self, number: str, name: str, directory: int, *, delete: bool) -> bool:
        """Move what kopia has written under a number to its place in the open directory.

        What is in the way goes: a directory with entries only with `delete`.

        Returns:
            Whether it is there. It is not in the place of a directory with entries, if both are directories, or the
            one in the way is to stay.

        Raises:
            OSError: it cannot be moved.
        """
        self._stage.steps += 1
        try:
            self._move(number, name, directory)
        except NotADirectoryError:
            os.unlink(name, dir_fd=directory)
            self._move(number, name, directory)
        except IsADirectoryError:
            if delete:
                self._take_away(name, directory)
            elif not _remove_empty(name, directory):
                return False
            self._move(number, name, directory)
        except OSError as e:
            if e.errno not in _NOT_EMPTY:
                raise
            return False
        return True

    def take_up(self, name: str, directory: int) -> str:
        """Move a directory that kopia has written below another one to a number of its own, and return that.

        Raises:
            OSError: it cannot be moved.
        """
        number = self._stage.next_number()
        os.rename(name, number, src_dir_fd=directory, dst_dir_fd=self.new)
        return number

    def empty(self, stop: ShouldStop) -> None:
        """Delete what is to be deleted.

        Raises:
            OSError: something cannot be deleted.
        """
        while not stop() and (names := _some_names(self._old)):
            for name in names:
                try:
                    os.unlink(name, dir_fd=self._old)
                except IsADirectoryError:
                    self._empty_directory(name, stop)

    def _empty_directory(self, name: str, stop: ShouldStop) -> None:
        with _opened(name, self._old) as fd:
            # A file system may leave out entries of a directory that changes while it is read.
            while not stop() and not _remove_empty(name, self._old):
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if stop():
                            return
                        self.delete(entry.name, fd)

    def _move(self, number: str, name: str, directory: int) -> None:
        os.rename(number, name, src_dir_fd=self.new, dst_dir_fd=directory)

    def _take_away(self, name: str, directory: int) -> None:
        os.rename(name, self._stage.next_number(), src_dir_fd=directory, dst_dir_fd=self._old)


class Stage:
    """The stage in a volume, which only one process has; `steps` counts what was done in it.

    Each method opens it: a volume may hang, and then its thread is abandoned.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._numbers = count(1)
        self._own = os.urandom(4).hex()
        self.steps = 0

    @property
    def name(self) -> str:
        """Its name in the root of the volume."""
        return _STAGE

    @property
    def files(self) -> Path:
        """Where kopia writes."""
        return self._target / _STAGE / _NEW

    def next_number(self) -> str:
        """Return a new name, which an earlier process has not left in the stage."""
        return f"{self._own}-{next(self._numbers)}"

    def make(self, stop: ShouldStop) -> None:
        """Make it, and delete what an earlier process has left there.

        Raises:
            DataPathError: it cannot be made.
        """
        with self._named("make"), open_root(self._target) as root:
            _make_directory(_STAGE, root)
            with _opened(_STAGE, root) as stage:
                os.fchmod(stage, 0o700)
                _make_directory(_OLD, stage)
                with _opened(_OLD, stage) as old:
                    for name in os.listdir(stage):  # noqa: PTH208 - a descriptor
                        if name != _OLD:
                            os.rename(name, self.next_number(), src_dir_fd=stage, dst_dir_fd=old)
                    _make_directory(_NEW, stage)
                    with _opened(_NEW, stage) as new:
                        OpenStage(root, new, old, self).empty(stop)

    def remove(self, stop: ShouldStop) -> None:
        """Remove it with all in it, until `stop` returns True; the time of the root changes.

        Raises:
            DataPathError: it cannot be removed.
        """
        with self._named("remove"), self.open() as opened, _opened(_STAGE, opened.root) as stage:
            opened.delete(_NEW, stage)
            opened.empty(stop)
            if not stop():
                os.rmdir(_OLD, dir_fd=stage)
                os.rmdir(_STAGE, dir_fd=opened.root)

    @contextmanager
    def open(self) -> Iterator[OpenStage]:
        """Open it, once it is made.

        Raises:
            OSError: it is no longer there.
        """
        with (
            open_root(self._target) as root,
            _opened(_STAGE, root) as stage,
            _opened(_NEW, stage) as new,
            _opened(_OLD, stage) as old,
        ):
            yield OpenStage(root, new, old, self)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise DataPathError(f"cannot {what} directory {self._target / _STAGE}: {e.strerror}") from e


@contextmanager
def _opened(name: str, directory: int) -> Iterator[int]:
    fd = os.open(name, DIRECTORY, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _make_directory(name: str, directory: int) -> None:
    """Make a directory, unless there is one; anything else in its place goes."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return
        os.unlink(name, dir_fd=directory)
    os.mkdir(name, 0o700, dir_fd=directory)


def _remove_empty(name: str, directory: int) -> bool:
    """Return whether the directory was empty, and is removed."""
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as e:
        if e.errno not in _NOT_EMPTY:
            raise
        return False
    return True


def _some_names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in islice(entries, _AT_A_TIME)]
