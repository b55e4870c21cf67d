"""What the pages draw: the phases of one transfer on a line, and numbers by day as curves. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from client.status.describe import TransferDetails, find_stages
from client.status.records import TransferRecord
from client.text import MOST_SECONDS, format_bytes
from core.models.phases import Phase
from core.text import format_age
from nodeagent.coverage.history import HistoryDay, sum_known

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

    marks = [Mark(f"interrupted: {end.cause}", place(end.at)) for end in one.interruptions]
    segments = []
    for stage in find_stages(one, now):
        start, until = place(stage.began), place(stage.ended)
        segments.append(Segment(stage.name, start, until - start, whole * (until - start) / WIDTH))
    return Timeline(segments, marks, whole)


CURVE_HEIGHT: Final = 200.0
"""Of a curve, which is `WIDTH` wide."""


@dataclass(frozen=True)
class Curve:
    """One number of each day as a line, with gaps where there is none; `path` is in the syntax of SVG.

    `most` and `last` are the largest and the newest one as text. Without any number, all three are empty.
    """

    name: str
    description: str
    path: str = ""
    most: str = ""
    last: str = ""


def build_curves(days: Sequence[HistoryDay]) -> list[Curve]:
    """Return the three curves of these days, the oldest first."""
    return [
        _draw("New data", days, [one.new_bytes for one in days], _bytes),
        _draw("Backup size", days, [one.total_bytes for one in days], _bytes),
        _draw("Time that backups took", days, [one.seconds for one in days], _seconds),
    ]


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _seconds(value: float) -> str:
    return format_age(timedelta(seconds=min(value, MOST_SECONDS)))


def _draw(
    name: str, days: Sequence[HistoryDay], values: Sequence[float | None], shown: Callable[[float], str]
) -> Curve:
    known = [(one.day, value) for one, value in zip(days, values, strict=True) if value is not None]
    if not known:
        return Curve(name, f"{name}: nothing is known of the last {len(days)} days.")
    last_day, last = known[-1]
    most_day, most = max(known, key=lambda one: one[1])
    description = (
        f"{name} by day, from {days[0].day} to {days[-1].day}: {len(known)} days have a number. "
        f"The most is {shown(most)} on {most_day}, the last {shown(last)} on {last_day}."
    )
    return Curve(name, description, _path(values, most), shown(most), shown(last))


def _path(values: Sequence[float | None], most: float) -> str:
    """Return a line through neighboring days; a day between two gaps is a point, which a round end makes visible."""
    step, parts, drawing = WIDTH / max(1, len(values) - 1), [], False
    for n, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        place = f"{n * step:.1f} {CURVE_HEIGHT * (1 - value / most if most else 1):.1f}"
        parts.append(f"L{place}" if drawing else f"M{place}h0")
        drawing = True
    return "".join(parts)


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
    """The days with completed backups, the oldest first, at most a year of them; and the sums of their numbers."""

    days: list[GrowthDay]
    backups: int
    total_bytes: int
    new_bytes: int | None

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
    days = [_sum(day, found) for day, found in sorted(by_day.items())[-_DAYS:]]
    backups, total_bytes = sum(one.backups for one in days), sum(one.total_bytes for one in days)
    return Growth(days, backups, total_bytes, sum_known(one.new_bytes for one in days))


def _sum(day: str, found: list[TransferRecord]) -> GrowthDay:
    moment = int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())
    new_bytes = sum_known(one.new_bytes for one in found)
    return GrowthDay(day, moment, len(found), sum(one.total_bytes for one in found), new_bytes)
