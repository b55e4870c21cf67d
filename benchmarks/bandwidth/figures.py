"""What the benchmark of the bandwidth shows: a table for people, one line of JSON for programs.

Knows the names of the figures. Does not know how anything was measured.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from benchmarks.bandwidth.course import Course
from benchmarks.processes import Measured

__all__ = ["BandwidthFigures", "Limited"]

_MB = 1e6


@dataclass(frozen=True)
class Limited:
    """A transfer with a limit in bytes per second, and shares of that.

    `mean` and `least` are of the windows since it passed data, `most` of all since it began; so is `worst_second`.
    """

    name: str
    limit: int
    mean: float
    least: float
    most: float
    worst_second: float

    @classmethod
    def of(cls, name: str, limit: int, course: Course, passing_at: float, window_seconds: float) -> "Limited":
        """Return the figures of a course that goes on for at least a window after it passed data."""
        passing = [rate / limit for rate in course.since(passing_at).rates(window_seconds)]
        most, worst = (max(course.rates(seconds)) / limit for seconds in (window_seconds, 1.0))
        return cls(name, limit, fmean(passing), min(passing), most, worst)

    @property
    def key(self) -> str:
        """The name in the last line."""
        return f"{self.name}_{self.limit / _MB:g}".replace(" ", "_")


@dataclass
class BandwidthFigures:
    """All runs; `pairs` have the proxy without limits first, then no proxy; `edit_seconds` are of each edit."""

    window_seconds: float
    limited: list[Limited] = field(default_factory=list)
    pairs: list[tuple[Measured, Measured]] = field(default_factory=list)
    edit_seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return the last line's object."""
        found: dict[str, float] = {}
        for one in self.limited:
            found |= {f"{one.key}_mean": round(one.mean, 3), f"{one.key}_least": round(one.least, 3)}
            found |= {f"{one.key}_most": round(one.most, 3), f"{one.key}_worst_second": round(one.worst_second, 2)}
        proxies, nones = ([pair[number] for pair in self.pairs] for number in range(2))
        return {
            **found,
            "unlimited_time_ratio": round(median(one.seconds / other.seconds for one, other in self.pairs), 3),
            "unlimited_cpu_ratio": round(median(one.cpu_seconds / other.cpu_seconds for one, other in self.pairs), 3),
            "unlimited_mover_mib": round(_own(proxies) - _own(nones), 1),
            "unlimited_all_mib": round(_together(proxies) - _together(nones), 1),
            "edit_seconds": round(max(self.edit_seconds), 2),
        }

    def lines(self) -> Iterator[str]:
        """Yield the tables."""
        yield f"| limited | MB/s | mean of {self.window_seconds:g} s | least | most | most in a second |"
        yield "| --- |" + " --- |" * 5
        for one in self.limited:
            shares = f"{one.mean:.3f} | {one.least:.3f} | {one.most:.3f} | {one.worst_second:.2f}"
            yield f"| {one.name} | {one.limit / _MB:g} | {shares} |"
        yield ""
        yield "| not limited | seconds: median | least | most | CPU seconds: median | mover's MiB | with kopia's |"
        yield "| --- |" + " --- |" * 6
        for number, name in enumerate(("`bandwidth` without limits", "no `bandwidth`")):
            runs = [pair[number] for pair in self.pairs]
            seconds = [run.seconds for run in runs]
            cpu = median(run.cpu_seconds for run in runs)
            times = f"{median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {cpu:.2f}"
            yield f"| upload, {name} | {times} | {_own(runs):.1f} | {_together(runs):.1f} |"
        yield ""
        yield f"Edits of a running mover's limit took {' and '.join(f'{one:.2f}' for one in self.edit_seconds)} s."

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())


def _own(runs: Sequence[Measured]) -> float:
    return median(run.own_mib for run in runs)


def _together(runs: Sequence[Measured]) -> float:
    return median(run.together_mib for run in runs)
