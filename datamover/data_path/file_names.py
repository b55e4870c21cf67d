"""A check for what kopia cannot keep unchanged: names, times, and kinds of files.

Names that are not UTF-8 change. Two in one directory may become the same: a restore overwrites one file with the other
without an error. One may become too long to be restored. Some are placeholders: kopia backs up what these refer to.
Source: kopia 0.23.1, snapshot/snapshotfs/dir_writer.go (directories are kept as JSON), fs/localfs/shallowentry.go,
local_fs_os.go (entryFromDirEntry), fs/utc_timestamp.go; Go, encoding/json (each byte that is not UTF-8 becomes U+FFFD).
"""

import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

from core.errors import DataPathError
from core.models.transfer_settings import READY_SETS, Exclusions, LeftOut
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import escape_controls, join, open_below, open_root, show_path, walk_tree

_EXAMPLES: Final = 3
_NAME_LIMIT_BYTES: Final = 255
"""The limit of file systems: NAME_MAX."""

_PATH_LIMIT_BYTES: Final = 4095 - len("/00000000-0000-0000-0000-000000000000/")
"""The limit of a path below the volume: PATH_MAX without its NUL, less `/<uid>/`, where Velero mounts it."""

_COMPARED_NAMES: Final = 20_000
"""How many names of one directory are compared at a time; each takes 300 bytes meanwhile."""

_SHOWN_CHARACTERS: Final = 1000
"""The limit of a path in a message: three of them must fit into a termination message."""

_TIMES_NS: Final = range(-(2**63), 2**63)
"""The times that kopia keeps, in nanoseconds since 1970; others become one of these, without an error."""

_LINK_ROUNDING_NS: Final = 999
"""It rounds the time of a link up to a microsecond. Source: golang.org/x/sys, unix/timestruct.go (NsecToTimeval)."""

PLACEHOLDER: Final = ".kopia-entry"
_SNAPSHOTS: Final = Exclusions(patterns=READY_SETS["snapshots"])
"""Directories that show older states of the whole volume: to count them all would take many times as long."""

_REPLACEMENT: Final = "\ufffd"
_ESCAPED: Final = re.compile("[\udc80-\udcff]")
"""How Python represents a byte that is not UTF-8, and nothing else."""


def mangle(name: bytes) -> str:
    """Return the name that kopia keeps."""
    return _ESCAPED.sub(_REPLACEMENT, name.decode(errors="surrogateescape"))


