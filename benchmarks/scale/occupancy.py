"""How many transfers were pending, prepared and waiting at a time, by everything that was seen.

Knows phases and how long each transfer was in them. Does not know what that costs; pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.history import HELD, RUNNING, Sight

__all__ = ["Occupancy", "measure_occupancy"]

_BOUND: Final = frozenset({"PodVolumeBackup", "PodVolumeRestore"})
"""The kinds whose volume an agent checks while they wait for a slot."""


@dataclass(frozen=True)
class Occupancy:
    """The mean numbers of transfers over `seconds`.

    `pending` are New, `held` Accepted or Prepared, `checked` those of them that are Prepared and of a pod's volume,
    `running` InProgress or Canceling; `known` are all that exist.
    """

    seconds: float
    known: float
    pending: float
    held: float
    checked: float
    running: float


def measure_occupancy(sights: Iterable[Sight], began: float, ended: float) -> Occupancy:
    """Return the means between two times, in Unix time; each stay in a phase is cut at them."""
    courses: dict[str, list[Sight]] = defaultdict(list)
    for sight in sights:
        courses[sight.uid].append(sight)
    stays: dict[str, float] = defaultdict(float)
    for course in courses.values():
        course.sort(key=lambda sight: sight.version)
        ends = [*(sight.seen_at for sight in course[1:]), ended]
        for sight, end in zip(course, ends, strict=True):
            seconds = max(0.0, min(end, ended) - max(sight.seen_at, began))
            for name in () if sight.deleted else _names(sight):
                stays[name] += seconds
    seconds = ended - began
    return Occupancy(seconds, *(stays[name] / seconds for name in ("known", "pending", "held", "checked", "running")))


def _names(sight: Sight) -> Iterable[str]:
    yield "known"
    if sight.phase == "New":
        yield "pending"
    if sight.phase in HELD:
        yield "held"
    if sight.phase == "Prepared" and sight.kind in _BOUND:
        yield "checked"
    if sight.phase in RUNNING:
        yield "running"
