"""What the target of a restore did not take: entries that are missing, and owners, modes and times that are not set.

The snapshot's directories are compared with the target's, by lstat. That costs a call of kopia for a few hundred of
them, so it is only done where a probe file shows that the target does not keep something, or kopia had to ignore an
error. In the second case, what is not set yet is set: kopia leaves a directory as it is if an entry in it failed.
Source: kopia 0.23.1, snapshot/restore/restore.go (copyEntry calls no onCompletion for an ignored error).
"""

import json
import os
import re
import stat
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Final

from core.errors import IncompleteRestoreError
from core.models.base import JsonDict, cut_text
from datamover.data_path.finished import Fingerprints
from datamover.data_path.links import open_directories, read_together
from datamover.data_path.probe import Attributes, Probe
from datamover.data_path.run import DataPath
from datamover.kopia.location_files import open_output
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import attempting, is_name, join, open_below, open_root, show_path

_SHOWN: Final = 10
_SHOWN_CHARACTERS: Final = 200
"""The limit of a path in a message: ten of them must fit into a termination message."""

_KINDS: Final[dict[str, Callable[[int], bool]]] = {
    EntryType.DIRECTORY: stat.S_ISDIR,
    EntryType.FILE: stat.S_ISREG,
    EntryType.LINK: stat.S_ISLNK,
}


@dataclass
class Refused:
    """What the target did not take; of each kind at most ten names are kept, with what is there instead.

    `missing` counts entries that are not restored; `unset` those without one of their attributes or their own name,
    and `counts` each of these. `uncompared` is how many could not be read. `hint` is what to do about it.
    `stale`: older files and links may not be replaced. They do not get the time of the snapshot's, by which an
    incremental restore would take them for these.
    """

    missing: int = 0
    unset: int = 0
    uncompared: int = 0
    stale: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    missing_names: list[str] = field(default_factory=list)
    unset_names: list[str] = field(default_factory=list)
    hint: str | None = None
    unplaced: Fingerprints = field(default_factory=Fingerprints, repr=False, compare=False)

    def add_unplaced(self, path: bytes, instead: str) -> None:
        """Count an entry that is not moved to its place, where an older one may look like it; but not what is in it."""
        self.unplaced.add_text(path)
        self.add_missing(path, instead)

    def add_missing(self, path: bytes, instead: str, count: int = 1) -> None:
        """Count an entry that is not restored, and what is below it."""
        self.missing += count
        keep_name(self.missing_names, path, instead)

    def add_unset(self, path: bytes, instead: Mapping[str, str]) -> None:
        """Count an entry that lacks something, each with what it has instead."""
        self.unset += 1
        for what in instead:
            self.counts[what] = self.counts.get(what, 0) + 1
        keep_name(self.unset_names, path, ", ".join(instead.values()))

    def add_uncompared(self, path: bytes, error: OSError, count: int) -> None:
        """Count what is in a directory that cannot be read."""
        self.unset += count
        self.uncompared += count
        keep_name(self.unset_names, path, f"{error.strerror}")

    def check(self, attempted: str, error: str | None) -> None:
        """Check that all entries are restored; `error` is the first one that kopia could not write, if there is any.

        Without a missing entry, an older one is in its place, which looks like it.

        Raises:
            IncompleteRestoreError: some are not, or may not be; the others are.
        """
        if self.missing or error:
            count = f"{self.missing} missing" if self.missing else "not all are written"
            missing = ": ".join(filter(None, (count, "; ".join(self.missing_names))))
            cause = f" (kopia's first error: {cut_text(error, 500)})" if error else ""
            also = f". Also, {cut_text(unset, 1000)}" if (unset := self.unset_text) else ""
            hint = f". {self.hint}" if self.hint else ""
            text = f"{cut_text(missing, 2000)}{cause}{also}{hint}"
            raise IncompleteRestoreError(f"{attempted}: the target refused entries, all others are restored: {text}")

    @property
    def unset_text(self) -> str | None:
        """What is not set, for a message; None: all is."""
        if not self.unset:
            return None
        counts = [f"the {what} of {count}" for what, count in self.counts.items()]
        kinds = [f"did not take {', '.join(counts)} of the entries"] if counts else []
        if self.uncompared:
            kinds.append(f"does not let {self.uncompared} entries be compared")
        return f"the target {', and '.join(kinds)}: {'; '.join(self.unset_names)}"


