"""`python -m benchmarks.bench_resume`: what an interruption of a transfer costs, on one machine.

Knows its arguments, and what it prints. Does not know targets: the reader of the last
line does.
"""

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.alone import Report, run_alone
from benchmarks.figures import describe_machine
from benchmarks.resume.bed import FULL, QUICK, ResumePlan, open_bed
from benchmarks.resume.figures import ResumeFigures
from benchmarks.resume.lost import measure_lost_nodes
from benchmarks.resume.restore import measure_restores
from benchmarks.resume.upload import measure_uploads
from benchmarks.stages import Stages
from datamover.data_path.resume import LIST_INTERVAL
from datamover.kopia.snapshots import CHECKPOINT_INTERVAL

__all__ = ["main"]

_UPLOADS, _RESTORES, _LOST = "uploads", "restores", "lost-nodes"


async def _measure(plan: ResumePlan, only: str, folder: Path, stages: Stages) -> ResumeFigures:
    async with open_bed(plan, folder, stages) as bed:
        return ResumeFigures(
            await measure_uploads(bed) if only in {"", _UPLOADS} else None,
            await measure_restores(bed) if only in {"", _RESTORES} else None,
            await measure_lost_nodes(bed) if only in {"", _LOST} else None,
        )


def _table(plan: ResumePlan, figures: ResumeFigures, stages: Stages) -> list[str]:
    """Return the lines that describe the run."""
    tree, scale = plan.tree, CHECKPOINT_INTERVAL.total_seconds() / plan.checkpoint_seconds
    lists = (
        f"A list of finished files every {plan.list_seconds} s, 1/{LIST_INTERVAL.seconds // plan.list_seconds} of the "
        "default, and so is the time before the first one"
    )
    checkpoints = f"A checkpoint every {plan.checkpoint_seconds} s, 1/{scale:.0f} of the default"
    moved = f"{tree.total_bytes / 1e9:.2f} GB in {tree.large_files} large and {tree.small_files:,} small files"
    lost = (
        f"Lost nodes: {plan.kill_tree.total_bytes / 1e9:.2f} GB, {plan.lost_bytes_per_second / 1e6:.0f} MB/s, "
        f"the fence and the wait 1/{plan.fence_part} of the default"
    )
    line = f"the line to the storage lets {plan.bytes_per_second / 1e6:.0f} MB/s pass"
    return [
        f"Machine: {describe_machine()}. Tree: {moved}; {line}.",
        f"{lost}.",
        f"{checkpoints}. {lists}. {plan.kills} random kills. {stages.seconds:.0f} s in all: {stages.line()}.",
        "",
        *figures.lines(),
    ]


def _report(arguments: argparse.Namespace, folder: Path, stages: Stages) -> Report:
    plan = QUICK if arguments.quick else FULL
    if arguments.kills is not None:
        plan = replace(plan, kills=arguments.kills)
    figures = asyncio.run(_measure(plan, arguments.only, folder, stages))
    return Report(_table(plan, figures, stages), figures.last_line())


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_resume", description="The cost of an interruption of a transfer.")
    parser.add_argument("--quick", action="store_true", help="tiny trees, two kills: does the benchmark work?")
    parser.add_argument("--only", choices=[_UPLOADS, _RESTORES, _LOST], default="", help="one part (default: all)")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="how many random kills, half of them of backups (default: 40)"
    )
    return run_alone(parser, _report)


if __name__ == "__main__":
    sys.exit(main())
