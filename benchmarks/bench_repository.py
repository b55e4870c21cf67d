"""`python -m benchmarks.bench_repository`: what maintenance of repositories costs, and what it achieves.

Knows the sizes, and what runs beside what. Does not know targets: the report does.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.figures import describe_machine
from benchmarks.processes import BenchmarkError
from benchmarks.repository.backups import Shape
from benchmarks.repository.bucket import Bucket
from benchmarks.repository.clock import SimulatedClock, kopia_following
from benchmarks.repository.leaders import LeaderPlan, count_jobs
from benchmarks.repository.months import Months, MonthsPlan, run_months
from benchmarks.repository.neglected import NeglectedPlan, run_neglected
from benchmarks.repository.report import Report
from benchmarks.stages import Stages
from core.clock import SystemClock
from tests.datamover.support.s3proxy import run_s3_proxy
from tests.datamover.support.s3server import run_s3_server
from tests.support.tools import tool

__all__ = ["main"]


_PAST: Final = timedelta(days=200)
"""All simulated time is before the machine's: the product's kopia opens the repository, too."""

_NICE: Final = 10

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a directory with a random name is created in it


@dataclass(frozen=True)
class _Plan:
    """The sizes of all parts."""

    neglected: NeglectedPlan
    leaders: LeaderPlan
    months: MonthsPlan


_FULL: Final = _Plan(
    NeglectedPlan(volumes=40, days=50, shape=Shape(4, 1, 16_384), base_files=3840, openings=(1, 3)),
    LeaderPlan(repositories=200, idle=190, settle_days=4, days=7),
    MonthsPlan(days=90, kept_days=7, shape=Shape(1, 8, 262_144), base_files=100, frequency=timedelta(hours=6)),
)
_QUICK: Final = _Plan(
    NeglectedPlan(volumes=2, days=3, shape=Shape(2, 1, 16_384), base_files=10, openings=(1, 1), latency_seconds=0.001),
    LeaderPlan(repositories=4, idle=3, settle_days=4, days=7),
    MonthsPlan(days=3, kept_days=1, shape=Shape(1, 1, 1000), base_files=1, frequency=timedelta(hours=12)),
)


@asynccontextmanager
async def _bucket(name: str, folder: Path, *, kopia: Path | None = None) -> AsyncIterator[Bucket]:
    """Yield a new repository with a clock of its own; by default the test build creates it, whose keys cost less."""
    here = folder / name
    (here / "s3").mkdir(parents=True)
    clock = SimulatedClock(-_PAST)
    with (
        run_s3_server(here / "s3") as s3,
        run_s3_proxy(s3) as proxy,
        kopia_following(clock, here / "bin") as following,
    ):
        proxy.clock = clock
        bucket = Bucket(name, here, proxy, clock, following)
        await bucket.initialize(kopia or following)
        yield bucket


async def _measure_months(plan: MonthsPlan, folder: Path) -> Months:
    async with _bucket("months", folder) as bucket:
        return await run_months(plan, bucket)


def _run_months(plan: MonthsPlan, folder: Path) -> Months:
    return asyncio.run(_measure_months(plan, folder))


async def _measure(plan: _Plan, folder: Path, stages: Stages) -> Report:
    """Measure one repository, while the parts whose figures are no times run beside it with less priority."""
    kopia = tool("kopia", "kopia").parent
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=os.nice, initargs=(_NICE,)) as pool:
        counts = loop.run_in_executor(pool, count_jobs, plan.leaders)
        months = loop.run_in_executor(pool, _run_months, plan.months, folder)
        async with _bucket("neglected", folder, kopia=kopia) as bucket:
            neglected = await run_neglected(plan.neglected, bucket, kopia, stages)
        stages.say("the other parts")
        with stages.stage("waiting for the other parts"):
            return Report(neglected, await counts, await months)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_repository", description="The maintenance of repositories.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the benchmark work?")
    parser.add_argument("--folder", type=Path, default=_MEMORY, help="for buckets and caches (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    arguments = _parse()
    stages = Stages(SystemClock())
    try:
        for name in ("kopia", "kopia-testing", "backups"):
            tool("kopia", name)
        tool("versitygw", "versitygw")
        with tempfile.TemporaryDirectory(prefix="bench-repository-", dir=arguments.folder) as folder:
            report = asyncio.run(_measure(_QUICK if arguments.quick else _FULL, Path(folder), stages))
    except BenchmarkError as e:
        stages.say(str(e))
        return 1
    table = [f"{describe_machine()}; {stages.seconds:.0f} s in all: {stages.line()}", "", *report.lines()]
    missed = [] if arguments.quick else report.missed()
    for name in missed:
        stages.say(f"target missed: {name}")
    sys.stdout.writelines(f"{line}\n" for line in [*table, report.last_line()])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
