"""All runs of the mover with limits and without, in their order.

Knows what is limited to which rate, and for how long. Does not know how anything is counted or shown.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.bandwidth.bed import BandwidthBed
from benchmarks.bandwidth.counters import directory_bytes, sampled
from benchmarks.bandwidth.course import Course
from benchmarks.bandwidth.figures import BandwidthFigures, Limited
from benchmarks.disks import memory_at
from benchmarks.processes import BenchmarkError
from benchmarks.tree import TreeShape, make_tree
from core.models.bandwidth import BandwidthLimits

__all__ = ["FULL", "QUICK", "BandwidthPlan", "run_all"]

_MORE_SECONDS: Final = 3.0
"""Measured beyond one window: so many moments begin one."""

_EDIT_WINDOW_SECONDS: Final = 0.5
_EDIT_LIMIT_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_EDIT_FACTOR: Final = 3


@dataclass(frozen=True)
class BandwidthPlan:
    """Limits in bytes per second, the trees for uploads with them and for the rest, and how long is measured."""

    tree: TreeShape
    whole_tree: TreeShape
    uploads: tuple[int, ...]
    downloads: tuple[int, ...]
    edited: int
    directory: int
    window_seconds: float
    pairs: int


FULL: Final = BandwidthPlan(
    TreeShape(14, 500_000_000, 0, 0),
    TreeShape(8, 150_000_000, 0, 0),
    uploads=(1_000_000, 10_000_000, 100_000_000),
    downloads=(1_000_000, 10_000_000),
    edited=10_000_000,
    directory=10_000_000,
    window_seconds=60.0,
    pairs=5,
)
QUICK: Final = BandwidthPlan(
    TreeShape(4, 100_000_000, 0, 0),
    TreeShape(1, 60_000_000, 0, 0),
    uploads=(10_000_000,),
    downloads=(5_000_000,),
    edited=5_000_000,
    directory=10_000_000,
    window_seconds=3.0,
    pairs=1,
)


async def run_all(plan: BandwidthPlan, bed: BandwidthBed) -> BandwidthFigures:
    """Measure everything and return the figures.

    Raises:
        BenchmarkError: a mover failed, or ended before it was measured.
    """
    figures = BandwidthFigures(plan.window_seconds)
    with _tree(bed, plan.whole_tree) as tree:
        snapshot_id = await _pairs(plan, bed, tree, figures)
    for rate in plan.downloads:
        figures.limited.append(await _download(plan, bed, rate, snapshot_id))
    with _tree(bed, plan.tree) as tree:
        for rate in plan.uploads:
            figures.limited.append(await _upload(plan, bed, rate, tree))
        figures.edit_seconds += await _edits(plan, bed, tree)
        figures.limited.append(await _directory(plan, bed, tree))
    return figures


@contextmanager
def _tree(bed: BandwidthBed, shape: TreeShape) -> Iterator[Path]:
    with memory_at(bed.folder / "tree") as memory:
        bed.stages.say(f"making a tree of {shape.total_bytes / 1e9:.1f} GB")
        with bed.stages.stage("making trees"):
            tree = make_tree(memory / "tree", shape)
        yield tree


async def _pairs(plan: BandwidthPlan, bed: BandwidthBed, tree: Path, figures: BandwidthFigures) -> str:
    """Run uploads with the proxy and without, alternating; return the last one's snapshot."""
    snapshot_id = ""
    for number in range(plan.pairs):
        bed.stages.say(f"pair {number + 1} of {plan.pairs}")
        runs = {}
        for proxy in (True, False) if number % 2 else (False, True):
            bed.use_bucket(counted=False)
            bed.limit(BandwidthLimits() if proxy else None)
            with bed.stages.stage("uploads without limits"):
                runs[proxy], result = await bed.mover.back_up(tree)
            snapshot_id = result.snapshot_id
        figures.pairs.append((runs[True], runs[False]))
    return snapshot_id


