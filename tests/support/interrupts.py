"""A command of the product as a process that SIGINT ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@contextmanager
def run_interruptible(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m nodeagent WORD…` with pipes for its output; it is killed if it still runs after the block.

    A shell starts what runs in the background with SIGINT ignored, and children of such tests would ignore it too.
    """
    argv = [sys.executable, "-m", "nodeagent", *words]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(argv, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, previous)
    with process:
        try:
            yield process
        finally:
            process.kill()
