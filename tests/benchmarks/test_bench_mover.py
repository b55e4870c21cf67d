"""Benchmarks of data movers: they measure everything they are to measure. No test checks the figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Runs, alternate
from benchmarks.groups import memory_group
from benchmarks.processes import Command, Measured
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_WAYS = ("upload", "restore")
_FIGURES = {
    "mover": {
        "upload_ratio",
        *(f"restore_{what}{settings}_ratio" for what in ("small", "large") for settings in ("", "_same_settings")),
        "second_backup_s",
        *(f"{what}_excess_mib" for what in ("upload", "second_backup", "restore_small", "restore_large")),
        "upload_cost_of_memory_setting",
        "mover_alone_mib",
        "limited_256mib_ok",
        "limited_256mib_200k_files_ok",
    },
    "confinement": {f"confined_{what}_{ratio}" for what in _WAYS for ratio in ("ratio", "cpu_ratio")}
    | {"mover_alone_mib"},
    "bandwidth": {f"unlimited_{what}_{ratio}" for what in _WAYS for ratio in ("ratio", "cpu_ratio")},
    "movers": {
        f"{what}_{way}_{figure}"
        for what in ("upload", "second_backup", "few_files")
        for way in ("plain", "one_open")
        for figure in ("ratio", "excess_mib")
    },
    "latency": {"far_upload_ratio", "far_restore_ratio", "far_device_restore_ratio"},
    "many": {"many_files", "many_files_512mib_ok", "many_files_most_mib"},
    "files": {f"{what}_{figure}" for what in ("ls", "cp_files", "cp_device") for figure in ("s", "most_mib")},
    "resume": {"upload_resent_share", "restore_rewritten_share", "total_time_ratio"},
    "peers": {
        f"{volume}_{phase}_{program}_{figure}"
        for volume, programs in {"files": ("ours", "ours_by_block"), "device": ("ours",)}.items()
        for program in programs
        for phase in ("first_backup", "nothing_changed", "1_percent_changed", "restore")
        for figure in ("s", "ratio")
    },
}
_RUNS = {
    "mover": "upload within 256 MiB, mover",
    "confinement": "restore, unconfined",
    "bandwidth": "upload, proxy without limits",
    "movers": "second backup, nothing changed, one-open",
    "latency": "restore, bare kopia",
    "many": "restore of 1,000 files, within 512 MiB",
    "files": "cp of the device",
    "resume": "restore",
    "peers": "device | restore | kopia",
}
_WORDS = {
    "mover": ["bench_mover"],
    "resume": ["bench_resume"],
    "peers": ["bench_peers", "--work=files", "--work=device", "--peer=ours", "--peer=ours, by block", "--peer=kopia"],
}


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", _FIGURES)
def test_the_last_line_has_every_figure(what: str, tmp_path: Path) -> None:
    """Needs root, for its namespaces and its control groups; it runs with less priority than tests beside it."""
    words = _WORDS.get(what, ["bench_mover", f"--{what}"])
    argv = ["nice", "-n", "10", sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:], "--quick"]
    done = subprocess.run([*argv, "--folder", tmp_path], cwd=_ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == _FIGURES[what]
    assert all(figure is True for name, figure in figures.items() if name.endswith("_ok"))
    assert all(figures[name] > 0 for name in figures if name.endswith("_ratio"))
    assert f"| {_RUNS[what]} | " in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
def test_a_group_limits_the_memory_of_what_runs_in_it() -> None:
    with memory_group(32) as group:
        taking = [sys.executable, "-c", "print(len(b'x' * (64 << 20)))"]
        command = Command(taking, {}, Path("log"), group)
        assert subprocess.run(command.whole, check=False, capture_output=True).returncode == -9
    assert not group.folder.exists()


def test_runs_are_compared_by_their_medians_and_in_pairs() -> None:
    runs = Runs()
    for seconds, other_seconds in ((1, 4), (3, 4), (8, 32)):
        runs.add("mover", Measured(0, seconds * 10**9, 40, 0.5, 220))
        runs.add("kopia", Measured(0, other_seconds * 10**9, 300, 0.0, 190))
    runs.add("no group", Measured(0, 10**9, 300))
    assert (runs.ratio("mover", "kopia"), runs.excess_mib("mover", "kopia")) == (0.75, 30)
    assert runs.paired_ratio("mover", "kopia", lambda run: run.seconds) == 0.25
    assert runs.excess_mib("mover", "no group") is None
    assert (len(runs.of()), runs.most_mib()) == (7, 220)
    assert "| mover | 3.00 | 1.00 | 8.00 | 0.50 | 220 | 220 |" in list(runs.lines())


def test_who_is_first_alternates() -> None:
    assert [list(alternate("ab", number)) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


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
