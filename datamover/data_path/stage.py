"""The stage of a restore in place: a directory in the volume's root, and the units that pass through it.

kopia writes there, under numbers as names. So a file in the volume is the old or the new one at any moment, and another
name of it never changes. Directories that are deleted are moved there first, each into the same one: none is read while
it is below another, so no depth matters. What a process that was killed has left there goes when the next one begins.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from itertools import count, islice
from pathlib import Path
from typing import IO, Final

from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from datamover.data_path.finished import Fingerprints
from datamover.data_path.links import has_target
from datamover.data_path.probe import Attribute, Attributes
from datamover.data_path.refused import Unit, UnitFile
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import DIRECTORY, attempting, open_root, opened

STAGE: Final = ".nodeagent-restore-files"
STAGE_PATTERN: Final = f"/{STAGE}/"
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


def find_mounts(target: Path) -> list[bytes]:
    """Return the relative paths at which this process sees mounts below `target`. Source: proc_pid_mountinfo(5)."""
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
        """Delete an entry of an open directory, with what `empty` finds in it; raises OSError."""
        self._stage.steps += 1
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            self._take_away(name, directory)

    def place(self, number: str, name: str, directory: int, *, delete: bool) -> bool:
        """Move what kopia has written under a number to its place in the open directory; return whether it is there.

        What is in the way goes: a directory with entries only with `delete`, or not at all if both are directories.

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
        """Move a directory that is below another one to a number of its own, and return that; raises OSError."""
        number = self._stage.next_number()
        os.rename(name, number, src_dir_fd=directory, dst_dir_fd=self.new)
        return number

    def empty(self, stop: ShouldStop) -> None:
        """Delete what is to be deleted. Raises OSError if something cannot be deleted."""
        while not stop() and (names := _some_names(self._old)):
            for name in names:
                self._stage.steps += 1
                try:
                    os.unlink(name, dir_fd=self._old)
                except IsADirectoryError:
                    self._empty_directory(name, stop)

    def _empty_directory(self, name: str, stop: ShouldStop) -> None:
        with opened(name, DIRECTORY, self._old) as fd:
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
    """The stage in a volume, which only one process has, and each method opens; `steps` counts what was done in it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._numbers = count(1)
        self._own = os.urandom(4).hex()
        self.steps = 0

    @property
    def files(self) -> Path:
        """Where kopia writes."""
        return self._target / STAGE / _NEW

    def next_number(self) -> str:
        """Return a new name, which an earlier process has not left in the stage."""
        return f"{self._own}-{next(self._numbers)}"

    def make(self, stop: ShouldStop) -> None:
        """Make it, and delete what an earlier process has left there. Raises DataPathError if it cannot be made."""
        with self._named("make"), open_root(self._target) as root:
            _make_directory(STAGE, root)
            with opened(STAGE, DIRECTORY, root) as stage:
                os.fchmod(stage, 0o700)
                _make_directory(_OLD, stage)
                with opened(_OLD, DIRECTORY, stage) as old:
                    for name in os.listdir(stage):  # noqa: PTH208 - a descriptor
                        if name != _OLD:
                            os.rename(name, self.next_number(), src_dir_fd=stage, dst_dir_fd=old)
                    _make_directory(_NEW, stage)
                    with opened(_NEW, DIRECTORY, stage) as new:
                        OpenStage(root, new, old, self).empty(stop)

    def remove(self, stop: ShouldStop) -> None:
        """Remove it with all in it, until `stop`; the root's time changes; raises DataPathError."""
        with self._named("remove"), self.open() as open_stage, opened(STAGE, DIRECTORY, open_stage.root) as stage:
            open_stage.delete(_NEW, stage)
            open_stage.empty(stop)
            if not stop():
                os.rmdir(_OLD, dir_fd=stage)
                os.rmdir(STAGE, dir_fd=open_stage.root)

    @contextmanager
    def open(self) -> Iterator[OpenStage]:
        """Open it, once it is made. Raises OSError if it is no longer there."""
        with (
            open_root(self._target) as root,
            opened(STAGE, DIRECTORY, root) as stage,
            opened(_NEW, DIRECTORY, stage) as new,
            opened(_OLD, DIRECTORY, stage) as old,
        ):
            yield OpenStage(root, new, old, self)

    def _named(self, what: str) -> AbstractContextManager[None]:
        return attempting(f"{what} directory {self._target / STAGE}")


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


