"""What the benchmark of maintenance reports: a table for people, one line of JSON, and which targets are missed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.repository.leaders import JobCounts
from benchmarks.repository.months import Months, levels_off
from benchmarks.repository.neglected import Neglected

__all__ = ["Report"]

_MB: Final = 1e6
_OPEN_RATIO: Final = 0.3
_PEAK_MIB: Final = 512
_RECLAIMED: Final = 0.9
_IDLE_JOBS: Final = 0.2


@dataclass(frozen=True)
class Report:
    """All results."""

    neglected: Neglected
    counts: JobCounts
    months: Months

    def summary(self) -> dict[str, float | bool]:
        """Return the last line's object."""
        before, after = self.neglected.open_s
        return {
            "open_s_before": round(before, 2),
            "open_s_after": round(after, 2),
            "full_s": max(job.seconds for job in self.neglected.fulls),
            "peak_mib": round(self.neglected.peak_mib, 1),
            "reclaimed_share": round(self.neglected.reclaimed[-1], 3),
            "jobs_per_idle_repository_per_day": round(self.counts.jobs_per_idle_repository_per_day, 3),
            "duplicates": self.counts.duplicates,
            "months_level_off": levels_off(self.months.samples),
        }

    def missed(self) -> list[str]:
        """Return the figures that miss their target."""
        figures = self.summary()
        met = {
            "open_s_after": figures["open_s_after"] <= _OPEN_RATIO * figures["open_s_before"],
            "peak_mib": figures["peak_mib"] <= _PEAK_MIB,
            "reclaimed_share": figures["reclaimed_share"] >= _RECLAIMED,
            "jobs_per_idle_repository_per_day": figures["jobs_per_idle_repository_per_day"] <= _IDLE_JOBS,
            "duplicates": not figures["duplicates"],
            "months_level_off": bool(figures["months_level_off"]),
        }
        return [name for name, good in met.items() if not good]

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        yield "| part | what | figure |"
        yield "| --- | --- | --- |"
        for part, rows in (
            ("one repository", self._neglected()),
            ("many repositories", self._counts()),
            ("months", self._months()),
        ):
            for what, figure in rows:
                yield f"| {part} | {what} | {figure} |"

    def _neglected(self) -> Iterator[tuple[str, str]]:
        seen = self.neglected
        yield "snapshots, index blobs in the bucket", f"{seen.snapshots:,}, {seen.index_blobs:,}"
        yield "seconds to open it, before", _numbers(seen.opened_before, ".1f")
        yield "seconds to open it, after", _numbers(seen.opened_after, ".1f")
        yield "seconds of each full run", _numbers([job.seconds for job in seen.fulls], ".0f")
        yield "contents, peak memory of kopia in MiB", f"{seen.fulls[0].contents:,}, {seen.peak_mib:.0f}"
        yield "index blobs that are read, after each Job", _numbers([job.index_blobs or 0 for job in seen.jobs], ",")
        yield "MB that only deleted snapshots held", f"{seen.held_bytes / _MB:,.0f}"
        yield "share of them that is free, after each full run", _numbers(seen.reclaimed, ".2f")
        yield "MB of the bucket, before and after each full run", _numbers([one / _MB for one in seen.sizes], ",.0f")

    def _counts(self) -> Iterator[tuple[str, str]]:
        counts = self.counts
        yield "Jobs per idle repository and day", f"{counts.jobs_per_idle_repository_per_day:.3f}"
        yield "Jobs per busy repository and day", f"{counts.jobs_per_busy_repository_per_day:.1f}"
        yield "Jobs; leaders; duplicates", f"{counts.jobs:,}; {counts.leaders}; {counts.duplicates}"

    def _months(self) -> Iterator[tuple[str, str]]:
        samples = self.months.samples
        third = max(1, len(samples) // 3)
        thirds = [samples[start : start + third] for start in (0, third, 2 * third)]
        yield "days; quick and full runs", f"{len(samples)}; {self.months.quick}, {self.months.full}"
        yield "most MB in each third", _numbers([max(one.bytes for one in part) / _MB for part in thirds], ",.1f")
        read = [max(one.index_blobs for one in part) for part in thirds]
        yield "most index blobs that are read, in each third", _numbers(read, ",")
        kept = [max(one.all_index_blobs for one in part) for part in thirds]
        yield "most index blobs in the bucket, in each third", _numbers(kept, ",")


def _numbers(values: list[float] | list[int], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
