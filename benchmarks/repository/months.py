"""Months of hourly backups with deletions in one real repository: does the bucket stop to grow?"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple

from benchmarks.repository.backups import Backups, Shape
from benchmarks.repository.bucket import Bucket
from benchmarks.repository.care import Care

__all__ = ["Months", "MonthsPlan", "Sample", "levels_off", "run_months"]

_GROWTH: Final = 1.1
_MOST_INDEX_BLOBS: Final = 500
"""Ten days of hourly backups, twice: kopia compacts an epoch once two later ones have begun."""

_VOLUME: Final = "/hourly"


@dataclass(frozen=True)
class MonthsPlan:
    """So many days of hourly backups, each deleted after `kept_days`; `frequency` is `maintenanceFrequency`."""

    days: int
    kept_days: int
    shape: Shape
    base_files: int
    frequency: timedelta


class Sample(NamedTuple):
    """A bucket at the end of a day: its bytes, index blobs that are read to open it, and all index blobs."""

    bytes: int
    index_blobs: int
    all_index_blobs: int


@dataclass
class Months:
    """A sample of each day, and how many Jobs ran."""

    samples: list[Sample] = field(default_factory=list)
    quick: int = 0
    full: int = 0


async def run_months(plan: MonthsPlan, bucket: Bucket) -> Months:
    """Run the plan in an empty repository.

    Raises:
        BenchmarkError: a backup or a Job failed.
    """
    async with bucket.backups() as backups:
        return await _Run(plan, bucket, backups).run()


class _Run:
    """One run of a plan."""

    def __init__(self, plan: MonthsPlan, bucket: Bucket, backups: Backups) -> None:
        self._plan = plan
        self._bucket = bucket
        self._backups = backups
        self._care = Care(bucket, plan.frequency)
        self._kept: deque[str] = deque()
        self._months = Months()

    async def run(self) -> Months:
        """Return what was seen."""
        for day in range(self._plan.days):
            for hour in range(24):
                await self._run_hour(base_files=0 if day or hour else self._plan.base_files)
            index_blobs = self._care.record.index_blobs or 0
            self._months.samples.append(Sample(self._bucket.size_bytes, index_blobs, self._bucket.index_blobs))
        return self._months

    async def _run_hour(self, *, base_files: int) -> None:
        plan, care, clock = self._plan, self._care, self._bucket.clock
        end = clock.now() + timedelta(hours=1)
        expired = [self._kept.popleft()] if len(self._kept) >= plan.kept_days * 24 else []
        self._kept += await self._backups.back_up(plan.shape, [_VOLUME], base_files=base_files, expired=expired)
        care.changes += 1
        async for result in care.until(end):
            if result.mode == "full":
                self._months.full += 1
            elif result.mode == "quick":
                self._months.quick += 1


def levels_off(samples: Sequence[Sample]) -> bool:
    """Return whether the last third's maximum is at most 1.1 times that of the third before, in bytes and index blobs.

    Index blobs are those that are read to open it, and must also be few. Others stay in the bucket, one for each epoch:
    kopia deletes no compacted one. Source: kopia 0.23.1, CleanupSupersededIndexes in internal/epoch/epoch_manager.go.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    sizes = max(one.bytes for one in last) <= _GROWTH * max(one.bytes for one in middle)
    most = max(one.index_blobs for one in last)
    return sizes and most <= min(_GROWTH * max(one.index_blobs for one in middle), _MOST_INDEX_BLOBS)