_RUN_UNITS: Final = 4000
"""What one kopia writes; its arguments are limited, and it takes a third of a second to start."""

_RUN_ENTRIES: Final = 50_000
RUN_BYTES: Final = 1 << 30


class Step(Enum):
    """What is done with an entry of the snapshot."""

    KEEP = "keep"
    SET = "set"
    """Only owner, mode or time are set."""
    WRITE = "write"
    """kopia writes it, a directory with all in it."""
    ENTER = "enter"
    """What is in the directory is compared; it is made if it is missing."""
    READ = "read"
    """The target of the link is still to be compared."""


def decide_file(
    entry: JsonDict,
    status: os.stat_result | None,
    rule: InPlace,
    *,
    path: bytes = b"",
    changed: Fingerprints | None = None,
    precision_ns: int = 1,
) -> Step:
    """Return what is done with a file; the volume has `status` of it, None: it has nothing there.

    `changed` has the paths of files with another content; None: files of equal size and time have the same one. Times
    that differ by less than `precision_ns` are alike to the volume.
    """
    if status is None or not rule.incremental or not stat.S_ISREG(status.st_mode):
        return Step.WRITE
    wanted = Attributes.of(entry)
    unset = wanted.find_unset(status, tolerance_ns=precision_ns)
    same = wanted.time_ns is not None and Attribute.TIME not in unset if changed is None else not changed.has_text(path)
    if status.st_size != int(entry.get("size", 0)) or not same:
        return Step.WRITE
    if not unset:
        return Step.KEEP
    # Another name of the file would change too.
    return Step.SET if status.st_nlink == 1 else Step.WRITE


def decide_link(entry: JsonDict, status: os.stat_result | None, rule: InPlace) -> Step:
    """Return what is done with a link; `status` is what the volume has. Another name of it would change too."""
    if status is None or not rule.incremental or not stat.S_ISLNK(status.st_mode) or status.st_nlink != 1:
        return Step.WRITE
    return Step.READ if has_target(entry) else Step.WRITE


def decide_same_link(entry: JsonDict, status: os.stat_result, *, precision_ns: int = 1) -> Step:
    """Return what is done with a link that has the same target in the volume."""
    return Step.SET if Attributes.of(entry).find_unset(status, tolerance_ns=precision_ns) else Step.KEEP


class PendingUnits(UnitFile):
    """The units that are to be written; how many, and their size together."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._taken = 0
        self.count = 0
        self.size_bytes = 0

    def add(self, unit: Unit) -> None:
        """Add one."""
        self._append(unit)
        self.count += 1
        self.size_bytes += unit.size_bytes

    @property
    def full(self) -> bool:
        """Whether there is enough for a run of kopia."""
        return self.count >= _RUN_UNITS or self.size_bytes >= RUN_BYTES

    def take(self, room_bytes: int) -> list[Unit]:
        """Return the next ones, of this size together, or a single one."""
        taken: list[Unit] = []
        entries = 0
        while self.count and len(taken) < _RUN_UNITS:
            unit = self._read(self._taken)
            entries += unit.entries
            if taken and (unit.size_bytes > room_bytes or entries > _RUN_ENTRIES):
                break
            taken.append(unit)
            room_bytes -= unit.size_bytes
            self.count -= 1
            self.size_bytes -= unit.size_bytes
            self._taken = self._file.tell()
        if not self.count:
            self._taken = self._file.truncate(0)
        return taken
