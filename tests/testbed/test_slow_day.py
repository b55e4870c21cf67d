"""A slow day: no more processors than it has, and an end of all that it started."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.testbed import cgroups

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a group with a quota"),
]

_BUSY = "import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"


def _start(percent: int, *command: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.testbed.slow_day", str(percent), *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_all_processes_together_get_the_share() -> None:
    processors = len(os.sched_getaffinity(0))
    busy = " & ".join([f"{sys.executable} -c '{_BUSY}'"] * (processors + 1))
    child = _start(50, "sh", "-c", f"{busy} & wait; exit 3")
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 3
    used = float(re.findall(r"([\d.]+) used on average", output)[0])
    assert 0 < used <= processors / 2 * 1.05


def test_an_interrupt_ends_the_command() -> None:
    child = _start(50, "sh", "-c", "trap 'echo cleaned up; exit 5' INT; echo ready; while :; do sleep 0.1; done")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert "cleaned up" in child.communicate(timeout=300)[0]
    assert child.returncode == 5
    assert cgroups._tops(f"{cgroups.SLOW_DAY}-{child.pid}") == []