def keep_name(names: list[str], path: bytes, instead: str | None = None) -> None:
    """Add a path for a message to `names`, cut, and what is there instead, unless there are ten."""
    if len(names) < _SHOWN:
        shown = show_path(path, _SHOWN_CHARACTERS) or "/"
        names.append(f"{shown} ({instead})" if instead else shown)


@dataclass(frozen=True, slots=True)
class Unit:
    """A file, a link or a directory with all in it: its path in the snapshot, and kopia's entry of it."""

    path: bytes
    entry: JsonDict

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.entry.get("type") == EntryType.DIRECTORY

    @property
    def size_bytes(self) -> int:
        """The size of its files: a link has none."""
        if self.entry.get("type") == EntryType.LINK:
            return 0
        return int((self.entry.get("summ") or {}).get("size", 0) if self.is_directory else self.entry.get("size", 0))

    @property
    def entries(self) -> int:
        """How many entries it stands for: a directory is one beside those in it."""
        if not self.is_directory:
            return 1
        summary = self.entry.get("summ") or {}
        return max(1, sum(int(summary.get(kind, 0)) for kind in ("files", "symlinks", "dirs")))

    @property
    def placeholder(self) -> str:
        """The content of its placeholder; kopia gives a directory the latest time of what is below it.

        Source: kopia 0.23.1, snapshot/snapshotfs/repofs.go (loadLocked).
        """
        time = (self.entry.get("summ") or {}).get("maxTime") if self.is_directory else None
        return json.dumps({**self.entry, **({"mtime": time} if time else {})})


class UnitFile:
    """Units in a file: there may be millions."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def _append(self, unit: Unit) -> int:
        """Add one, and return where it is; raises DataPathError, which is no error of the target."""
        with attempting("keep a list of entries"):
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps([os.fsdecode(unit.path), unit.entry]).encode() + b"\n")
        return start

    def _read(self, start: int) -> Unit:
        with attempting("read a list of entries"):
            self._file.seek(start)
            path, entry = json.loads(self._file.readline())
        return Unit(os.fsencode(path), entry)


class Directories(UnitFile):
    """All directories of a snapshot, outer ones first."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._starts = array("Q")
        self._taken = 0

    def add(self, path: bytes, entry: JsonDict) -> None:
        """Add one that is in the target."""
        self._starts.append(self._append(Unit(path, entry)))

    async def read(
        self, repository: Repository, snapshot: Snapshot, output: IO[bytes]
    ) -> Iterator[tuple[Unit, Iterator[JsonDict]]] | None:
        """Return the next ones, as many as one call of kopia reads, each with its entries; None: all were read.

        The entries are to be read before the next call. `output` is open for kopia's output.

        Raises:
            KopiaError: one of them cannot be read, also while the entries are.
        """
        if not self._starts:
            self.add(b"", snapshot.root_entry)
        if not (batch := self._take()):
            return None
        objects = [one.entry.get("obj", "") for one in batch]
        return zip(batch, await open_directories(repository, snapshot, objects, output), strict=True)

    def _take(self) -> Sequence[Unit]:
        first = self._taken
        objects = (self._read(self._starts[at]).entry.get("obj", "") for at in range(first, len(self._starts)))
        self._taken += len(next(read_together(objects), ()))
        return [*map(self._read, self._starts[first : self._taken])]

    def inner_first(self) -> Iterator[Unit]:
        """Yield all of them, each after those in it."""
        return map(self._read, reversed(self._starts))


