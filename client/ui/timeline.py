"""The phases of one transfer as a picture: where each begins and ends on a line. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from client.status.describe import TransferDetails
from client.status.records import TransferRecord
from core.models.phases import Phase

__all__ = ["WIDTH", "Growth", "GrowthDay", "Mark", "Segment", "Timeline", "build_timeline", "sum_growth"]


WIDTH: Final = 1000.0
"""Of the whole line."""


@dataclass(frozen=True)
class Segment:
    """A stretch of the line: what the transfer did, from `start` so many units wide, and for how many seconds."""

    name: str
    start: float
    width: float
    seconds: float


@dataclass(frozen=True)
class Mark:
    """A moment on the line."""

    name: str
    at: float


@dataclass(frozen=True)
class Timeline:
    """A line of `WIDTH` units from the creation of the transfer to its end, or to now."""

    segments: list[Segment]
    marks: list[Mark]
    seconds: float

    @property
    def description(self) -> str:
        """What the picture shows, for those who do not see it."""
        parts = [f"{one.name} for {one.seconds:.0f} s" for one in self.segments]
        return ", then ".join(parts) + "".join(f"; {one.name}" for one in self.marks)


def build_timeline(one: TransferDetails, now: datetime) -> Timeline | None:
    """Return the picture; None if it is not known when the transfer was created.

    A node's clock may differ from the API server's: what ends before it begins has no width.
    """
    if not one.created:
        return None
    created = datetime.fromisoformat(one.created)
    end = max(one.completed or now, created)
    whole = max((end - created).total_seconds(), 1e-3)

    def place(moment: datetime) -> float:
        return min(max((moment - created).total_seconds() / whole, 0.0), 1.0) * WIDTH

    started = next((moment.at for moment in one.history if moment.what == Phase.IN_PROGRESS), one.began)
    borders = [("pending", created), ("preparing", one.accepted), ("moving", started)]
    known = [(name, place(moment)) for name, moment in borders if moment is not None]
    marks = [Mark(f"interrupted: {end.cause}", place(end.at)) for end in one.interruptions]
    return Timeline(list(_segments(known, whole)), marks, whole)


def _segments(borders: list[tuple[str, float]], seconds: float) -> Iterable[Segment]:
    ends = [start for _, start in borders[1:]] + [WIDTH]
    for (name, start), end in zip(borders, ends, strict=True):
        width = max(0.0, end - start)
        yield Segment(name, start, width, seconds * width / WIDTH)


_DAYS: Final = 366


@dataclass(frozen=True)
class GrowthDay:
    """One day in UTC: how many backups were completed, the size of their files, and what was new of it, in bytes.

    None: no backup of the day says what was new.
    """

    day: str
    moment: int
    backups: int
    total_bytes: int
    new_bytes: int | None


@dataclass(frozen=True)
class Growth:
    """The days with completed backups, the oldest first; at most a year of them."""

    days: list[GrowthDay]

    @property
    def backups(self) -> int:
        """How many backups there were."""
        return sum(day.backups for day in self.days)

    @property
    def total_bytes(self) -> int:
        """The size of the files of all of these backups."""
        return sum(day.total_bytes for day in self.days)

    @property
    def new_bytes(self) -> int | None:
        """What was not in the repository before; None: not known."""
        return _sum_known(day.new_bytes for day in self.days)

    @property
    def deduplication(self) -> float | None:
        """How many times more was backed up than was new; None: not known."""
        return self.total_bytes / self.new_bytes if self.new_bytes else None


def sum_growth(transfers: Iterable[TransferRecord], namespace: str, location: str) -> Growth:
    """Return what the completed backups of this volume namespace in this location have added, by day."""
    by_day: dict[str, list[TransferRecord]] = {}
    for one in transfers:
        if not one.is_backup or one.phase is not Phase.COMPLETED or one.completed is None:
            continue
        if (one.queue, one.location) == (namespace, location):
            by_day.setdefault(f"{one.completed:%Y-%m-%d}", []).append(one)
    return Growth([_sum(day, found) for day, found in sorted(by_day.items())[-_DAYS:]])


def _sum(day: str, found: list[TransferRecord]) -> GrowthDay:
    moment = int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())
    new_bytes = _sum_known(one.new_bytes for one in found)
    return GrowthDay(day, moment, len(found), sum(one.total_bytes for one in found), new_bytes)


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None
