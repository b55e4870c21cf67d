"""The command line of benchmarks of data movers: in namespaces of their own, and with a folder.

Knows how a benchmark is started. Does not know what is measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.stages import Stages
from core.clock import SystemClock
from tests.support.tools import tool

__all__ = ["Report", "run_alone"]

_INSIDE: Final = "--inside"
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A mount namespace for the service account and temporary file systems; a PID namespace: no process outlives it."""


@dataclass(frozen=True)
class Report:
    """What a run shows: a table for people, and a last line for programs."""

    table: Sequence[str]
    last: str


def run_alone(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Path, Stages], Report],
) -> int:
    """Parse the command line, measure in namespaces of its own, and print the report; return the exit code.

    Args:
        parser: has the benchmark's own arguments; its `prog` is the module's name in `benchmarks`.
        measure: measures in a folder that is removed afterwards.
    """
    parser.add_argument("--folder", type=Path, help="on the disk to restore to (default: that of temporary files)")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _run_inside(arguments, parser.prog, measure)
    for name in ("kopia", "versitygw"):
        tool(name, name)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    python = [sys.executable, "-m", f"benchmarks.{parser.prog}", _INSIDE, *sys.argv[1:]]
    return subprocess.run(["unshare", *user, *_NAMESPACES, *python], check=False).returncode  # noqa: S603, S607


def _run_inside(
    arguments: argparse.Namespace,
    name: str,
    measure: Callable[[argparse.Namespace, Path, Stages], Report],
) -> int:
    stages = Stages(SystemClock())
    try:
        prefix = f"{name.replace('_', '-')}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=arguments.folder) as folder:
            report = measure(arguments, Path(folder), stages)
    except BenchmarkError as e:
        stages.say(str(e))
        return 1
    sys.stdout.writelines(f"{line}\n" for line in [*report.table, report.last])
    return 0
