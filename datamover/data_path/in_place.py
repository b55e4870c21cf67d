"""Restore of files into a volume that has data: what is equal is not written, all else is replaced file by file.

kopia writes what differs into a stage, from where it moves to its place: kopia itself would take a file for equal that
has the size, and the time give or take two seconds, and any link; and it would write through links and other names of a
file. Missing directories, and all in a full restore, are written by kopia as a whole, many files in parallel, unless
they are large. Single files are written one after the other: kopia restores one placeholder at a time.
Source: kopia 0.23.1, snapshot/restore/restore.go (copyEntry), local_fs_output.go.
"""

import logging
import os
import stat
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from core.models.transfer_settings import DELETE_EXTRA_FILES
from datamover.data_path.file_names import PLACEHOLDER
from datamover.data_path.in_place_compare import Comparison
from datamover.data_path.links import named
from datamover.data_path.parts import CLEANUP, Part, PartRestorer, count_refusal
from datamover.data_path.probe import Attributes
from datamover.data_path.refused import Directories, Folded, Refused, Unit
from datamover.data_path.stage import RUN_BYTES, OpenStage, PendingUnits, Stage, Step, find_mounts
from datamover.kopia.location_files import open_output
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.work_dir import NEW, join, open_below, open_root, show_path

_logger = logging.getLogger(__name__)

_LOST_AND_FOUND: Final = "lost+found"

_WHOLE_ENTRIES: Final = 10_000
_WHOLE_BYTES: Final = 256 << 20
_WHOLE_SHARE: Final = 4
"""A directory up to this size, and a quarter of the room, is written as a whole, beside what is in its place."""

_SPARE_BYTES: Final = 16 << 20


def has_entries(target: Path, _: ShouldStop) -> bool:
    """Return whether a volume has anything but a new one's folder `lost+found`. Raises OSError if it cannot be read."""
    with os.scandir(target) as entries:
        return any(entry.name != _LOST_AND_FOUND for entry in entries)


