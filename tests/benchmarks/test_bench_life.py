"""The measurement of life cycles: the stages are found in what a watch has seen, and summed up as medians."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bench_life import _Figures
from benchmarks.lives import _measure, _Watched
from benchmarks.tree import TreeShape, change_tree, make_tree
from core.kube.resources import PODS
from tests.cluster.followed import Followed

_RUNNING: list[dict[str, Any]] = [{"state": {"running": {}}}]


def _event(reason: str, seconds: float) -> dict[str, Any]:
    name = f"du-1.{int(seconds * 10**9):x}"
    return {"metadata": {"name": name}, "reason": reason, "involvedObject": {"name": "du-1"}}


def _own(seconds: float, phase: str, *finalizers: str) -> tuple[float, str, dict[str, Any]]:
    return seconds, "MODIFIED", {"metadata": {"finalizers": list(finalizers)}, "status": {"phase": phase}}


def _pod(seconds: float, change: str, containers: list[dict[str, Any]]) -> tuple[float, str, dict[str, Any]]:
    return seconds, change, {"metadata": {}, "status": {"containerStatuses": containers}}


@pytest.fixture
def watched() -> tuple[_Watched, _Watched]:
    """A transfer that was created at 100 s, and its pod."""
    events = [_event("Data-Path-Started", 104.5), _event("Data-Path-Ready", 106), _event("Data-Path-Completed", 110)]
    logs = "\n".join(
        f'level=info msg="mover: the disk took {seconds} s for what was not on it yet" name={name} uid=1'
        for name, seconds in (("du-1", 0.5), ("du-10", 3.0))
    )
    user = SimpleNamespace(kubectl=lambda *_: logs)
    bed: Any = SimpleNamespace(api=SimpleNamespace(objects=lambda *_: events), user=user)
    transfer = Followed(bed, {"kind": "DataUpload", "metadata": {"name": "du-1"}})
    own, pod = _Watched(transfer, transfer.resource), _Watched(transfer, PODS)
    own.seen = [_own(100, ""), _own(100.5, "Accepted"), _own(103.5, "Prepared"), _own(104, "InProgress", "f")]
    own.seen += [_own(111, "Completed", "f"), _own(112, "Completed")]
    pod.seen = [_pod(102, "ADDED", []), _pod(103, "MODIFIED", _RUNNING), _pod(114, "DELETED", _RUNNING)]
    return own, pod


def test_the_stages_of_a_life_follow_each_other(watched: tuple[_Watched, _Watched]) -> None:
    life = _measure(100.0, *watched)
    assert life.seconds == pytest.approx(
        {
            "accept": 0.5,
            "expose": 1.5,
            "pod": 1.0,
            "open": 1.5,
            "repository": 1.5,
            "move": 3.5,
            "flush": 0.5,
            "hand_over": 1.0,
            "clean_up": 3.0,
            "in_progress": 7.0,
            "whole": 11.0,
        }
    )


def test_the_last_line_compares_medians_with_kopia(watched: tuple[_Watched, _Watched]) -> None:
    life = _measure(100.0, *watched)
    figures = _Figures({"DataUpload, small, first": [life] * 3, "DataUpload, block": [life]})
    figures.kopia["DataUpload, small, first"] = [5.0, 6.0, 100.0]
    found = figures.summary()
    assert found["dataupload_small_first_ratio"] == pytest.approx(7 / 6, abs=0.001)
    assert "dataupload_block_ratio" not in found
    lines = list(figures.lines())
    assert len({line.count("|") for line in lines}) == 1
    assert "| 7.00 | 7.00 | 6.00 | 5.00 | 100.00 |" in lines[2]


@pytest.mark.processes
def test_a_change_replaces_all_content_and_no_size(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "tree", TreeShape(large_files=1, large_bytes=3 << 19, small_files=2, small_bytes=100))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    change_tree(root)
    for path, content in before.items():
        assert path.read_bytes() != content
        assert path.stat().st_size == len(content)
