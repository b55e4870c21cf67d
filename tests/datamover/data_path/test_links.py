import os
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.errors import DataPathError
from datamover.data_path.links import SnapshotTypes, find_links, remove_links
from datamover.kopia.snapshots import Snapshot


def _go_on() -> bool:
    return False


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    (target / "a").mkdir(parents=True)
    links = {"in": "a", "a/up": "../in", "out": "/etc", "a/relative": "../../x", "dangling": "/no/such", "chain": "out"}
    for name, to in links.items():
        (target / name).symlink_to(to)
    (target / "absolute-in").symlink_to(target / "a")
    return target


def test_links_that_lead_out_are_found_also_through_other_links(target: Path) -> None:
    assert sorted(find_links(target, _go_on)) == [b"a/relative", b"chain", b"dangling", b"out"]


def test_older_links_are_left_out_as_they_are_restored_ones(target: Path) -> None:
    now = os.lstat(target / "out").st_mtime_ns
    os.utime(target / "out", ns=(now, now + 10**9), follow_symlinks=False)
    assert find_links(target, _go_on, since_ns=now + 10**9) == [b"out"]


def test_only_links_are_removed(target: Path) -> None:
    (target / "file").write_text("kept")
    remove_links(target, [b"out", b"a/relative", b"file", b"missing", b"in/up", b"missing/x"])
    assert not (target / "out").is_symlink()
    assert not (target / "a" / "relative").is_symlink()
    assert (target / "file").read_text() == "kept"
    # Its path leads through a link.
    assert (target / "a" / "up").is_symlink()


def test_a_target_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataPathError, match=r"cannot read target .*missing: No such file or directory"):
        find_links(tmp_path / "missing", _go_on)


async def test_directories_and_files_of_the_snapshot_count_and_each_directory_is_read_once() -> None:
    entries: dict[str, list[dict[str, str]]] = {
        "root": [{"name": "d", "type": "d", "obj": "k1"}, {"name": "l", "type": "s"}, {"name": "\ufffd", "type": "f"}],
        "k1": [{"name": "f", "type": "f", "obj": "k2"}],
    }
    calls: list[str] = []

    async def call(_: str, *arguments: str) -> Any:
        calls.append(arguments[-1])
        answer = AsyncMock()
        answer.check = lambda: answer
        answer.document = lambda: {"entries": entries[arguments[-1]]}
        return answer

    kopia = AsyncMock()
    kopia.call = call
    types = SnapshotTypes(kopia, Snapshot("id", "s", "", "root", 0, 0))
    links = [b"d", b"l", b"\xff", b"d/f", b"d/x", b"l/x", b"missing/x/y"]
    assert await types.replaced(links) == [b"d", b"\xff", b"d/f"]
    assert calls == ["root", "k1"]
