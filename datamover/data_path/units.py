"""What a restore in place does with each file, what kopia writes at once, and all that is still to be written.

Source: kopia 0.23.1, snapshot/snapshotfs/repofs.go (loadLocked).
"""

import json
import os
import stat
from dataclasses import dataclass
from enum import Enum
from typing import IO, Final

from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from datamover.data_path.attributes import Attribute, Attributes
from datamover.data_path.finished import Fingerprints
from datamover.data_path.links import has_target
from datamover.data_path.parts import Part
from datamover.data_path.refused import count_entries
from datamover.kopia.snapshots import EntryType

__all__ = ["RUN_BYTES", "PendingUnits", "Step", "Unit", "decide_file", "decide_link", "decide_same_link"]


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
    """Return what is done with a link, of which the volume has `status`; None: it has nothing there.

    One that has another name is written: that would change too.
    """
    if status is None or not rule.incremental or not stat.S_ISLNK(status.st_mode) or status.st_nlink != 1:
        return Step.WRITE
    return Step.READ if has_target(entry) else Step.WRITE


def decide_same_link(entry: JsonDict, status: os.stat_result, *, precision_ns: int = 1) -> Step:
    """Return what is done with a link that has the same target in the volume."""
    return Step.SET if Attributes.of(entry).find_unset(status, tolerance_ns=precision_ns) else Step.KEEP


@dataclass(frozen=True, slots=True)
class Unit:
    """What kopia writes at once: a file, a link or a directory with all in it."""

    path: bytes
    entry: JsonDict

    @property
    def size_bytes(self) -> int:
        """The size of its files: a link has none."""
        if self.entry["type"] == EntryType.LINK:
            return 0
        return int((self.entry.get("summ") or {}).get("size", 0) if self.is_directory else self.entry.get("size", 0))

    @property
    def entries(self) -> int:
        """How many entries it has; a directory is one itself."""
        return count_entries(self.entry)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.entry.get("type") == EntryType.DIRECTORY

    @property
    def part(self) -> Part:
        """What it is for kopia's runs, and messages."""
        return Part(os.fsdecode(self.path), self.entries, self.size_bytes)

    @property
    def placeholder(self) -> bytes:
        """The content of its placeholder; kopia gives a directory the latest time of what is below it."""
        time = (self.entry.get("summ") or {}).get("maxTime") if self.is_directory else None
        return json.dumps({**self.entry, **({"mtime": time} if time else {})}).encode()


class PendingUnits:
    """The units that are to be written, in a file: there may be millions; how many, and their size together."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._taken = 0
        self.count = 0
        self.size_bytes = 0

    def add(self, unit: Unit) -> None:
        """Add one."""
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps([os.fsdecode(unit.path), unit.entry]).encode() + b"\n")
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
        self._file.seek(self._taken)
        while self.count and len(taken) < _RUN_UNITS:
            path, entry = json.loads(self._file.readline())
            unit = Unit(os.fsencode(path), entry)
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