@dataclass
class NameExamples:
    """How many entries of a kind there are, and examples for a message: at most three."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, directory: bytes, *names: bytes) -> None:
        """Count an entry, or some that become the same; the directory's path is relative to the volume's root."""
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            paths = (b"/".join(filter(None, (directory, name))) for name in names)
            self.examples.append(" and ".join(show_path(path, _SHOWN_CHARACTERS) for path in paths))

    def show(self, separator: str = ", ") -> str:
        """Return the examples for a message."""
        return separator.join(self.examples)

    def describe(self, text: str, *, before: str = "", separator: str = ", ") -> str | None:
        """Return a message with the count, the text and the examples; None: there are no such entries."""
        return f"{before}{self.count} {text} {self.show(separator)}" if self.count else None


@dataclass
class NameReport:
    """The result of a walk.

    `entries` is how many were read so far, `kept` how many of them kopia keeps; `complete`: all were read. Those that
    exclusions leave out are counted in `excluded` alone, which is None without exclusions; `uncounted` is how many
    directories are counted there without what is in them. kopia changes `mangled` names, and `collisions` of them
    become the same as another one; what it keeps of `too_long`, mangled or not, cannot be restored. It does not keep
    `far_times`, leaves out what is in `left_out`, and takes `placeholders` for something else. It leaves out `unfound`
    ones, which are listed but not there, as if they were deleted meanwhile.
    """

    entries: int = 0
    kept: int = 0
    complete: bool = False
    excluded: LeftOut | None = None
    uncounted: int = 0
    mangled: NameExamples = field(default_factory=NameExamples)
    collisions: NameExamples = field(default_factory=NameExamples)
    too_long: NameExamples = field(default_factory=NameExamples)
    far_times: NameExamples = field(default_factory=NameExamples)
    left_out: NameExamples = field(default_factory=NameExamples)
    placeholders: NameExamples = field(default_factory=NameExamples)
    unfound: NameExamples = field(default_factory=NameExamples)

    @property
    def warning(self) -> str | None:
        """A warning about changed names, or None."""
        return self.mangled.describe(
            "names are not UTF-8: a restore writes U+FFFD for each byte that is not UTF-8, for example in"
        )

    @property
    def notes(self) -> tuple[str | None, ...]:
        """What the user should know beside `warning`; None where there is nothing to say."""
        return (
            self.far_times.describe(
                "modification times are before 1677-09-21 or after 2262-04-11, which kopia cannot keep: a restore sets "
                "wrong ones, for example of"
            ),
            self.left_out.describe(
                f"pipes, devices, and links whose name ends in {PLACEHOLDER}, which kopia cannot keep, for example",
                before="left out ",
            ),
            self.unfound.describe("entries that the volume lists and does not find, for example", before="left out "),
        )

    def check(self) -> None:
        """Check that every name can be restored.

        Raises:
            DataPathError: two names in one directory become the same, or one becomes too long; names examples.
        """
        lost = self.collisions.describe(
            "names would be lost: they are not UTF-8, and kopia keeps them under a name that another file in the "
            "directory has. Rename them:",
            separator="; ",
        )
        too_long = self.too_long.describe(
            "names would be too long to restore: with U+FFFD (3 bytes) for each byte that is not UTF-8, the name "
            f"exceeds {_NAME_LIMIT_BYTES} bytes, or its path below the volume {_PATH_LIMIT_BYTES} bytes. Rename them:",
            separator="; ",
        )
        if faults := list(filter(None, (lost, too_long))):
            raise DataPathError(". ".join(faults))

    def add(self, directory: bytes, names: list[bytes]) -> None:
        """Add the names of one directory that kopia may change."""
        kept: dict[str, bytes] = {}
        # A name that contains U+FFFD itself is kept, but another name may become the same.
        for name in sorted(names):
            new = mangle(name)
            if new.encode() != name:
                self.mangled.add(directory, name)
            first = kept.setdefault(new, name)
            if first is not name:
                self.collisions.add(directory, first, name)


def inspect_names(
    root: Path, stop: ShouldStop, report: NameReport | None = None, exclude: Exclusions | None = None
) -> NameReport:
    """Return how kopia keeps what is below `root`; `stop` ends the walk early.

    Unreadable directories are skipped: kopia reports them. `report` is filled meanwhile, and returned.
    """
    report = report or NameReport()
    with suppress(OSError):
        filtered = _Filter(root, exclude, report) if exclude else None
        skip = filtered.skip if filtered is not None else lambda _, __: False
        for directory, entries in walk_tree(root, stop, skip=skip):
            # As kopia keeps it, with a slash.
            path_bytes = len(mangle(directory).encode()) + 1 if directory else 0
            suspects = _Suspects()
            for entry in filtered.keep(directory, entries) if filtered is not None else entries:
                name = os.fsencode(entry.name)
                report.entries += 1
                kept = is_kept(entry)
                report.kept += kept
                suspects.add_unfound(entry)
                if not kept and not _is_socket(entry):
                    report.left_out.add(directory, name)
                if kept and not _has_kept_time(entry):
                    report.far_times.add(directory, name)
                if entry.name.endswith(PLACEHOLDER):
                    report.placeholders.add(directory, name)
                # Most names are ASCII, and the check must cost nothing compared to the data path.
                mangled = "" if name.isascii() else mangle(name)
                name_bytes = len(mangled.encode()) or len(name)
                if _REPLACEMENT in mangled and kept:
                    suspects.add(name)
                too_long = name_bytes > _NAME_LIMIT_BYTES or path_bytes + name_bytes > _PATH_LIMIT_BYTES
                if too_long and kept:
                    report.too_long.add(directory, name)
            # It may be deleted meanwhile.
            with suppress(OSError):
                suspects.report_unfound(root, directory, report)
                for names in suspects.in_parts(root, directory):
                    report.add(directory, names)
                    if stop():
                        break
        report.complete = not stop()
    return report


class _Filter:
    """Counts what exclusions leave out, and yields the rest."""

    def __init__(self, root: Path, exclude: Exclusions, report: NameReport) -> None:
        self._exclude = exclude
        self._report = report
        self._device = root.stat().st_dev
        report.excluded = LeftOut(rules=exclude.digest or "")

    def keep(self, directory: bytes, entries: "Iterator[os.DirEntry[str]]") -> "Iterator[os.DirEntry[str]]":
        """Yield the entries of a directory that are not left out."""
        above, whole = mangle(directory), self._leaves_out_all(directory)
        for entry in entries:
            name = mangle(os.fsencode(entry.name))
            path = f"{above}/{name}" if above else name
            if whole or self._leaves_out(entry, path):
                self._report.entries += 1
                if is_kept(entry) and self._report.excluded is not None:
                    self._report.excluded = self._report.excluded.add(escape_controls(path), _size_of(entry))
                    self._report.uncounted += self.skip(directory, entry)
            else:
                yield entry

    def skip(self, directory: bytes, entry: "os.DirEntry[str]") -> bool:
        """Return whether a directory is left out and not counted: another file system, which may hang, or snapshots."""
        if not entry.is_dir(follow_symlinks=False):
            return False
        path, status = mangle(join(directory, entry.name)), _status(entry)
        elsewhere = status is not None and status.st_dev != self._device
        if not elsewhere and not _SNAPSHOTS.excludes_name(path, is_dir=True):
            return False
        return self._leaves_out_all(directory) or self._leaves_out(entry, path)

    def _leaves_out_all(self, directory: bytes) -> bool:
        return bool(directory) and self._exclude.excludes_path(mangle(directory), is_dir=True)

    def _leaves_out(self, entry: "os.DirEntry[str]", path: str) -> bool:
        if self._exclude.excludes_name(path, is_dir=entry.is_dir(follow_symlinks=False)):
            return True
        if self._exclude.max_bytes is None and not self._exclude.one_file_system:
            return False
        if (status := _status(entry)) is None:
            return False
        other = self._exclude.one_file_system and status.st_dev != self._device
        return other or (not stat.S_ISDIR(status.st_mode) and self._exclude.excludes_size(status.st_size))


def _status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    """Return the entry's own status; None: it was deleted meanwhile, or cannot be read, which kopia reports."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _is_unfound(entry: "os.DirEntry[str]") -> bool:
    try:
        entry.stat(follow_symlinks=False)
    except OSError as e:
        return isinstance(e, FileNotFoundError)
    return False