@dataclass(kw_only=True)
class InPlaceRestorer(Comparison):
    """One restore of a snapshot into a volume with data.

    `folded` is what the volume may take for one; None: it keeps all names apart. `replaces`: a file gives way to a
    directory. `written_bytes` are the sizes of what was written, `kept` is how many files and links were not. `refused`
    is what the volume did not take: what it has there stays.
    """

    restorer: PartRestorer
    fitting: int | None = None
    folded: Folded | None = None
    replaces: bool = True
    written_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    refused: Refused = field(default_factory=Refused)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stage = Stage(self.target)
        self._units: list[tuple[str, Unit]] = []
        self._restored: dict[tuple[int, int], bytes] = {}
        self._whole_bytes = _WHOLE_BYTES

    async def restore(self, fd: int) -> None:
        """Make the volume equal to the snapshot; `fd` is open on its root; raises DataPathError."""
        self._fd = fd
        try:
            await self._in_thread(self._prepare, f"removing what an earlier restore left in {self.target}")
            with ExitStack() as files:
                one, other = (files.enter_context(open_output(self.repository.work_dir)) for _ in range(2))
                directories, self._pending = Directories(one), PendingUnits(other)
                await self._run(directories)
                await self._write()
                self._count_kept()
                await self._in_thread(self._stage.remove, f"removing the stage in {self.target}")
                # Changes in a directory change its time.
                await self._in_thread(partial(self._finish, directories), f"setting attributes in {self.target}")
        except BaseException:
            remove = partial(self._in_thread, self._stage.remove, "removing the stage")
            await self.data_path.clean_up(remove, "stage", CLEANUP)
            raise
        _logger.info("%d files and links are as they were, %d entries deleted", self.kept, self._extra.deleted)

    def _prepare(self, stop: ShouldStop) -> None:
        self._extra.mounts = find_mounts(self.target)
        self._stage.make(stop)

    # -- what the comparison decides ----------------------------------------------------------------------------------
    @contextmanager
    def _open(self, stop: ShouldStop) -> Iterator[int]:
        with self._opened() as stage:
            self._whole_bytes = min(_WHOLE_BYTES, _room_bytes(stage.root) // _WHOLE_SHARE)
            self._open_stage = stage
            yield stage.root
            stage.empty(stop)

    def _is_whole(self, unit: Unit, *, there: bool) -> bool:
        if self.folded is not None and self.folded.has_within(unit.path):
            # kopia would write one of them into the other, or through it.
            return False
        most = _WHOLE_ENTRIES if self.fitting is None else min(self.fitting, _WHOLE_ENTRIES)
        fits = unit.entries <= most and unit.size_bytes <= self._whole_bytes
        return fits and not (there and (self.rule.incremental or not self.replaces))

    def _act(self, step: Step, unit: Unit, fd: int, status: os.stat_result | None) -> bool:
        name = unit.entry["name"]
        there = status is not None and stat.S_ISDIR(status.st_mode)
        if unit.is_directory and status is not None and not there and not self.replaces:
            self._refuse(unit.path, "something else is there")
            return False
        match step:
            case Step.WRITE:
                self._pending.add(unit)
            case Step.ENTER:
                if not there:
                    if status is not None:
                        self._open_stage.delete(name, fd)
                    os.mkdir(name, 0o700, dir_fd=fd)
                self._record(unit.path, fd, name)
            case _:
                self._record(unit.path, fd, name)
                self.kept += 1
                self.kept_bytes += unit.size_bytes
                if step is Step.SET:
                    self._set(name, fd, Attributes.of(unit.entry))
        return True

    def _delete(self, name: str, fd: int, _: bytes) -> bool:
        self._open_stage.delete(name, fd)
        return True

    def _reject(self, *_: object) -> None:
        self.restorer.refusals += 1

    async def _advance(self) -> None:
        if self._pending.full:
            await self._write()
        self._count_kept()

    def _count_kept(self) -> None:
        self.data_path.meter.finish_part(self.kept_bytes)
        self.kept_bytes = 0

    # -- writing ------------------------------------------------------------------------------------------------------
    async def _write(self) -> None:
        """Have kopia write what is pending, and move it to its place once it is on the disk."""
        while self._pending.count:
            if not (units := await self._in_thread(self._take, f"looking for room in {self.target}")):
                continue
            parts = [*map(Part.of, units)]
            await self.restorer.make_room(parts, self.snapshot.entries if self.fitting is None else self.fitting)
            await self.restorer.restore_placeholders(parts, partial(self._make, units))
            # A file that is moved before would be empty after a power loss.
            await self.data_path.wait_for(sync_file_system(self._fd, self.target), WRITING)
            await self._in_thread(self._place_all, f"moving restored files in {self.target}")

    def _take(self, _: ShouldStop) -> Sequence[Unit]:
        """Return what the volume has room for beside what is there; a file that does not fit is removed first."""
        with self._opened() as stage:
            room = _room_bytes(stage.root)
            units = self._pending.take(min(room, RUN_BYTES))
            if units[0].size_bytes > room and not units[0].is_directory:
                above, name = os.path.split(units[0].path)
                try:
                    with suppress(FileNotFoundError, IsADirectoryError), open_below(stage.root, above) as fd:
                        os.unlink(name, dir_fd=fd)
                except OSError as e:
                    self._refuse(units[0].path, e)
                    return ()
            return units

    async def _make(self, units: Sequence[Unit]) -> Sequence[str]:
        make = partial(self._make_placeholders, units)
        await self._in_thread(make, f"making placeholders in {self.target}")
        return [str(self._stage.files / f"{number}{PLACEHOLDER}") for number, _ in self._units]

    def _make_placeholders(self, units: Sequence[Unit], stop: ShouldStop) -> None:
        with self._opened() as stage:
            # Placeholders of a kopia that the target has refused something.
            for name in os.listdir(stage.new):  # noqa: PTH208 - a descriptor
                stage.delete(name, stage.new)
            self._units = []
            for unit in units:
                if stop():
                    return
                number = self._stage.next_number()
                with os.fdopen(os.open(f"{number}{PLACEHOLDER}", NEW, 0o600, dir_fd=stage.new), "w") as file:
                    file.write(unit.placeholder)
                self._units.append((number, unit))

    def _place_all(self, stop: ShouldStop) -> None:
        with self._opened() as stage:
            for number, unit in self._units:
                if stop():
                    return
                try:
                    self._place(stage, number, unit, stop)
                except OSError as e:
                    self._refuse(unit.path, e)
            stage.empty(stop)

    def _place(self, stage: OpenStage, number: str, unit: Unit, stop: ShouldStop) -> None:
        try:
            status = os.stat(number, dir_fd=stage.new, follow_symlinks=False)
        except FileNotFoundError:
            self._refuse(unit.path, "it could not be written")
            return
        if unit.is_directory:
            self._place_directory(stage, number, unit.path, stop)
            self.written_bytes += unit.size_bytes
            return
        above, name = os.path.split(os.fsdecode(unit.path))
        wanted = Attributes.of(unit.entry)
        with open_below(stage.root, os.fsencode(above)) as fd:
            if self._is_taken(unit.path, fd, name):
                return
            if stat.S_ISREG(status.st_mode) and status.st_size != unit.size_bytes:
                # kopia could not write all of it, and has gone on.
                self._refuse(unit.path, f"{status.st_size} of {unit.size_bytes} bytes could be written")
                return
            self._set(number, stage.new, wanted)
            delete = self._extra.may_replace(fd, os.fsencode(above), name, stop)
            if stage.place(number, name, fd, delete=delete):
                self.written_bytes += unit.size_bytes
                self._record(unit.path, fd, name)
            else:
                self._block(unit.path)

    def _is_taken(self, path: bytes, fd: int, name: str) -> bool:
        if self.folded is None or not self.folded.has(path):
            return False
        with suppress(FileNotFoundError):
            if (other := self._restored.get(_inode(fd, name))) is not None:
                self._refuse(path, f"the target takes it for {show_path(os.path.split(other)[1])}")
                return True
        return False

    def _record(self, path: bytes, fd: int, name: str) -> None:
        """Record that an entry is in its place, if the volume may take another one for it."""
        if self.folded is not None and self.folded.has(path):
            self._restored[_inode(fd, name)] = path

    def _place_directory(self, stage: OpenStage, number: str, path: bytes, stop: ShouldStop) -> None:
        """Move a directory to its place; if there is one with entries, what is in it replaces them."""
        left, merged = [(number, path)], []
        above, name = os.path.split(os.fsdecode(path))
        with open_below(stage.root, os.fsencode(above)) as fd:
            holding = self._extra.find_holding(fd, os.fsencode(above), name, stop)
        while left and not stop():
            number, path = left.pop()
            try:
                if (wanted := self._place_entry(stage, number, path, holding)) is None:
                    continue
                with open_below(stage.new, os.fsencode(number)) as new, open_below(stage.root, path) as old:
                    merged.append((path, wanted))
                    names = os.listdir(new)  # noqa: PTH208 - a descriptor
                    if self.rule.delete_extra_files:
                        self._open_stage = stage
                        is_wanted = {*map(os.fsencode, names)}.__contains__
                        self._extra.delete(old, path, is_wanted, stop, holding=holding)
                    left += [(stage.take_up(one, new), join(path, one)) for one in names]
                os.rmdir(number, dir_fd=stage.new)
            except OSError as e:
                self._refuse(path, e)
        for path, wanted in reversed(merged):
            self._set_directory(stage.root, path, wanted)

    def _place_entry(self, stage: OpenStage, number: str, path: bytes, holding: set[bytes]) -> Attributes | None:
        """Move what is in a directory to its place; return the attributes of one that is to replace another."""
        above, name = os.path.split(os.fsdecode(path))
        with open_below(stage.root, os.fsencode(above)) as fd:
            if stage.place(number, name, fd, delete=self._extra.may_delete(path) and path not in holding):
                return None
        status = os.stat(number, dir_fd=stage.new, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            return Attributes((status.st_uid, status.st_gid), stat.S_IMODE(status.st_mode), status.st_mtime_ns)
        self._block(path)
        return None

    def _block(self, path: bytes) -> None:
        """Record that a directory with entries, which are not to be deleted, is in the place of a file."""
        if self.folded is None and not self.rule.delete_extra_files:
            self.refused.hint = f"setting {DELETE_EXTRA_FILES} deletes the directories that are in the way"
        self._refuse(path, "something else is there")

    def _refuse(self, path: bytes, cause: OSError | str) -> None:
        """Record it, or raise a DataPathError: it is an error of the volume as a whole."""
        if isinstance(cause, OSError):
            with named(path):
                count_refusal(cause)
            cause = str(cause.strerror)
        self.restorer.refusals += 1
        self.refused.add_unplaced(path, cause)

    # -- attributes ---------------------------------------------------------------------------------------------------
    def _set(self, name: str, fd: int, wanted: Attributes) -> None:
        """Set attributes of an entry of an open directory that it does not have; what is refused is counted."""
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        for change in wanted.changes(name, fd, wanted.find_unset(status, tolerance_ns=self.precision_ns)):
            try:
                change()
            except OSError as e:
                self.restorer.refusals += count_refusal(e)

    def _set_directory(self, root: int, path: bytes, wanted: Attributes) -> None:
        with named(path), open_below(root, path) as fd:
            self._set(".", fd, wanted)

    def _finish(self, directories: Directories, stop: ShouldStop) -> None:
        """Set the attributes of directories, inner ones first: one may be closed to this process then."""
        with named(b""), open_root(self.target) as fd:
            for directory in directories.inner_first():
                if stop():
                    return
                wanted = Attributes.of(directory.entry, root=not directory.path)
                self._set_directory(fd, directory.path, wanted)
                self.entries += 1

    @contextmanager
    def _opened(self) -> Iterator[OpenStage]:
        with named(b""), self._stage.open() as stage:
            yield stage

    def _progress(self) -> Hashable:
        return super()._progress(), self._stage.steps


def _room_bytes(fd: int) -> int:
    """Return what the volume has room for; one that does not know has room for all."""
    space = os.fstatvfs(fd)
    return max(0, space.f_bavail * space.f_frsize - _SPARE_BYTES) if space.f_blocks else sys.maxsize


def _inode(fd: int, name: str) -> tuple[int, int]:
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    return status.st_dev, status.st_ino
