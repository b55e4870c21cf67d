"""The benchmark itself: it measures everything it is to measure. No test checks the figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disks import Disks
from benchmarks.figures import Figures, Row
from benchmarks.groups import memory_group
from benchmarks.processes import Command, Measured
from benchmarks.runs import LEAST_PAIRS, pairs_fit
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from core.clock import SystemClock

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]


class HandClock(SystemClock):
    def __init__(self) -> None:
        self._seconds = 0.0

    def monotonic(self) -> float:
        return self._seconds

    def pass_seconds(self, seconds: float) -> None:
        self._seconds += seconds


_NUMBERS = (
    "upload_ratio",
    *(f"restore_{what}_ratio" for what in ("small", "small_same_settings", "small_no_barriers")),
    *(f"restore_{what}_ratio" for what in ("large", "large_same_settings")),
    "restore_ratio",
    "second_backup_s",
    "peak_memory_ratio",
    *(f"{what}_excess_mib" for what in ("upload", "second_backup", "restore_small", "restore_large")),
    "upload_cost_of_memory_setting",
    "mover_alone_mib",
)
_RATIOS = {f"confined_{what}_ratio" for what in ("upload", "restore", "upload_cpu", "restore_cpu")}


def run_quickly(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run the benchmark, with less priority than tests that run at the same time; return its output and last line."""
    done = subprocess.run(
        ["nice", "-n", "10", sys.executable, "-m", "benchmarks.bench_mover", "--quick", "--folder", folder, *arguments],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_the_last_line_has_every_figure(tmp_path: Path) -> None:
    """Needs root, for its namespaces and its control group."""
    output, figures = run_quickly(tmp_path)
    assert figures.keys() == {*_NUMBERS, "limited_256mib_ok", "limited_256mib_200k_files_ok"}
    assert all(isinstance(figures[name], float) for name in _NUMBERS)
    assert figures["limited_256mib_ok"] is True
    assert figures["limited_256mib_200k_files_ok"] is True
    assert ", file systems created and deleted " in output
    assert "Targets and caches: ext4 in a file of its own" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_movers_are_compared_with_kopia_confined_and_without(tmp_path: Path) -> None:
    """Needs root as well."""
    output, figures = run_quickly(tmp_path, "--confinement")
    assert figures.keys() == {*_RATIOS, "mover_alone_mib"}
    assert all(figures[name] > 0 for name in _RATIOS)
    assert "| restore, unconfined | " in output


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_many_files_are_moved_within_a_memory_limit(tmp_path: Path) -> None:
    """Needs root as well."""
    output, figures = run_quickly(tmp_path, "--many")
    assert figures["many_files"] == 1000
    assert figures["many_contents"] > 1000
    assert figures["many_files_512mib_ok"] is True
    assert 50 < figures["many_files_most_mib"] < 512
    for run in ("upload", "restore"):
        assert f"| {run} of 1,000 files, within 512 MiB | " in output


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_numbers_of_files_in_parallel_are_compared(tmp_path: Path) -> None:
    """Needs root as well."""
    output, figures = run_quickly(tmp_path, "--parallel")
    cpus = len(os.sched_getaffinity(0))
    assert len(figures) == 6
    for number in range(cpus, cpus + 3):
        assert figures[f"parallel_{number}_upload_ratio"] > 0
        assert f"parallel_{number}_upload_excess_mib" in figures
        assert f"| upload, mover, {number} in parallel | " in output


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
def test_a_group_limits_the_memory_of_what_runs_in_it() -> None:
    with memory_group(32) as group:
        assert group is not None
        taking = [sys.executable, "-c", "print(len(b'x' * (64 << 20)))"]
        command = Command(taking, {}, Path("log"), group)
        assert subprocess.run(command.whole, check=False, capture_output=True).returncode == -9
    assert not group.folder.exists()


def test_files_are_in_a_folder_without_the_permission_to_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    disks = Disks(tmp_path, Stages(HandClock()))
    assert not disks.own
    with disks.volume() as first, disks.cache() as second:
        for folder in (first, second):
            assert not list(folder.iterdir())
            (folder / "file").write_text("")
    assert not list(tmp_path.iterdir())


def test_each_moment_counts_for_one_stage() -> None:
    clock = HandClock()
    stages = Stages(clock)
    clock.pass_seconds(1)
    with stages.stage("outer"):
        clock.pass_seconds(20)
        with stages.stage("inner"):
            clock.pass_seconds(400)
        clock.pass_seconds(3)
    with stages.stage("inner"):
        clock.pass_seconds(5)
    assert stages.line() == "inner 405 s, outer 23 s, anything else 1 s"
    assert stages.seconds == 429


@pytest.mark.parametrize(
    ("done", "took", "left", "fits"),
    [
        pytest.param(0, 0.0, 0.0, True, id="the first one, late"),
        pytest.param(LEAST_PAIRS - 1, 90.0, 0.0, True, id="too few without it"),
        pytest.param(LEAST_PAIRS, 90.0, 100.0, False, id="no time to leave"),
        pytest.param(LEAST_PAIRS, 90.0, 110.0, True, id="time enough"),
    ],
)
def test_pairs_are_run_while_there_is_time(*, done: int, took: float, left: float, fits: bool) -> None:
    assert pairs_fit(done, took, left) is fits


def test_the_mover_is_compared_with_bare_kopia() -> None:
    mover, bare = Measured(0, 10**9, 40, 200, 230, 0.5, 220), Measured(0, 2 * 10**9, 300, 0, 300, 0.0, 190)
    figures = Figures()
    for row in Row:
        figures.add(row, mover if row.endswith("mover") else bare)
    summary = figures.summary()
    assert (figures.pairs, summary["peak_memory_ratio"], summary["restore_small_ratio"]) == (1, 0.767, 0.5)
    assert (summary["upload_excess_mib"], summary["restore_ratio"]) == (30, 0.5)
    assert "| upload, mover | 1.00 | 1.00 | 1.00 | 0.50 | 230 | 230 | 220 | 220 |" in list(figures.lines())


def test_a_tree_is_made_as_asked_and_differences_are_found(tmp_path: Path) -> None:
    shape = TreeShape(large_files=2, large_bytes=1_500_000, small_files=250, small_bytes=10)
    tree = make_tree(tmp_path / "tree", shape)
    files = [path for path in tree.rglob("*") if path.is_file()]
    before = survey_tree(tree)
    assert (len(files), sum(path.stat().st_size for path in files)) == (shape.files, shape.total_bytes)
    assert not find_differences(before, tree)
    (tree / "large-1").unlink()
    os.utime(tree / "large-0", (0, 0))
    assert find_differences(before, tree) == (
        f"'large-0': mtime_ns was {before['large-0']['mtime_ns']}, is 0",
        "'large-1' is missing",
    )
