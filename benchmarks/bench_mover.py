"""`python -m benchmarks.bench_mover`: the cost of the data mover compared with kopia alone, on one machine.

Knows its arguments, and what it prints. Does not know which runs
there are, nor targets: the reader of the last line does.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from benchmarks.alone import Report, run_alone
from benchmarks.cluster import RUN, leave_service_account, run_cluster
from benchmarks.disks import memory_at
from benchmarks.figures import ConfinementFigures, Figures, ManyFigures, describe_machine
from benchmarks.runs import FULL, QUICK, Benchmark, Plan
from benchmarks.stages import Stages
from tests.datamover.support.s3server import run_s3_server
from tests.testbed.pki import Authority

__all__ = ["main"]

_FIGURES: Final = "figures of the data mover"
_CONFINEMENT: Final = "figures of the confinement"
_MANY: Final = "figures of many files"
_AnyFigures = Figures | ConfinementFigures | ManyFigures


async def _measure(plan: Plan, folder: Path, stages: Stages, marks: str) -> _AnyFigures:
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets) as s3:
        leave_service_account(authority)
        async with run_cluster(folder / "cluster", authority) as cluster:
            cluster.put_location(s3)
            benchmark = Benchmark(plan, folder, s3, cluster, stages)
            runs: dict[str, Callable[[], Awaitable[_AnyFigures]]] = {
                _FIGURES: benchmark.run,
                _CONFINEMENT: benchmark.run_confined,
                _MANY: benchmark.run_many,
            }
            return await runs[marks]()


def _table(plan: Plan, figures: _AnyFigures, stages: Stages) -> list[str]:
    """Return the lines that describe the run."""
    disks = "ext4 in a file of its own" if figures.own_disks else "a folder"
    match figures:
        case ManyFigures():
            tree, pairs = plan.very_many_files, ""
        case ConfinementFigures():
            tree, pairs = plan.confined_tree, _pairs(figures.pairs, plan.confined_pairs)
        case Figures():
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


def _find_marks(arguments: argparse.Namespace) -> str:
    if arguments.many:
        return _MANY
    return _CONFINEMENT if arguments.confinement else _FIGURES


def _report(arguments: argparse.Namespace, folder: Path, stages: Stages) -> Report:
    plan = QUICK if arguments.quick else FULL
    figures = asyncio.run(_measure(plan, folder, stages, _find_marks(arguments)))
    return Report(_table(plan, figures, stages), figures.last_line())


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_mover", description="The cost of the data mover, and of kopia alone.")
    parser.add_argument("--quick", action="store_true", help="tiny trees, one pair: does the benchmark work?")
    parser.add_argument("--confinement", action="store_true", help="compare movers with kopia confined and without")
    parser.add_argument("--many", action="store_true", help="millions of tiny files within a memory limit")
    return run_alone(parser, _find_marks, _report)


if __name__ == "__main__":
    sys.exit(main())
