"""What a restore in place does with each entry: the snapshot's directories are compared with the volume's, by lstat.

A comparison decides and writes nothing. An `Actor` does what it decides: the restore itself, or a plan, which counts.
"""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Final, Protocol, TypeVar

from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from datamover.data_path.extra_files import ExtraFiles
from datamover.data_path.finished import Fingerprints
from datamover.data_path.links import named, open_directories, read_targets
from datamover.data_path.refused import Directories, Directory
from datamover.data_path.stage import PendingUnits, Step, Unit, decide_file, decide_link, decide_same_link, is_stage
from datamover.kopia.location_files import open_output
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import is_name, join, open_below

__all__ = ["Actor", "Comparison"]

_RESTORED: Final = frozenset(EntryType)

_T = TypeVar("_T")


class Actor(Protocol):
    """Does what a comparison decides; the descriptors are of the directory that an entry is in."""

    def open(self, stop: ShouldStop) -> AbstractContextManager[int]:
        """Open the root of the volume, for what follows in one thread."""
        ...

    def is_whole(self, unit: Unit, *, there: bool) -> bool:
        """Return whether a directory is written as a whole; `there`: the volume has a directory in its place."""
        ...

    def is_taken(self, path: bytes, fd: int, name: str) -> bool:
        """Return whether the volume takes an entry for another one that is restored; if so, it is refused."""
        ...

    def act(self, step: Step, unit: Unit, fd: int, status: os.stat_result | None) -> bool:
        """Take the step, which is not READ; `status` is of what the volume has there, None: nothing.

        Returns:
            Whether what is in a directory may be compared.

        Raises:
            OSError: the volume does not take the entry.
        """
        ...

    def delete(self, name: str, fd: int, path: bytes) -> bool:
        """Delete an extra entry with all in it; return whether it is gone.

        Raises:
            OSError: it cannot be deleted.
        """
        ...

    def refuse(self, path: bytes, cause: OSError | str) -> None:
        """Record an entry that the volume does not take."""
        ...

    def reject(self, directory: bytes, entry: JsonDict) -> None:
        """Record an entry of the snapshot that no volume can have."""
        ...

    async def advance(self) -> None:
        """Continue after some directories: what was decided may be much."""
        ...

    async def in_thread(self, work: Callable[[ShouldStop], _T], doing: str) -> _T:
        """Return what `work` returns, in a thread that may hang."""
        ...