async def _upload(plan: BandwidthPlan, bed: BandwidthBed, rate: int, tree: Path) -> Limited:
    bed.stages.say(f"upload at {rate / 1e6:g} MB/s")
    bed.use_bucket(counted=True)
    bed.limit(BandwidthLimits(upload_bytes_per_second=rate))
    mover = bed.one_transfer
    mover.begin("DataUpload")
    begin = _Begin.of(bed.counters.received, rate)
    with bed.stages.stage("limited uploads"):
        async with mover.run_until(tree, begin.has_passed):
            return await begin.measure("upload", rate, plan.window_seconds)


async def _download(plan: BandwidthPlan, bed: BandwidthBed, rate: int, snapshot_id: str) -> Limited:
    bed.stages.say(f"download at {rate / 1e6:g} MB/s")
    bed.use_line(counted=True)
    bed.limit(BandwidthLimits(download_bytes_per_second=rate))
    mover = bed.one_transfer
    mover.begin("DataDownload", snapshotID=snapshot_id)
    begin = _Begin.of(bed.counters.sent, rate)
    with bed.disks.volume() as target, bed.stages.stage("limited downloads"):
        async with mover.run_until(target, begin.has_passed):
            return await begin.measure("download", rate, plan.window_seconds)


async def _directory(plan: BandwidthPlan, bed: BandwidthBed, tree: Path) -> Limited:
    """Measure kopia's own throttle: what it has written to a directory."""
    rate = plan.directory
    bed.stages.say(f"upload to a directory at {rate / 1e6:g} MB/s")
    directory = await bed.use_directory()
    bed.limit(BandwidthLimits(upload_bytes_per_second=rate))
    mover, course = bed.one_transfer, Course()
    mover.begin("DataUpload")
    async with sampled(lambda: course.add(time.monotonic(), directory_bytes(directory))):
        begin = _Begin.of(course, rate)
        with bed.stages.stage("limited uploads to a directory"):
            async with mover.run_until(tree, begin.has_passed):
                return await begin.measure("directory", rate, plan.window_seconds)


async def _edits(plan: BandwidthPlan, bed: BandwidthBed, tree: Path) -> list[float]:
    """Return how long a higher limit takes to act on a running mover, and then the lower one."""
    low, high = plan.edited, plan.edited * _EDIT_FACTOR
    bed.stages.say(f"edits from {low / 1e6:g} MB/s to {high / 1e6:g} and back")
    bed.use_bucket(counted=True)
    bed.limit(BandwidthLimits(upload_bytes_per_second=low))
    mover, course = bed.one_transfer, bed.counters.received
    mover.begin("DataUpload")
    between, took = math.sqrt(low * high), []
    with bed.stages.stage("edits"):
        async with mover.run_until(tree, _Begin.of(course, low * 4).has_passed):
            for rate in (high, low):
                bed.limit(BandwidthLimits(upload_bytes_per_second=rate))
                began = time.monotonic()
                mover.begin("DataUpload")
                while (course.last_rate(_EDIT_WINDOW_SECONDS) > between) is not (rate > between):
                    if time.monotonic() - began > _EDIT_LIMIT_SECONDS:
                        raise BenchmarkError(f"a limit of {rate / 1e6:g} MB/s has no effect on a running mover")
                    await asyncio.sleep(_POLL_SECONDS)
                took.append(time.monotonic() - began)
    return took


@dataclass(frozen=True)
class _Begin:
    """When a transfer begins, and the total in bytes at which its data passes: the first is not limited by a rate."""

    course: Course
    at: float
    total: int

    @classmethod
    def of(cls, course: Course, rate: int) -> "_Begin":
        """Return the one of a transfer that begins now."""
        return cls(course, time.monotonic(), course.total + rate // 2)

    def has_passed(self) -> bool:
        """Return whether data passes."""
        return self.course.total >= self.total

    async def measure(self, name: str, rate: int, window_seconds: float) -> Limited:
        """Measure from now on, as data passes, for a little longer than a window."""
        passing_at = time.monotonic()
        await asyncio.sleep(window_seconds + _MORE_SECONDS)
        return Limited.of(name, rate, self.course.since(self.at), passing_at, window_seconds)
