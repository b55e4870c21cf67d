"""The history of backups by volume and day in UTC: what was new, how large volumes were, how long it took. Pure.

It is kept in ConfigMaps, each with the days of one block, and outlives the transfers, which are deleted with backups.
"""

import base64
import hashlib
import struct
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache
from typing import Final, TypeVar

import msgspec

from core.errors import ContractError, Translated
from core.kube.types import ConfigObject
from core.models.base import WireModel, to_utc
from core.models.names import HISTORY_CONFIGMAPS
from nodeagent.coverage.cluster import VolumeKey

_Number = TypeVar("_Number", int, float)

HISTORY_DAYS: Final = 90
"""Days that are shown, today among them."""

HISTORY_KEY: Final = "days"
"""The key in `binaryData` of a ConfigMap."""

_BLOCK_DAYS: Final = 30
"""Of one ConfigMap: the days that are shown are in four of them at most."""

_MOST_BYTES: Final = 256 * 1024
"""Of one ConfigMap: a quarter of 1 MiB. Of more volumes than fit, some 2,000, the smallest become part of the rest."""

_BYTES_PER_VOLUME: Final = 100

_MOST_MARKS: Final = 20_000
"""Backups of one day that are counted: each has a mark until the day has passed."""

_MARK_BYTES: Final = 6

_MOST_UNPACKED: Final = 64 * 1024 * 1024
"""Whoever may write the ConfigMap must not fill the memory of its readers."""

_VERSION: Final = 1

_REST: Final[VolumeKey] = ("", "")
"""All volumes without days of their own: pods' that have no PVC, and the smallest ones."""

_ONE: Final = 0x3F800000
"""1.0 as a 32-bit float. Source: IEEE 754, binary32: 8 bits of exponent, 23 of mantissa."""

_LOST_BITS: Final = 13
"""Of the mantissa: 10 remain, so that a number is right to half a thousandth."""

_MOST: Final = 2.0**62
_NEW, _SIZE, _SECONDS = range(3)


@dataclass(frozen=True, slots=True)
class EndedBackup:
    """A complete backup; `claim` is its PVC in `namespace`, "" if it has none. `new_bytes` is None if not known."""

    uid: str
    namespace: str
    claim: str
    completed: datetime
    total_bytes: int
    new_bytes: int | None = None
    seconds: float = 0.0

    @property
    def day(self) -> int:
        """The day in UTC, as `date.toordinal` counts."""
        return to_utc(self.completed).toordinal()


class HistoryDay(WireModel):
    """One day in UTC: what its backups had new, the size of the files in the newest one, how long they took together.

    None: there was no backup, or it does not say what was new.
    """

    day: date
    new_bytes: float | None = None
    total_bytes: float | None = None
    seconds: float | None = None


def block_of(day: int) -> int:
    """Return the number of the block of a day."""
    return day // _BLOCK_DAYS


def name_of_block(block: int) -> str:
    """Return the name of the ConfigMap of a block; one that is no longer shown has the same."""
    return HISTORY_CONFIGMAPS[block % len(HISTORY_CONFIGMAPS)]


class _Head(WireModel):
    """The first line of an unpacked block; `marks` are by day."""

    version: int
    block: int
    volumes: list[VolumeKey] = msgspec.field(default_factory=list)
    marks: dict[int, str] = msgspec.field(default_factory=dict)