def _size_of(entry: "os.DirEntry[str]") -> int | None:
    """Return the size of a file or link; None for a directory, and 0 for what is gone."""
    if entry.is_dir(follow_symlinks=False):
        return None
    status = _status(entry)
    return 0 if status is None else status.st_size


class _Suspects:
    """The names in one directory that kopia may change, or not find; very many are not kept, but read again."""

    def __init__(self) -> None:
        self._unfound = set[str]()
        self._count = 0
        self._names: list[bytes] = []

    def add(self, name: bytes) -> None:
        self._count += 1
        if self._count <= _COMPARED_NAMES:
            self._names.append(name)

    def add_unfound(self, entry: "os.DirEntry[str]") -> None:
        if len(self._unfound) < _COMPARED_NAMES and _is_unfound(entry):
            self._unfound.add(entry.name)

    def report_unfound(self, root: Path, directory: bytes, report: NameReport) -> None:
        """Report what the directory still lists: all else was deleted."""
        if not self._unfound:
            return
        with open_root(root) as top, open_below(top, directory) as fd, os.scandir(fd) as entries:
            for entry in entries:
                if entry.name in self._unfound and _is_unfound(entry):
                    report.unfound.add(directory, os.fsencode(entry.name))

    def in_parts(self, root: Path, directory: bytes) -> Iterator[list[bytes]]:
        """Yield all that kopia may change, and those that become the same in one list."""
        parts = math.ceil(self._count / _COMPARED_NAMES)
        if parts <= 1:
            yield self._names
            return
        self._names.clear()
        with open_root(root) as top:
            for part in range(parts):
                with open_below(top, directory) as fd, os.scandir(fd) as entries:
                    yield [os.fsencode(one.name) for one in entries if _part_of(one, parts) == part]


def _part_of(entry: "os.DirEntry[str]", parts: int) -> int | None:
    """Return the part, from 0, in which a name is compared that kopia may change; None for any other."""
    if entry.name.isascii() or _REPLACEMENT not in (kept := mangle(os.fsencode(entry.name))) or not is_kept(entry):
        return None
    return crc32(kept.encode()) % parts


def is_kept(entry: "os.DirEntry[str]") -> bool:
    """Return whether kopia keeps the entry: it skips sockets, pipes and devices, and some links."""
    if entry.is_symlink():
        return not entry.name.endswith(PLACEHOLDER)
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _is_socket(entry: "os.DirEntry[str]") -> bool:
    """Return whether the entry is a socket, which is of no use without its process, or was deleted meanwhile."""
    status = _status(entry)
    return status is None or stat.S_ISSOCK(status.st_mode)


def _has_kept_time(entry: "os.DirEntry[str]") -> bool:
    if (status := _status(entry)) is None:
        return True
    time_ns = status.st_mtime_ns
    return time_ns in _TIMES_NS and time_ns + _LINK_ROUNDING_NS * entry.is_symlink() in _TIMES_NS
