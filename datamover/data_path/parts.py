"""Parts of a large snapshot, which kopia restores one after the other, each within the memory limit.

kopia keeps all entries of what it restores in memory. So a directory that has more of them than fit is split: what is
in it are parts. The mover makes the directory itself, and sets its attributes once all is restored.

One kopia restores many directories, if there is a placeholder file beside each: it has the entry of the directory, and
kopia removes it once it has restored what it stands for. Anything else needs a kopia of its own.
Source: kopia 0.23.1, cli/command_restore.go (constructTargetPairs), snapshot/restore/restore.go (copyDirectoryContent),
local_fs_output.go (FinishDirectory, setAttributes), fs/localfs/shallowentry.go, snapshot/manifest.go (DirEntry).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from core.models.base import JsonDict, parse_time
from datamover.data_path.links import DirectoryReader, show_path
from datamover.kopia.long_lists import open_output, read_directories
from datamover.kopia.snapshot_files import parse_mode
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import join, open_below, walk_tree

__all__ = ["Part", "Parts", "find_parts", "make_placeholders", "remove_left_placeholders", "remove_placeholders"]

_MOST_ALONE: Final = 2000
"""Parts with a kopia of their own: each takes a third of a second until it has opened the repository."""

_MOST_PARTS: Final = 50_000
"""In all; each takes 1 KiB of memory. A directory with more entries of its own is not split."""

_PATHS_BYTES: Final = 512 * 1024
"""Of the arguments of one kopia; Linux permits 2 MiB with the environment."""

_PLACEHOLDER: Final = ".kopia-entry"
_NAME_BYTES: Final = 255
"""The limit of file systems: NAME_MAX."""

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Part:
    """A directory, file or link: its path in the snapshot, empty for all of it, its entries, and the size of its files.

    A directory is an entry of itself, but for the root.
    """

    path: str
    entries: int
    size_bytes: int
    entry: JsonDict = field(default_factory=dict, compare=False, repr=False)

    @property
    def placeholder(self) -> str:
        """The path of its placeholder; empty if it has none: one kopia restores it alone."""
        path = f"{self.path}{_PLACEHOLDER}"
        fits = len(Path(path).name.encode()) <= _NAME_BYTES
        return path if fits and self.path and self.entry.get("type") == "d" else ""

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return f"{show_path(self.path.encode())} of the snapshot" if self.path else "the snapshot"


@dataclass(frozen=True)
class Parts:
    """What is restored one after the other, and the directories that were split, outer ones first."""

    parts: Sequence[Part]
    split: Sequence[Part] = ()

    def runs(self) -> Iterator[Sequence[Part]]:
        """Yield the parts that are restored by one kopia: such with a placeholder, or a single one."""
        run: list[Part] = []
        paths_bytes = 0
        for part in self.parts:
            if not (path := part.placeholder):
                yield [part]
                continue
            paths_bytes += len(path.encode())
            run.append(part)
            if paths_bytes > _PATHS_BYTES:
                yield run
                run, paths_bytes = [], 0
        if run:
            yield run

    @property
    def largest(self) -> Part:
        """The one with the most entries."""
        return max(self.parts, key=lambda part: part.entries)

    def make_directories(self, target: Path, _: ShouldStop) -> None:
        """Make the directories that were split, unless they exist.

        Raises:
            DataPathError: one of them cannot be made.
        """
        for one in self.split:
            with _named(one.path):
                (target / one.path).mkdir(mode=0o700, exist_ok=True)

    def set_attributes(self, target: Path, _: ShouldStop) -> None:
        """Set owner, mode and time of the directories that were split, as far as kopia would: as permissions allow.

        Raises:
            DataPathError: the target failed.
        """
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for one in reversed(self.split):
                with _named(one.path), open_below(root, one.path.encode()) as fd:
                    for change in _attributes(one.entry):
                        with suppress(PermissionError):
                            change(fd)
        finally:
            os.close(root)


def make_placeholders(target: Path, run: Sequence[Part], _: ShouldStop) -> None:
    """Make the placeholders of what one kopia restores, beside the directories, in a target that nobody else has.

    Raises:
        DataPathError: one cannot be made.
    """
    for part in run:
        with _named(part.path):
            (target / part.placeholder).write_text(json.dumps(part.entry))


def remove_placeholders(target: Path, run: Sequence[Part], _: ShouldStop) -> None:
    """Remove those placeholders that a kopia which did not succeed has left."""
    for part in run:
        with suppress(OSError):
            if part.placeholder:
                (target / part.placeholder).unlink(missing_ok=True)


def remove_left_placeholders(target: Path, stop: ShouldStop) -> None:
    """Remove what an earlier attempt that was killed has left: no snapshot has a file of such a name.

    Raises:
        DataPathError: the target cannot be read or changed.
    """
    with _named(""):
        for directory, entries in walk_tree(target, stop):
            for entry in entries:
                if entry.name.endswith(_PLACEHOLDER) and entry.is_file(follow_symlinks=False):
                    (target / os.fsdecode(join(directory, entry.name))).unlink(missing_ok=True)


async def find_parts(kopia: DirectoryReader, snapshot: Snapshot, fitting: int | None) -> Parts:
    """Return the parts of a snapshot with at most `fitting` entries each, if it can be split so far; None: all fit.

    Raises:
        KopiaError: the snapshot cannot be read.
    """
    whole = Part("", snapshot.entries, snapshot.size_bytes, snapshot.root_entry)
    if fitting is None or snapshot.entries <= fitting:
        return Parts([whole])
    parts: list[Part] = []
    split: list[Part] = []
    left, alone = [whole], 0
    while left:
        part = left.pop()
        most = _MOST_PARTS - len(parts) - len(split) - len(left)
        below = [_describe(part.path, one) for one in await _read_entries(kopia, snapshot, part.entry["obj"], most)]
        own = sum(not one.placeholder for one in below)
        if len(below) > most or alone + own > _MOST_ALONE:
            parts.append(part)
            continue
        alone += own
        split.append(part)
        for one in below:
            (left if one.entries > fitting else parts).append(one)
    return Parts(parts, split)


def _describe(directory: str, entry: JsonDict) -> Part:
    path = f"{directory}/{entry['name']}" if directory else entry["name"]
    summary = entry.get("summ")
    if not summary:
        return Part(path, 1, int(entry.get("size", 0)), entry)
    entries = sum(int(summary.get(kind, 0)) for kind in ("files", "symlinks", "dirs"))
    return Part(path, entries, int(summary.get("size", 0)), entry)


async def _read_entries(kopia: DirectoryReader, snapshot: Snapshot, object_id: str, most: int) -> Sequence[JsonDict]:
    """Return the entries of a directory, or one more than `most` of them: it may have millions."""
    with open_output(kopia.work_dir) as file:
        answer = await kopia.call(f"snapshot {snapshot.snapshot_id}", "show", object_id, output_fd=file.fileno())
        entries = next(read_directories(answer, file), None)
        if entries is None:
            raise answer.error("kopia's output is not a directory")
        return [entry for _, entry in zip(range(most + 1), entries, strict=False)]


def _attributes(entry: JsonDict) -> Iterator[Callable[[int], None]]:
    """Yield what gives a directory, by its descriptor, the attributes of an entry; kopia leaves out what is 0."""
    owner, group = int(entry.get("uid", 0)), int(entry.get("gid", 0))
    yield lambda fd: os.fchown(fd, owner, group)
    mode = parse_mode(entry.get("mode", "0")) or 0
    yield lambda fd: os.fchmod(fd, mode)
    if modified := entry.get("mtime"):
        # A directory's time is the latest one below it; that is known to a microsecond.
        time_ns = (parse_time(modified) - _EPOCH) // timedelta(microseconds=1) * 1000
        yield lambda fd: os.utime(fd, ns=(time_ns, time_ns))


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Name the directory in an error of the system."""
    try:
        yield
    except OSError as e:
        raise DataPathError(f"cannot restore directory {show_path(path.encode()) or '/'}: {e.strerror}") from e
