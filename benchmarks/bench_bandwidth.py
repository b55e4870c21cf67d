"""`python -m benchmarks.bench_bandwidth`: how exactly the bandwidth of a data mover is limited, and what that costs.

Knows its arguments, and what it prints. Does not know targets: the reader of the last line does.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from benchmarks.alone import Report, run_alone
from benchmarks.bandwidth.bed import open_bed
from benchmarks.bandwidth.figures import BandwidthFigures
from benchmarks.bandwidth.runs import FULL, QUICK, BandwidthPlan, run_all
from benchmarks.figures import describe_machine
from benchmarks.stages import Stages

__all__ = ["main"]


async def _measure(plan: BandwidthPlan, folder: Path, stages: Stages) -> BandwidthFigures:
    async with open_bed(folder, stages) as bed:
        return await run_all(plan, bed)


def _report(arguments: argparse.Namespace, folder: Path, stages: Stages) -> Report:
    plan = QUICK if arguments.quick else FULL
    figures = asyncio.run(_measure(plan, folder, stages))
    head = f"Machine: {describe_machine()}. {stages.seconds:.0f} s in all: {stages.line()}."
    return Report([head, "", *figures.lines()], figures.last_line())


def main() -> int:
    """Measure, and print the tables and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_bandwidth", description="The limits of a data mover's bandwidth.")
    parser.add_argument("--quick", action="store_true", help="small trees, short windows: does the benchmark work?")
    return run_alone(parser, _report)


if __name__ == "__main__":
    sys.exit(main())
