"""The judge of the benchmark of scale: what it must report, and what it must accept."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale.counts import Counts
from benchmarks.scale.history import History, LimitChange, Sight, sight_of_limits, sight_of_transfer, to_line
from benchmarks.scale.judge import count_disorder, judge
from benchmarks.scale.manifests import KINDS, Volume, build_config, build_transfer

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_WORKLOAD = {"metadata": {"name": "writer", "uid": "pod-1"}, "spec": {"nodeName": "node-000"}}
_KEYS = {
    "limit_violations",
    "conflict_share",
    "requests_per_cr_5_agents",
    "requests_per_cr_50_agents",
    "watch_bytes_per_cr_5_agents",
    "watch_bytes_per_cr_50_agents",
    "idle_requests_per_s_50_agents",
    "admissions_per_s",
    "agent_idle_mib",
    "agent_growth_mib",
    "agent_idle_cpu_percent",
    "leader_kills_ok",
    "leader_pauses_ok",
}


def sight(version: int, name: str, phase: str, *, node: str = "a", queue: str = "app") -> Sight:
    return Sight(
        version=version,
        seen_at=float(version),
        kind="DataUpload",
        uid=f"uid-{name}",
        name=name,
        created="2026-11-21T12:00:00Z",
        queue=queue,
        phase=phase,
        node=node,
        marked=True,
        message="",
        deleted=False,
    )


def limits(version: int = 1, *, queue_length: int | None = 2, slots: int = 1) -> LimitChange:
    return LimitChange(version, queue_length, slots)


def test_a_good_course_is_no_violation() -> None:
    phases = ("New", "Accepted", "Prepared", "InProgress", "Completed")
    course = [sight(10 * n + step, f"transfer-{n}", phase) for n in (1, 2) for step, phase in enumerate(phases)]
    verdict = judge(reversed(course), [limits()])
    assert verdict.violations == []
    assert (verdict.most_held, verdict.most_running) == (1, 1)
    assert verdict.final_phases == {"Completed": 2}
    assert [one.name for one in verdict.admissions] == ["transfer-1", "transfer-2"]


def test_every_version_above_the_quota_is_a_violation() -> None:
    course = [sight(2, "x", "Accepted"), sight(3, "y", "Accepted"), sight(4, "z", "Accepted")]
    course += [sight(5, "x", "Prepared"), sight(6, "x", "InProgress")]
    verdict = judge(course, [limits()])
    assert [violation.split(":")[0] for violation in verdict.violations] == ["at 4", "at 5"]


def test_a_lowered_limit_exempts_what_is_there_and_nothing_more() -> None:
    course = [sight(2, "x", "Accepted"), sight(3, "y", "Accepted"), sight(5, "x", "Prepared")]
    lowered = [limits(), limits(4, queue_length=1)]
    assert judge(course, lowered).violations == []
    course += [sight(6, "x", "InProgress"), sight(7, "z", "Accepted")]
    assert [violation.split(":")[0] for violation in judge(course, lowered).violations] == ["at 7"]


def test_slots_are_counted_for_each_node() -> None:
    course = [sight(2, "x", "InProgress"), sight(3, "y", "InProgress", node="b"), sight(4, "z", "Canceling")]
    verdict = judge(course, [limits()])
    assert [violation.split(":")[0] for violation in verdict.violations] == ["at 4"]
    assert verdict.most_running == 2


@pytest.mark.parametrize(
    ("was", "then"), [("Prepared", "Accepted"), ("Completed", "Accepted"), ("Completed", "Failed")]
)
def test_a_transfer_that_goes_back_is_a_violation(was: str, then: str) -> None:
    assert len(judge([sight(2, "x", was), sight(3, "x", then)], [limits()]).violations) == 1


def test_neither_a_deleted_transfer_nor_one_without_a_limit_exceeds_a_quota() -> None:
    course = [sight(2, "x", "Accepted"), replace(sight(3, "x", "Accepted"), deleted=True), sight(4, "y", "Accepted")]
    assert judge(course, [limits(queue_length=1)]).violations == []
    course = [sight(n, f"transfer-{n}", "Accepted") for n in range(2, 50)]
    assert judge(course, [limits(queue_length=None)]).violations == []


def test_disorder_is_counted_between_namespaces_and_inside_one() -> None:
    waiting = [sight(n, f"transfer-{n}", "New", queue=queue) for n, queue in enumerate("abab")]
    assert [count_disorder(waiting, waiting, **after) for after in ({}, {"after": "b"}, {"after": "a"})] == [0, 0, 1]
    for order in ((2, 1, 0, 3), (0, 2, 1, 3)):
        assert count_disorder(waiting, [waiting[one] for one in order]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_down_is_read_again(kind: str, tmp_path: Path) -> None:
    transfer = build_transfer(Volume(kind, "transfer", "app-1", _WORKLOAD), "velero")
    transfer["metadata"] |= {"uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-11-21T12:00:00Z"}
    seen = sight_of_transfer({"type": "ADDED", "object": transfer}, seen_at=1.0)
    later = replace(seen, version=8, phase="Completed", marked=False)
    path = tmp_path / "history"
    path.write_text(to_line(limits()) + to_line(seen))
    history = History(path)
    history.read_on()
    assert (history.sights, history.limits) == ([seen], [limits()])
    assert (seen.queue, seen.phase, seen.marked, history.done) == ("app-1", "New", False, 0)
    with path.open("a") as file:
        file.write(to_line(later)[:20])
        file.flush()
        history.read_on()
        file.write(to_line(later)[20:])
    history.read_on()
    assert (history.transfers, history.done) == (1, 1)
    config = build_config("velero", queue_length=100, slots=3)
    config["metadata"]["resourceVersion"] = "5"
    assert sight_of_limits(config) == LimitChange(5, 100, 3)


def test_the_servers_own_share_is_no_agents() -> None:
    idle = Counts(10.0, Counter({("GET", "leases", "200"): 5}), Counter(leases=100))
    before = Counts(0.0, Counter({("GET", "pods", "200"): 1}), Counter(pods=50))
    counted = {("GET", "pods", "200"): 4, ("GET", "leases", "200"): 12, ("PATCH", "pods", "409"): 2}
    now = Counts(20.0, Counter(counted), Counter(pods=150, leases=300))
    since = now.since(before, idle=idle)
    assert (since.total, since.writes, since.conflicts, since.watch_bytes) == (7, 2, 2, 200)


def test_the_last_line_is_printed_when_nothing_can_be_started(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.bench_scale", "--minutes=1", f"--folder={tmp_path}"]
    # Without any program, such as the ones that build or start the servers.
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=_ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    last = json.loads(done.stdout.splitlines()[-1])
    assert last.keys() == _KEYS
    assert set(last.values()) == {None}
