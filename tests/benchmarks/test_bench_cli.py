"""The measurements of `nodeagent status` and `nodeagent ui`: their figures in a small cluster, and the requests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]


def _run(name: str, *more: str) -> tuple[list[str], dict[str, Any]]:
    words = ["--nodes", "5", "--transfers", "40", "--runs", "1", *more]
    argv = [sys.executable, "-m", f"benchmarks.{name}", *words]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return table, json.loads(last)


def test_the_last_line_of_status_has_all_figures() -> None:
    table, found = _run("bench_cli")
    assert set(found) == {"status_ms", "peak_mib", "api_requests", "start_ms"}
    assert found["api_requests"] == 18
    assert sum(line.startswith("| `") for line in table) == 4


def test_the_last_line_of_the_pages_has_all_figures() -> None:
    table, found = _run("bench_ui", "--idle-seconds", "15")
    assert set(found) == {"first_paint_ms_10k", "server_peak_mib_10k", "api_requests_per_minute_idle", "ready_s"}
    assert found["first_paint_ms_10k"] > 0
    assert 20 < found["server_peak_mib_10k"] < 250
    # Within these seconds at most one round of what has no watch: a Lease, a DaemonSet, two ConfigMaps, the CronJobs of
    # schedules, the leader's page, the nodes; and one of PVCs, namespaces, CronJobs and Schedules.
    assert found["api_requests_per_minute_idle"] <= 11 * 60 / 15
    assert sum(line.startswith("| `/") for line in table) == 6
