"""The benchmark itself: it measures everything it is to measure. What it measures is no test's matter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.groups import memory_group
from benchmarks.pages import check_page, record
from benchmarks.processes import BenchmarkError
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree

_ROOT = Path(__file__).parents[2]
_NUMBERS = (
    "upload_ratio",
    "restore_ratio",
    "second_backup_s",
    "peak_memory_ratio",
    "upload_cost_of_memory_setting",
    "mover_alone_mib",
)


@pytest.mark.cluster
@pytest.mark.apart
@pytest.mark.timeout(600)
def test_the_last_line_tells_every_figure(tmp_path: Path) -> None:
    """Needs root, for its namespaces and its control group."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_mover", "--quick", "--folder", tmp_path],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == {*_NUMBERS, "limited_256mib_ok", "limited_256mib_200k_files_ok"}
    assert all(isinstance(figures[name], float) for name in _NUMBERS)
    assert figures["limited_256mib_ok"] is True
    assert figures["limited_256mib_200k_files_ok"] is True
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.apart
def test_a_group_limits_the_memory_of_what_runs_in_it() -> None:
    with memory_group(32) as group:
        assert group is not None
        taking = [sys.executable, "-c", "print(len(b'x' * (64 << 20)))"]
        enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
        done = subprocess.run(["sh", "-c", enter, group, *taking], check=False, capture_output=True)
        assert done.returncode == -9
    assert not group.exists()


def test_a_page_keeps_the_figures_and_its_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n")
    check_page(page, "x")
    for lines in (["a", "b"], ["c"]):
        record(page, "x", lines)
    assert page.read_text() == "before\n<!-- x: begin -->\nc\n<!-- x: end -->\nafter\n"
    with pytest.raises(BenchmarkError, match="has no place for the figures"):
        check_page(page, "y")


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