@dataclass
class TargetComparison:
    """Compares a target with a snapshot; `entries` is how many it has looked at.

    What the target lacks is added to `refused`; with `repair`, attributes are set before.
    """

    repository: Repository
    snapshot: Snapshot
    target: Path
    probe: Probe
    data_path: DataPath
    refused: Refused = field(default_factory=Refused)
    repair: bool = False
    entries: int = 0

    async def run(self) -> Refused:
        """Return what the target lacks.

        Raises:
            DataPathError: the snapshot (KopiaError) cannot be read, or the target cannot be opened, or hangs.
        """
        folder = self.repository.work_dir
        with open_output(folder) as file, open_output(folder) as output:
            self._directories = Directories(file)
            while listed := await self._directories.read(self.repository, self.snapshot, output):
                await self._in_thread(partial(self._compare, listed))
            await self._in_thread(self._finish)
        return self.refused

    async def _in_thread(self, work: Callable[[ShouldStop], None]) -> None:
        doing = f"comparing target {self.target} with the snapshot"
        await self.data_path.run_in_thread(work, doing, lambda: self.entries)

    def _compare(self, listed: Iterable[tuple[Unit, Iterator[JsonDict]]], stop: ShouldStop) -> None:
        """Compare what is in these directories; of directories in them, the attributes are compared at the end."""
        with self._opened() as root:
            for directory, entries in listed:
                try:
                    with open_below(root, directory.path) as fd:
                        self._compare_directory(fd, directory.path, entries, stop)
                except OSError as e:
                    self.refused.add_uncompared(directory.path, e, directory.entries - 1)
                if stop():
                    return

    def _finish(self, stop: ShouldStop) -> None:
        """Compare the directories themselves: one whose mode is set may be closed to this process."""
        with self._opened() as root:
            for directory in self._directories.inner_first():
                if stop():
                    return
                above, name = os.path.split(directory.path)
                wanted = Attributes.of(directory.entry, root=not directory.path)
                try:
                    with open_below(root, above) as fd:
                        self._compare_attributes(fd, os.fsdecode(name) or ".", directory.path, wanted=wanted)
                except OSError as e:
                    self.refused.add_uncompared(directory.path, e, 1)
                self.entries += 1

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Name the target in an error of its opening, and in no other one."""
        with ExitStack() as stack:
            with attempting(f"open target {self.target}"):
                root = stack.enter_context(open_root(self.target))
            yield root

    def _compare_directory(self, fd: int, path: bytes, entries: Iterable[JsonDict], stop: ShouldStop) -> None:
        names = None
        if not self.probe.names:
            entries = list(entries)
            names = _Names(os.listdir(fd), [str(entry.get("name", "")) for entry in entries])
        for entry in entries:
            if stop():
                return
            self.entries += 1
            self._compare_entry(fd, path, entry, names)

    def _compare_entry(self, fd: int, directory: bytes, entry: JsonDict, names: "_Names | None") -> None:
        name, kind = str(entry.get("name", "")), str(entry.get("type", ""))
        path = join(directory, name)
        if self.refused.unplaced.has_text(path):
            self.refused.missing += Unit(path, entry).entries - 1
            return
        if fault := self._find_fault(fd, name, entry, names):
            self.refused.add_missing(path, fault, Unit(path, entry).entries)
            return
        other = {} if names is None or names.has(name) else {"name": "another form of its name"}
        if kind == EntryType.DIRECTORY:
            if other:
                self.refused.add_unset(path, other)
            self._directories.add(path, entry)
        else:
            wanted = Attributes.of(entry)
            wanted = replace(wanted, time_ns=None) if self.refused.stale else wanted
            self._compare_attributes(fd, name, path, wanted=wanted, more=other)

    def _find_fault(self, fd: int, name: str, entry: JsonDict, names: "_Names | None") -> str | None:
        """Return why an entry is not restored; None: it is, its attributes aside."""
        if not is_name(name):
            return "no file can have this name"
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as e:
            return str(e.strerror)
        if names is not None and not names.has(name) and (other := names.find_alike(name)):
            return f"the target takes it for {show_path(os.fsencode(other))}"
        kind = str(entry.get("type", ""))
        if kind not in _KINDS or not _KINDS[kind](status.st_mode):
            return "something else is there"
        if kind == EntryType.FILE and status.st_size != (size := int(entry.get("size", 0))):
            return f"{status.st_size} of {size} bytes"
        return None

    def _compare_attributes(
        self, fd: int, name: str, path: bytes, *, wanted: Attributes, more: Mapping[str, str] | None = None
    ) -> None:
        unset = wanted.find_unset(os.stat(name, dir_fd=fd, follow_symlinks=False))
        if unset and self.repair:
            for change in wanted.changes(name, fd, unset):
                with suppress(OSError):
                    change()
            unset = wanted.find_unset(os.stat(name, dir_fd=fd, follow_symlinks=False))
        if unset or more:
            self.refused.add_unset(path, {**unset, **(more or {})})


class _Names:
    """The names of a directory that a target has which does not keep all names: those there, and the snapshot's."""

    def __init__(self, there: Iterable[str], wanted: Iterable[str]) -> None:
        self._there = set(there)
        self._alike: dict[str, list[str]] = {}
        for name in wanted:
            self._alike.setdefault(_fold(name), []).append(name)

    def has(self, name: str) -> bool:
        """Return whether it is there in this form."""
        return name in self._there

    def find_alike(self, name: str) -> str | None:
        """Return another name of the snapshot that the target may take for the same."""
        return next((other for other in self._alike[_fold(name)] if other != name), None)


