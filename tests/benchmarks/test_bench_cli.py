"""The measurements of `nodeagent status`, `volumes` and `ui`: their figures in a small cluster, and the requests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

_ROOT = Path(__file__).parents[2]


def _run(name: str, *more: str) -> tuple[list[str], dict[str, Any]]:
    words = ["--nodes", "5", "--transfers", "40", "--claims", "20", "--runs", "1", *more]
    argv = [sys.executable, "-m", f"benchmarks.{name}", *words]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return table, json.loads(last)


def test_the_last_line_of_the_commands_has_all_figures() -> None:
    table, found = _run("bench_cli")
    status, volumes = {"status_ms", "peak_mib", "api_requests"}, {"volumes_ms", "volumes_peak_mib"}
    assert set(found) == {*status, *volumes, "volumes_api_requests", "start_ms"}
    # One for each page of each list: docs/benchmarks.md has those of a large cluster.
    assert (found["api_requests"], found["volumes_api_requests"]) == (20, 11)
    assert sum(line.startswith("| `") for line in table) == 5


def test_the_last_line_of_the_pages_has_all_figures() -> None:
    table, found = _run("bench_ui", "--idle-seconds", "15")
    assert set(found) == {"first_paint_ms_10k", "server_peak_mib_10k", "api_requests_per_minute_idle", "ready_s"}
    assert found["first_paint_ms_10k"] > 0
    assert 20 < found["server_peak_mib_10k"] < 250
    # Within these seconds at most one round of what has no watch: a Lease, a DaemonSet, two ConfigMaps, the CronJobs of
    # schedules, the leader's page, the nodes; and one of PVCs, namespaces, CronJobs, Schedules, Deployments, pods and
    # PersistentVolumes.
    assert found["api_requests_per_minute_idle"] <= 14 * 60 / 15
    assert sum(line.startswith("| `/") for line in table) == 8
