"""The measurement of `nodeagent ui`: what it prints in a small cluster, and that an idle one is left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]


def test_the_last_line_has_all_figures() -> None:
    words = ["--nodes", "5", "--transfers", "40", "--runs", "1", "--idle-seconds", "15"]
    argv = [sys.executable, "-m", "benchmarks.bench_ui", *words]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert set(found) == {"first_paint_ms_10k", "server_peak_mib_10k", "api_requests_per_minute_idle", "ready_s"}
    assert found["first_paint_ms_10k"] > 0
    assert 20 < found["server_peak_mib_10k"] < 250
    # Within these seconds at most one round of what has no watch: a Lease, a DaemonSet, a ConfigMap, a page, the nodes.
    assert found["api_requests_per_minute_idle"] <= 6 * 60 / 15
    assert sum(line.startswith("| `/") for line in table) == 6