class Folded:
    """The entries of a snapshot that a target may take for another one beside it, and the directories above."""

    def __init__(self) -> None:
        self.entries = 0
        self._names = Fingerprints()
        self._above = Fingerprints()
        self._found = False

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._found

    def add(
        self, listed: Iterable[tuple[Unit, Iterable[JsonDict]]], directories: Directories, stop: ShouldStop
    ) -> None:
        """Add the entries of directories, and the directories in them to what is still to be read."""
        for directory, entries in listed:
            self._add(directory.path, entries, directories, stop)

    def _add(self, directory: bytes, entries: Iterable[JsonDict], directories: Directories, stop: ShouldStop) -> None:
        seen, found = Fingerprints(), False
        for entry in entries:
            if stop():
                return
            self.entries += 1
            name = str(entry.get("name", ""))
            folded = os.fsencode(_fold(name))
            if seen.has_text(folded):
                self._names.add_text(directory + b"/" + folded)
                found = True
            seen.add_text(folded)
            if entry.get("type") == EntryType.DIRECTORY:
                directories.add(join(directory, name), entry)
        self._found |= found
        while found and directory:
            self._above.add_text(directory)
            directory = os.path.split(directory)[0]

    def has(self, path: bytes) -> bool:
        """Return whether it may be taken for another one."""
        directory, name = os.path.split(path)
        return self._names.has_text(directory + b"/" + os.fsencode(_fold(os.fsdecode(name))))

    def has_within(self, path: bytes) -> bool:
        """Return whether it, or something below it, may be taken for another one."""
        return self._above.has_text(path) or self.has(path)


async def find_folded(repository: Repository, snapshot: Snapshot, data_path: DataPath) -> Folded:
    """Return what a target that does not keep all names apart may take for one. Raises KopiaError of the snapshot."""
    folded = Folded()
    with open_output(repository.work_dir) as file, open_output(repository.work_dir) as output:
        directories = Directories(file)
        while listed := await directories.read(repository, snapshot, output):
            add = partial(folded.add, listed, directories)
            await data_path.run_in_thread(add, "looking for names that are alike", lambda: folded.entries)
    return folded


_IGNORABLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""What ext4 and f2fs ignore. Source: Linux, include/linux/unicode.h; Unicode 12.1, Default_Ignorable_Code_Point."""


def _fold(name: str) -> str:
    """Return what any target may take a name for, such as SMB shares, FAT, ext4 or ZFS: each then says so itself."""
    whole = unicodedata.normalize("NFKD", _IGNORABLE.sub("", name))
    return unicodedata.normalize("NFKD", whole.upper().casefold()).rstrip(". ")
