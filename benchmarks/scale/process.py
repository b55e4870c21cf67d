"""What the processes of a scene share: the way to their cluster, what they log, and how they report readiness."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from benchmarks.scale.watcher import READY
from core.logs import set_up_logging


def build_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a process with the flags that all of them have."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--node", action="append", required=True)
    return parser


def report_ready() -> None:
    """Report to the parent process that nothing is missed from now on."""
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()


def run_process(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Coroutine[None, None, None]]
) -> int:
    """Run the process by its command line; return its exit code."""
    arguments = parser.parse_args()
    set_up_logging("warning", "text")
    asyncio.run(run(arguments))
    return 0
