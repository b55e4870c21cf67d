"""`python -m benchmarks.bench_resume`: what an interruption of a transfer costs, on one machine.

Knows its command line, the namespaces it runs in, and what it prints. Does not know targets: the reader of the last
line does.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.figures import describe_machine
from benchmarks.pages import check_page, record
from benchmarks.processes import BenchmarkError
from benchmarks.resume.bed import FULL, QUICK, ResumePlan, open_bed
from benchmarks.resume.figures import ResumeFigures
from benchmarks.resume.restore import measure_restores
from benchmarks.resume.upload import measure_uploads
from benchmarks.stages import Stages
from core.clock import SystemClock
from datamover.data_path.resume import LIST_INTERVAL
from datamover.kopia.snapshots import CHECKPOINT_INTERVAL
from tests.support.tools import tool

__all__ = ["main"]

_FIGURES: Final = "figures of interrupted transfers"
_INSIDE: Final = "--inside"
_UPLOADS, _RESTORES = "uploads", "restores"
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A mount namespace for the service account and temporary file systems; a PID namespace: no process outlives it."""


async def _measure(plan: ResumePlan, only: str, folder: Path, stages: Stages) -> ResumeFigures:
    async with open_bed(plan, folder, stages) as bed:
        upload = await measure_uploads(bed) if only != _RESTORES else None
        return ResumeFigures(upload, await measure_restores(bed) if only != _UPLOADS else None)


def _table(plan: ResumePlan, figures: ResumeFigures, stages: Stages) -> list[str]:
    """Return the lines that describe the run."""
    tree, scale = plan.tree, CHECKPOINT_INTERVAL.total_seconds() / plan.checkpoint_seconds
    lists = (
        f"A list of finished files every {plan.list_seconds} s, 1/{LIST_INTERVAL.seconds // plan.list_seconds} of the "
        "default, and so is the time before the first one"
    )
    checkpoints = f"A checkpoint every {plan.checkpoint_seconds} s, 1/{scale:.0f} of the default"
    moved = f"{tree.total_bytes / 1e9:.2f} GB in {tree.large_files} large and {tree.small_files:,} small files"
    line = f"the line to the storage lets {plan.bytes_per_second / 1e6:.0f} MB/s pass"
    return [
        f"Machine: {describe_machine()}. Tree: {moved}; {line}.",
        f"{checkpoints}. {lists}. {plan.kills} random kills each way. {stages.seconds:.0f} s in all: {stages.line()}.",
        "",
        *figures.lines(),
    ]


def _run_inside(arguments: argparse.Namespace) -> int:
    plan = QUICK if arguments.quick else FULL
    if arguments.kills is not None:
        plan = replace(plan, kills=arguments.kills)
    stages = Stages(SystemClock())
    try:
        if arguments.record:
            check_page(arguments.record, _FIGURES)
        with tempfile.TemporaryDirectory(prefix="bench-resume-", dir=arguments.folder) as folder:
            figures = asyncio.run(_measure(plan, arguments.only, Path(folder), stages))
    except BenchmarkError as e:
        stages.say(str(e))
        return 1
    table, last = _table(plan, figures, stages), figures.last_line()
    if arguments.record:
        record(arguments.record, _FIGURES, [*table, "", "```json", last, "```"])
    sys.stdout.writelines(f"{line}\n" for line in [*table, last])
    return 0


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_resume", description="The cost of an interruption of a transfer.")
    parser.add_argument("--quick", action="store_true", help="tiny trees, one kill: does the benchmark work?")
    parser.add_argument("--only", choices=[_UPLOADS, _RESTORES], default="", help="one direction (default: both)")
    parser.add_argument("--kills", type=int, metavar="N", help="how many random kills (default: 40)")
    parser.add_argument("--folder", type=Path, help="on the disk to restore to (default: that of temporary files)")
    parser.add_argument(
        "--record", type=Path, metavar="PAGE", help="write the figures into this page, such as docs/benchmarks.md"
    )
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _run_inside(arguments)
    for name in ("kopia", "versitygw"):
        tool(name, name)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    python = [sys.executable, "-m", "benchmarks.bench_resume", _INSIDE, *sys.argv[1:]]
    return subprocess.run(["unshare", *user, *_NAMESPACES, *python], check=False).returncode  # noqa: S603, S607


if __name__ == "__main__":
    sys.exit(main())
