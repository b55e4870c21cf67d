"""A repository that was never maintained: how long it takes to open, and what maintenance makes of it."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.repository.backups import Backups, Shape
from benchmarks.repository.bucket import Bucket
from benchmarks.repository.care import Care
from benchmarks.stages import Stages
from core.contract import MaintenanceMode, MaintenanceResult

__all__ = ["FULLS", "Neglected", "NeglectedPlan", "run_neglected"]

FULLS: Final = 4
"""Full runs after a deletion: the leader starts no more then, if nothing else changes."""

_DAY: Final = timedelta(days=1)
_FREQUENCY: Final = timedelta(hours=1)
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class NeglectedPlan:
    """Daily backups of some volumes; each request that opens or maintains the repository waits for `latency_seconds`.

    The first backup of each volume has `base_files` more files. Half of the volumes are deleted then. `openings` is how
    often it is opened before and after.
    """

    volumes: int
    days: int
    shape: Shape
    base_files: int
    openings: tuple[int, int]
    latency_seconds: float = 0.02

    @property
    def snapshots(self) -> int:
        """How many there are before the deletion."""
        return self.volumes * self.days


@dataclass
class Neglected:
    """What was measured: seconds, bytes, and the results of all Jobs in their order.

    `reclaimed` is the share of what only deleted snapshots held that was no longer in the bucket after each full run.
    """

    snapshots: int = 0
    index_blobs: int = 0
    opened_before: list[float] = field(default_factory=list)
    opened_after: list[float] = field(default_factory=list)
    held_bytes: int = 0
    reclaimed: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    jobs: list[MaintenanceResult] = field(default_factory=list)

    @property
    def fulls(self) -> list[MaintenanceResult]:
        """The full runs."""
        return [job for job in self.jobs if job.mode is MaintenanceMode.FULL]

    @property
    def peak_mib(self) -> float:
        """The highest resident memory of kopia in a Job."""
        return max(job.peak_bytes for job in self.jobs) / _MIB

    @property
    def open_s(self) -> tuple[float, float]:
        """The medians before and after."""
        return median(self.opened_before), median(self.opened_after)


async def run_neglected(plan: NeglectedPlan, bucket: Bucket, kopia: Path, stages: Stages) -> Neglected:
    """Run the plan in an empty repository; `kopia` is the folder of the program that opens it.

    Raises:
        BenchmarkError: something failed.
    """
    async with bucket.backups() as backups:
        return await _Run(plan, bucket, backups, kopia, stages).run()


class _Run:
    """One run of a plan."""

    def __init__(self, plan: NeglectedPlan, bucket: Bucket, backups: Backups, kopia: Path, stages: Stages) -> None:
        self._plan = plan
        self._bucket = bucket
        self._backups = backups
        self._kopia = kopia
        self._stages = stages
        self._volumes = [f"/volume-{number}" for number in range(plan.volumes)]
        self._seen = Neglected()

    async def run(self) -> Neglected:
        """Return what was measured."""
        plan, bucket, seen, stages = self._plan, self._bucket, self._seen, self._stages
        bucket.proxy.latency_seconds = plan.latency_seconds
        with stages.stage("writing backups"):
            snapshots = await self._write()
        seen.snapshots, seen.index_blobs = len(snapshots), bucket.index_blobs
        kept = self._volumes[plan.volumes // 2 :]
        with stages.stage("opening"):
            seen.opened_before = await self._open(kept[0], plan.openings[0])
        care = Care(bucket, _FREQUENCY, apart=True)
        seen.sizes.append(bucket.size_bytes)
        with stages.stage("writing backups"):
            deleted = [one for number, one in enumerate(snapshots) if number % plan.volumes < plan.volumes // 2]
            seen.held_bytes = await self._backups.delete_tracking(deleted)
        care.changes += 1
        while len(seen.fulls) < FULLS:
            await self._run_day(care, kept)
        with stages.stage("opening"):
            seen.opened_after = await self._open(kept[0], plan.openings[1])
        return seen

    async def _write(self) -> list[str]:
        """Write all backups, day after day, and return their IDs, those of a day in the order of the volumes."""
        written: list[str] = []
        for day in range(self._plan.days):
            base_files = 0 if day else self._plan.base_files
            written += await self._backups.back_up(self._plan.shape, self._volumes, base_files=base_files)
            self._bucket.clock.move_to(self._bucket.clock.now() + _DAY)
        return written

    async def _run_day(self, care: Care, volumes: Sequence[str]) -> None:
        """Maintain the repository for a day, until the last full run; then back the volumes up."""
        bucket, seen = self._bucket, self._seen
        with self._stages.stage("maintenance"):
            async with aclosing(care.until(bucket.clock.now() + _DAY)) as results:
                async for result in results:
                    await self._take(result)
                    if len(seen.fulls) == FULLS:
                        break
        with self._stages.stage("writing backups"):
            await self._backups.back_up(self._plan.shape, volumes)
        care.changes += 1

    async def _take(self, result: MaintenanceResult) -> None:
        """Note the result of a Job, and what a full run has left in the bucket."""
        seen = self._seen
        seen.jobs.append(result)
        self._stages.say(
            f"{result.mode} maintenance: {result.seconds} s, {result.peak_bytes / _MIB:.0f} MiB, "
            f"{result.index_blobs} index blobs"
        )
        if result.mode is MaintenanceMode.FULL:
            seen.reclaimed.append(1 - await self._backups.count_stored() / max(1, seen.held_bytes))
            seen.sizes.append(self._bucket.size_bytes)

    async def _open(self, volume: str, times: int) -> list[float]:
        return [await self._bucket.measure_opening(volume, self._kopia) for _ in range(times)]