@dataclass
class Comparison:
    """Compares a snapshot with a volume.

    `changed` has the paths of files whose content is not the snapshot's; None: their content is not compared.
    `precision_ns` is how exact the volume's times are. `entries` is how many were compared.
    """

    repository: Repository
    snapshot: Snapshot
    rule: InPlace
    actor: Actor
    extra: ExtraFiles
    doing: str
    changed: Fingerprints | None = None
    precision_ns: int = 1
    entries: int = 0
    _directories: Directories = field(init=False)
    _links: PendingUnits = field(init=False)

    async def run(self, directories: Directories) -> None:
        """Compare all of it; `directories` gets those that were compared.

        Raises:
            KopiaError: the snapshot cannot be read.
            DataPathError: the volume cannot be read, or an extra entry cannot be deleted.
        """
        with ExitStack() as files:
            output, links = (files.enter_context(open_output(self.repository.work_dir)) for _ in range(2))
            self._links = PendingUnits(links)
            self._directories = directories
            directories.add(b"", self.snapshot.root_entry)
            while batch := directories.take():
                objects = [directory.entry.get("obj", "") for directory in batch]
                listed = await open_directories(self.repository, self.snapshot, objects, output)
                await self.actor.in_thread(partial(self._compare, batch, listed), self.doing)
                if self._links.full:
                    await self._compare_links(output)
                await self.actor.advance()
            await self._compare_links(output)

    def _compare(self, batch: Sequence[Directory], listed: Iterator[Iterable[JsonDict]], stop: ShouldStop) -> None:
        with self.actor.open(stop) as root:
            for directory, entries in zip(batch, listed, strict=True):
                with named(directory.path), open_below(root, directory.path) as fd:
                    known = self._compare_directory(directory.path, entries, fd, stop)
                    if self.rule.delete_extra_files and not stop():
                        is_wanted = partial(_is_known, known=known)
                        self.extra.delete(self.actor.delete, fd, directory.path, is_wanted, stop)

    def _compare_directory(
        self, directory: bytes, entries: Iterable[JsonDict], fd: int, stop: ShouldStop
    ) -> Fingerprints:
        """Compare what is in an open directory, and return the names that the snapshot has there."""
        known = Fingerprints()
        for entry in entries:
            if stop():
                break
            self.entries += 1
            name = str(entry.get("name", ""))
            if not is_name(name) or entry.get("type") not in _RESTORED:
                self.actor.reject(directory, entry)
            elif directory or not is_stage(name):
                known.add_text(os.fsencode(name))
                unit = Unit(join(directory, name), entry)
                try:
                    self._compare_entry(unit, name, fd)
                except OSError as e:
                    self.actor.refuse(unit.path, e)
        return known

    def _compare_entry(self, unit: Unit, name: str, fd: int) -> None:
        if unit.path in self.extra.mounts:
            self.actor.refuse(unit.path, "another volume is mounted there")
            return
        status = _read_status(name, fd)
        if self.actor.is_taken(unit.path, fd, name):
            return
        step = self._decide(unit, status)
        if step is Step.READ:
            self._links.add(unit)
            return
        if self.actor.act(step, unit, fd, status) and step is Step.ENTER:
            self._directories.add(unit.path, unit.entry)

    def _decide(self, unit: Unit, status: os.stat_result | None) -> Step:
        if unit.is_directory:
            there = status is not None and stat.S_ISDIR(status.st_mode)
            return Step.WRITE if self.actor.is_whole(unit, there=there) else Step.ENTER
        if unit.entry["type"] == EntryType.LINK:
            return decide_link(unit.entry, status, self.rule)
        return decide_file(
            unit.entry, status, self.rule, path=unit.path, changed=self.changed, precision_ns=self.precision_ns
        )

    async def _compare_links(self, output: IO[bytes]) -> None:
        """Compare the links whose targets are to be read."""
        while self._links.count:
            units = self._links.take(sys.maxsize)
            targets = await read_targets(self.repository, self.snapshot, [unit.entry for unit in units], output)
            await self.actor.in_thread(partial(self._decide_links, units, targets), self.doing)

    def _decide_links(self, units: Sequence[Unit], targets: Sequence[bytes | None], stop: ShouldStop) -> None:
        with self.actor.open(stop) as root:
            for unit, target in zip(units, targets, strict=True):
                if stop():
                    return
                self.entries += 1
                above, name = os.path.split(os.fsdecode(unit.path))
                try:
                    with open_below(root, os.fsencode(above)) as fd:
                        status, step = _read_status(name, fd), Step.WRITE
                        if self.actor.is_taken(unit.path, fd, name):
                            continue
                        if status is not None and target is not None and _read_link(name, fd) == target:
                            step = decide_same_link(unit.entry, status, precision_ns=self.precision_ns)
                        self.actor.act(step, unit, fd, status)
                except OSError as e:
                    self.actor.refuse(unit.path, e)


def _read_status(name: str, fd: int) -> os.stat_result | None:
    # A name that is too long for the volume is refused where it is moved.
    with suppress(OSError):
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    return None


def _read_link(name: str, fd: int) -> bytes | None:
    with suppress(OSError):
        return os.readlink(os.fsencode(name), dir_fd=fd)
    return None


def _is_known(name: str, *, known: Fingerprints) -> bool:
    return known.has_text(os.fsencode(name))
