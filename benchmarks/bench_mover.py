"""`python -m benchmarks.bench_mover`: the cost of the data mover compared with kopia alone, on one machine.

Knows its arguments, and what it prints. Does not know which runs
there are, nor targets: the reader of the last line does.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from benchmarks.alone import Report, run_alone
from benchmarks.cluster import RUN, Cluster, leave_service_account, run_cluster
from benchmarks.disks import memory_at
from benchmarks.figures import ConfinementFigures, Figures, ManyFigures, ParallelFigures, describe_machine
from benchmarks.latency.figures import FarFigures
from benchmarks.latency.runs import FULL as FAR
from benchmarks.latency.runs import QUICK as FAR_QUICK
from benchmarks.latency.runs import FarBenchmark, FarPlan
from benchmarks.runs import FULL, QUICK, Benchmark, Plan
from benchmarks.stages import Stages
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.testbed.pki import Authority

__all__ = ["main"]


class _What(StrEnum):
    """What is measured: the whole mover, or what an option names."""

    MOVER = "mover"
    CONFINEMENT = "confinement"
    LATENCY = "latency"
    MANY = "many"
    PARALLEL = "parallel"


_AnyFigures = Figures | ConfinementFigures | ManyFigures | ParallelFigures


_Found = TypeVar("_Found")


async def _measure(folder: Path, run: Callable[[S3Server, Cluster], Coroutine[None, None, _Found]]) -> _Found:
    """Return what `run` returns for a bucket in memory and a cluster."""
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets) as s3:
        leave_service_account(authority)
        async with run_cluster(folder / "cluster", authority) as cluster:
            cluster.put_location(s3)
            return await run(s3, cluster)


def _table(plan: Plan, figures: _AnyFigures, stages: Stages) -> list[str]:
    """Return the lines that describe the run."""
    disks = "ext4 in a file of its own" if figures.own_disks else "a folder"
    match figures:
        case ManyFigures():
            tree, pairs = plan.very_many_files, ""
        case ConfinementFigures():
            tree, pairs = plan.confined_tree, _pairs(figures.pairs, plan.confined_pairs)
        case Figures() | ParallelFigures():
            tree, pairs = plan.tree, _pairs(figures.pairs, plan.pairs)
    moved = f"{tree.total_bytes / 1e9:.2f} GB in {tree.large_files} large and {tree.small_files:,} small files"
    return [
        f"Machine: {describe_machine()}. Tree: {moved}. Targets and caches: {disks}, on the disk.",
        f"{pairs}{stages.seconds:.0f} s in all: {stages.line()}.",
        "",
        *figures.lines(),
    ]


def _pairs(run: int, wanted: int) -> str:
    asked = "" if run == wanted else " (there was no time for more)"
    return f"{run} of {wanted} pairs{asked}, "


def _report(arguments: argparse.Namespace, folder: Path, stages: Stages) -> Report:
    if arguments.what is _What.LATENCY:
        return _report_latency(FAR_QUICK if arguments.quick else FAR, folder, stages)
    plan = QUICK if arguments.quick else FULL

    async def run(s3: S3Server, cluster: Cluster) -> _AnyFigures:
        benchmark = Benchmark(plan, folder, s3, cluster, stages)
        runs: dict[_What, Callable[[], Awaitable[_AnyFigures]]] = {
            _What.MOVER: benchmark.run,
            _What.CONFINEMENT: benchmark.run_confined,
            _What.MANY: benchmark.run_many,
            _What.PARALLEL: benchmark.run_parallel,
        }
        return await runs[arguments.what]()

    figures = asyncio.run(_measure(folder, run))
    return Report(_table(plan, figures, stages), json.dumps(figures.summary()))


def _report_latency(plan: FarPlan, folder: Path, stages: Stages) -> Report:
    async def run(s3: S3Server, cluster: Cluster) -> FarFigures:
        return await FarBenchmark(plan, folder, s3, cluster, stages).run_far()

    figures, volume = asyncio.run(_measure(folder, run)), plan.files.small_files // plan.volumes
    tree = f"Tree: {plan.tree.small_files:,} files of {plan.tree.small_bytes:,} bytes"
    many = f"Many snapshots: {plan.volumes}, of volumes with {volume:,} files of {plan.files.small_bytes:,} bytes each"
    lines = [
        f"Machine: {describe_machine()}. Round trip: {plan.seconds * 1000:.0f} ms. {tree}. {many}.",
        f"{plan.rounds} rounds, {stages.seconds:.0f} s in all: {stages.line()}.",
    ]
    return Report([*lines, "", *figures.lines()], json.dumps(figures.summary()))


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_mover", description="The cost of the data mover, and of kopia alone.")
    parser.add_argument("--quick", action="store_true", help="tiny trees, one pair: does the benchmark work?")
    only = parser.add_mutually_exclusive_group()
    for what, text in (
        (_What.CONFINEMENT, "compare movers with kopia confined and without"),
        (_What.LATENCY, "compare with kopia's best settings for a far storage"),
        (_What.MANY, "millions of tiny files within a memory limit"),
        (_What.PARALLEL, "compare numbers of files that are uploaded in parallel"),
    ):
        only.add_argument(f"--{what}", action="store_const", dest="what", const=what, default=_What.MOVER, help=text)
    return run_alone(parser, _report)


if __name__ == "__main__":
    sys.exit(main())
