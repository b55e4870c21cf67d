"""The phases of one transfer as a picture: where each begins and ends on a line. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from client.status.describe import TransferDetails
from core.models.phases import Phase

__all__ = ["WIDTH", "Mark", "Segment", "Timeline", "build_timeline"]

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

    The clocks of nodes are not that of the API server: what ends before it begins has no width.
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