@dataclass
class _Block:
    """The days of one ConfigMap. Numbers of a volume: 30 of what was new, 30 sizes, 30 durations; see `_encode`.

    `marks` tell which backups of a day were counted already. A day without marks, but with numbers, has passed: what
    was not counted by then never is.
    """

    number: int
    volumes: dict[VolumeKey, "array[int]"] = field(default_factory=dict)
    marks: dict[int, set[bytes]] = field(default_factory=dict)

    @classmethod
    def unpack(cls, data: bytes) -> "_Block":
        """Return the block in the ConfigMap; ContractError: it cannot be read."""
        width = struct.calcsize(_NUMBERS)
        with Translated((zlib.error, ValueError, RecursionError), ContractError, "history cannot be read"):
            text, _, numbers = zlib.decompressobj().decompress(data, _MOST_UNPACKED).partition(b"\n")
            head = msgspec.json.decode(text, type=_Head)
            if head.version != _VERSION or len(numbers) != width * len(head.volumes):
                raise ContractError(f"history of version {head.version} with {len(numbers)} bytes")
            marks = {day: _split(base64.b64decode(joined)) for day, joined in head.marks.items()}
        rows = struct.iter_unpack(_NUMBERS, numbers)
        return cls(head.block, {key: array("H", row) for key, row in zip(head.volumes, rows, strict=True)}, marks)

    def pack(self, most_bytes: int) -> bytes:
        """Return the content of the ConfigMap, within its limit: the smallest volumes become part of the rest."""
        while len(data := self._pack()) > most_bytes:
            named = sorted(
                self.volumes.keys() - {_REST}, key=lambda key: max(self.volumes[key][_BLOCK_DAYS:-_BLOCK_DAYS])
            )
            if not named:
                break
            for key in named[: max(1, len(named) - len(named) * most_bytes // len(data))]:
                self._fold(key)
        return data

    def _pack(self) -> bytes:
        marks = {day: base64.b64encode(b"".join(sorted(each))).decode() for day, each in self.marks.items()}
        head = _Head(version=_VERSION, block=self.number, volumes=list(self.volumes), marks=marks)
        numbers = b"".join(struct.pack(_NUMBERS, *each) for each in self.volumes.values())
        return zlib.compress(msgspec.json.encode(head) + b"\n" + numbers, 9)

    def _fold(self, key: VolumeKey) -> None:
        rest = self.volumes.setdefault(_REST, array("H", bytes(struct.calcsize(_NUMBERS))))
        for n, code in enumerate(self.volumes.pop(key)):
            if code:
                rest[n] = _encode((_decode(rest[n]) or 0.0) + (_decode(code) or 0.0))

    def add(self, backup: EndedBackup) -> bool:
        """Add a backup that was not counted yet; return whether it was."""
        day, mark = backup.day, hashlib.blake2b(backup.uid.encode(), digest_size=_MARK_BYTES).digest()
        marks = self.marks.setdefault(day, set())
        if mark in marks or len(marks) >= _MOST_MARKS:
            return False
        marks.add(mark)
        key = (backup.namespace, backup.claim) if backup.claim else _REST
        row = self.volumes.setdefault(key, array("H", bytes(struct.calcsize(_NUMBERS))))
        n = day % _BLOCK_DAYS
        sums = {_SECONDS: backup.seconds} | ({_NEW: backup.new_bytes} if backup.new_bytes is not None else {})
        if key == _REST:
            sums[_SIZE] = backup.total_bytes
        else:
            row[n + _SIZE * _BLOCK_DAYS] = _encode(backup.total_bytes)
        for what, more in sums.items():
            place = n + what * _BLOCK_DAYS
            row[place] = _encode((_decode(row[place]) or 0.0) + more)
        return True

    @property
    def passed(self) -> frozenset[int]:
        """The days with numbers to which nothing is added any more."""
        first, rows = self.number * _BLOCK_DAYS, self.volumes.values()
        unmarked = (day for day in range(first, first + _BLOCK_DAYS) if day not in self.marks)
        return frozenset(day for day in unmarked if any(row[day % _BLOCK_DAYS + _BLOCK_DAYS] for row in rows))


_NUMBERS: Final = f"<{3 * _BLOCK_DAYS}H"


def content_of(stored: ConfigObject | None) -> bytes | None:
    """Return what is in a ConfigMap; None: nothing, or no data."""
    data = (stored.get("binaryData") or {}) if stored is not None else {}
    try:
        return base64.b64decode(data[HISTORY_KEY])
    except (KeyError, ValueError):
        return None


def count_volumes(*contents: bytes) -> int:
    """Return about how many volumes are in ConfigMaps: work on many is done in a thread."""
    return sum(map(len, contents)) // _BYTES_PER_VOLUME


def merge_history(
    stored: bytes | None, block: int, backups: Iterable[EndedBackup], today: int, *, most_bytes: int = _MOST_BYTES
) -> bytes | None:
    """Return the content of a ConfigMap after backups of its block; None: nothing changes.

    A backup is added once. Marks stay for today and yesterday, so that a backup is counted also if its transfer is
    deleted, and another leader does not count it again. What is `stored` may be of another block, or unreadable: then
    the content begins again. `backups` are complete ones of its days, by the time of their end, and `today` is the day
    in UTC, as `date.toordinal` counts.
    """
    days = _Block(block)
    try:
        before = _Block.unpack(stored) if stored is not None else days
    except ContractError:
        before = days
    days = before if before.number == block else days
    passed = days.passed
    # Each is added: also on a day with marks that has passed, since no leader has seen it then.
    added = [days.add(one) for one in backups if one.day not in passed and one.day <= today + 1]
    if not any(added):
        return None
    days.marks = {day: marks for day, marks in days.marks.items() if day >= today - 1}
    return days.pack(most_bytes)


class VolumeHistory:
    """The days that are shown, the oldest first."""

    def __init__(self, contents: Iterable[bytes], today: int) -> None:
        """Take over what is in the ConfigMaps; a block that cannot be read is a gap. `today` as in `merge_history`."""
        self._days = range(today - HISTORY_DAYS + 1, today + 1)
        self._blocks: dict[int, _Block] = {}
        for data in contents:
            try:
                block = _Block.unpack(data)
            except ContractError:
                continue
            self._blocks[block.number] = block
        self.every = tuple(_sum_day(day, self._rows(day).values()) for day in self._days)

    def of(self, key: VolumeKey) -> tuple[HistoryDay, ...]:
        """Return the days of one PVC; all are gaps if it has none of its own."""
        return tuple(_sum_day(day, [row] if (row := self._rows(day).get(key)) else []) for day in self._days)

    def _rows(self, day: int) -> Mapping[VolumeKey, "array[int]"]:
        block = self._blocks.get(block_of(day))
        return block.volumes if block is not None else {}


def _sum_day(day: int, rows: Collection["array[int]"]) -> HistoryDay:
    new, size, seconds = (
        sum_known(_decode(row[day % _BLOCK_DAYS + what * _BLOCK_DAYS]) for row in rows)
        for what in (_NEW, _SIZE, _SECONDS)
    )
    return HistoryDay(day=date.fromordinal(day), new_bytes=new, total_bytes=size, seconds=seconds)


def sum_known(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of those that are known; None: none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _split(joined: bytes) -> set[bytes]:
    return {joined[n : n + _MARK_BYTES] for n in range(0, len(joined), _MARK_BYTES)}


def _encode(value: float) -> int:
    """Return a number from 0 to 2**62 in 16 bits, right to half a thousandth; 0 stands for what is not known."""
    (bits,) = struct.unpack("<I", struct.pack("<f", min(max(value, 0.0), _MOST) + 1.0))
    return int(bits - _ONE + (1 << _LOST_BITS - 1) >> _LOST_BITS) + 1


@cache
def _decode(code: int) -> float | None:
    """Return what `_encode` was given, rounded; None: not known."""
    if code == 0:
        return None
    (value,) = struct.unpack("<f", struct.pack("<I", (code - 1 << _LOST_BITS) + _ONE))
    return float(value) - 1.0
