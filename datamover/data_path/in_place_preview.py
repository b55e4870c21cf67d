"""The preview of a restore into a volume with data: what it would write, set and delete. Nothing is written.

The volume is one that nothing else uses, made from a snapshot of the volume to restore into.
"""

import os
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from core.models.base import JsonDict
from core.models.transfer_settings import InPlacePlan, PlannedEntries
from datamover.data_path.finished import is_unfinished
from datamover.data_path.in_place import has_entries
from datamover.data_path.in_place_compare import Comparison, find_unexplained
from datamover.data_path.links import named
from datamover.data_path.probe import Attributes
from datamover.data_path.refused import Directories, Unit, keep_name
from datamover.data_path.stage import Step
from datamover.kopia.location_files import open_output
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import attempting, join, open_root, walk_tree


@dataclass
class RestorePlanner(Comparison):
    """Plans the restore of a snapshot into a volume that keeps all names apart, and times as they are.

    A restore asks the volume for that, by writing a file.
    """

    planned: defaultdict[str, PlannedEntries] = field(init=False, default_factory=partial(defaultdict, PlannedEntries))
    """By the names of `InPlacePlan`."""

    async def plan(self) -> InPlacePlan:
        """Return the plan.

        Raises:
            DataPathError: the snapshot (KopiaError) or the volume cannot be read.
        """
        with attempting(f"read {self.target}"):
            filled = await self._in_thread(partial(has_entries, self.target), f"reading {self.target}")
            if await self._in_thread(partial(is_unfinished, self.target), f"reading {self.target}"):
                self.rule = self.rule.distrusting
        # Into an empty volume, all is written, and nothing deleted.
        deletes = filled and self.rule.delete_extra_files
        if fault := await find_unexplained(self.repository, self.snapshot) if deletes else None:
            return InPlacePlan(refusal=fault)
        with open_output(self.repository.work_dir) as file:
            await self._run(Directories(file))
        return InPlacePlan(**self.planned, refusal="")

    # -- what the comparison decides ----------------------------------------------------------------------------------
    @contextmanager
    def _open(self, stop: ShouldStop) -> Iterator[int]:
        with named(b""), open_root(self.target) as root:
            self._stop = stop
            yield root

    def _is_whole(self, unit: Unit, *, there: bool) -> bool:  # noqa: ARG002 - all of it is written
        return not there

    def _act(self, step: Step, unit: Unit, fd: int, status: os.stat_result | None) -> bool:
        match step:
            case Step.KEEP:
                self._count_unit("equal", unit)
            case Step.SET:
                self._count_unit("to_set", unit)
            case Step.ENTER:
                if status is not None and Attributes.of(unit.entry).find_unset(status, tolerance_ns=self.precision_ns):
                    self._count("to_set", unit.path, directories=1)
            case _:
                self._write(unit, fd, status)
        return True

    def _delete(self, name: str, fd: int, path: bytes) -> bool:
        self._count_deleted(path, os.stat(name, dir_fd=fd, follow_symlinks=False))
        return False

    def _refuse(self, path: bytes, cause: OSError | str) -> None:
        self._count("blocked", path, str(cause.strerror) if isinstance(cause, OSError) else cause, files=1)

    def _reject(self, directory: bytes, entry: JsonDict) -> None:
        self._refuse(join(directory, str(entry.get("name", ""))), "no file can have this name or type")

    # -- counting -----------------------------------------------------------------------------------------------------
    def _write(self, unit: Unit, fd: int, status: os.stat_result | None) -> None:
        above, name = os.path.split(os.fsdecode(unit.path))
        if status is not None and stat.S_ISDIR(status.st_mode):
            may_replace = self._extra.may_replace(fd, os.fsencode(above), name, self._stop)
            if not may_replace and self._has_entries(unit.path):
                self._refuse(unit.path, "something else is there")
                return
            self._count_deleted(unit.path, status)
        elif status is not None and unit.is_directory:
            self._count_deleted(unit.path, status)
        self._count_unit("to_write", unit)

    def _has_entries(self, path: bytes) -> bool:
        with os.scandir(self.target / os.fsdecode(path)) as entries:
            return any(True for _ in entries)

    def _count_deleted(self, path: bytes, status: os.stat_result) -> None:
        is_dir = stat.S_ISDIR(status.st_mode)
        self._count("to_delete", path, files=not is_dir, size_bytes=0 if is_dir else status.st_size, directories=is_dir)
        if not is_dir:
            return
        for _, entries in walk_tree(self.target / os.fsdecode(path), self._stop):
            for entry in entries:
                self.entries += 1
                is_dir = entry.is_dir(follow_symlinks=False)
                size_bytes = 0 if is_dir else entry.stat(follow_symlinks=False).st_size
                self._count("to_delete", None, files=not is_dir, size_bytes=size_bytes, directories=is_dir)

    def _keep_extra(self, path: bytes) -> None:
        with suppress(OSError):
            is_dir = stat.S_ISDIR((self.target / os.fsdecode(path)).lstat().st_mode)
            self._count("kept", path, files=not is_dir, directories=is_dir)

    def _count_unit(self, what: str, unit: Unit) -> None:
        """Count an entry of the snapshot, a directory with all in it."""
        directories = int((unit.entry.get("summ") or {}).get("dirs", 1)) if unit.is_directory else 0
        files = unit.entries - directories
        self._count(what, unit.path, files=files, size_bytes=unit.size_bytes, directories=directories)

    def _count(
        self, what: str, path: bytes | None, why: str = "", *, files: int = 0, size_bytes: int = 0, directories: int = 0
    ) -> None:
        """Count entries; with a path, they are named by it."""
        one = self.planned[what]
        if path is not None:
            keep_name(one.names, path, why)
        self.planned[what] = structs.replace(
            one, files=one.files + files, bytes=one.bytes + size_bytes, directories=one.directories + directories
        )
