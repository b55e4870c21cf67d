"""The measurement of `nodeagent status`: what it prints in a small cluster, and that it meets the bound of requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]


def test_the_last_line_has_all_figures() -> None:
    words = ["--nodes", "5", "--transfers", "40", "--runs", "1"]
    argv = [sys.executable, "-m", "benchmarks.bench_cli", *words]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert set(found) == {"status_ms", "peak_mib", "api_requests", "start_ms"}
    assert found["api_requests"] == 14
    assert sum(line.startswith("| `") for line in table) == 4
