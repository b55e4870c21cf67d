"""The stage of a restore in place, and what is done with each file: taken away, put there, written by one kopia."""

import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.errors import DataPathError
from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from datamover.data_path.finished import Fingerprints
from datamover.data_path.refused import Unit
from datamover.data_path.stage import (
    OpenStage,
    PendingUnits,
    Stage,
    Step,
    decide_file,
    decide_link,
    decide_same_link,
)


def _never() -> bool:
    return False


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.make(_never)
    return stage


@pytest.fixture
def opened(stage: Stage) -> Iterator[OpenStage]:
    with stage.open() as opened:
        yield opened


def test_a_directory_is_deleted_however_deep_it_is(tmp_path: Path, stage: Stage, opened: OpenStage) -> None:
    """Each is progress: to delete a million empty ones may take longer than a stall may."""
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        os.symlink("/etc", "link", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    opened.delete("d", opened.root)
    opened.delete("link", opened.root)
    assert [*tmp_path.iterdir()] == [stage.files.parent]
    before = stage.steps
    opened.empty(_never)
    assert stage.steps >= before + 1500
    assert not [*(stage.files.parent / "old").iterdir()]
    assert Path("/etc/passwd").exists()


def _put(place: Path, there: str, outside: Path) -> None:
    if there == "file":
        place.hardlink_to(outside)
    elif there == "link":
        place.symlink_to("outside")
    elif there != "nothing":
        place.mkdir()
    if there == "entries":
        (place / "extra").write_text("extra")


@pytest.mark.parametrize("there", ["nothing", "file", "link", "empty", "entries"])
@pytest.mark.parametrize("delete", [True, False])
def test_a_file_comes_unless_entries_stay(
    tmp_path: Path, stage: Stage, opened: OpenStage, there: str, delete: bool
) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    outside.write_text("other")
    _put(place, there, outside)
    (stage.files / "1").write_text("new")
    blocked = there == "entries" and not delete
    assert opened.place("1", "place", opened.root, delete=delete) is not blocked
    assert outside.read_text() == "other"
    assert (place / "extra").read_text() == "extra" if blocked else place.read_text() == "new"


@pytest.mark.parametrize("there", ["nothing", "file", "empty", "entries"])
def test_a_directory_comes_unless_another_has_entries(
    tmp_path: Path, stage: Stage, opened: OpenStage, there: str
) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    outside.write_text("other")
    _put(place, there, outside)
    (stage.files / "1").mkdir()
    (stage.files / "1" / "f").write_text("new")
    assert opened.place("1", "place", opened.root, delete=True) is (there != "entries")
    assert (place / "f").exists() is (there != "entries")


@pytest.mark.parametrize("left", ["file", "link", "stage"])
def test_what_was_left_goes_when_the_next_one_begins(tmp_path: Path, left: str) -> None:
    stage, outside = Stage(tmp_path / "volume"), tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("other")
    with pytest.raises(DataPathError, match=rf"^cannot make directory {stage.files.parent}: No such"):
        stage.make(_never)
    (tmp_path / "volume").mkdir()
    place = stage.files.parent
    if left == "file":
        place.write_text("x")
    elif left == "link":
        place.symlink_to(outside)
    else:
        Stage(tmp_path / "volume").make(_never)
        for directory in ("new/1/deep", "old/2"):
            (place / directory).mkdir(parents=True)
        for file in ("new/1.kopia-entry", "old/2/f", "old/3"):
            (place / file).write_text("x")
        (place / "of a tenant").symlink_to(outside)
    stage.make(_never)
    assert sorted(path.name for path in place.rglob("*")) == ["new", "old"]
    assert [*outside.iterdir()] == [outside / "f"]
    stage.remove(_never)
    assert not [*(tmp_path / "volume").iterdir()]


def _unit(name: str, size: int, **more: Any) -> Unit:
    return Unit(name.encode(), {"name": name, "type": "f", "size": size, **more})


def _directory(name: str, size: int, files: int) -> Unit:
    summary = {"size": size, "files": files, "dirs": 1, "maxTime": "2020-01-02T00:00:00Z"}
    return Unit(name.encode(), {"name": name, "type": "d", "mtime": "2020-01-01T00:00:00Z", "summ": summary})


@pytest.mark.parametrize(
    ("units", "room_bytes", "runs"),
    [
        ([_unit("a", 4), _unit("b", 4), _unit("c", 4)], 8, ["ab", "c"]),
        ([_unit("a", 99), _unit("b", 1)], 8, ["a", "b"]),
        ([_unit("a", 8), _unit("b", 99, type="s")], 8, ["ab"]),
        ([_directory("a", 1, 30_000), _directory("b", 1, 30_000)], 8, ["a", "b"]),
        ([_unit("a", 1)] * 4001, 8000, ["a" * 4000, "a"]),
    ],
    ids=["room", "no room", "a link", "entries", "arguments"],
)
def test_one_kopia_writes_what_there_is_room_for_or_one(units: list[Unit], room_bytes: int, runs: list[str]) -> None:
    pending = PendingUnits(io.BytesIO())
    for unit in units:
        pending.add(unit)
    taken = []
    while pending.count:
        taken.append("".join(unit.path.decode() for unit in pending.take(room_bytes)))
    assert (taken, pending.size_bytes) == (runs, 0)
    # What was taken is forgotten.
    pending.add(units[0])
    assert pending.take(room_bytes) == [units[0]]


def test_a_placeholder_has_the_time_that_kopia_gives_a_directory() -> None:
    assert json.loads(_directory("a", 1, 1).placeholder)["mtime"] == "2020-01-02T00:00:00Z"
    assert json.loads(_unit("a", 1).placeholder) == {"name": "a", "type": "f", "size": 1}


_TIME = 1_600_000_000_123_456_789
_ENTRY: JsonDict = {"name": "f", "type": "f", "mode": "0644", "mtime": "2020-09-13T12:26:40.123456789Z", "size": 7}
_ENTRY |= {"uid": 5, "gid": 6}


_INCREMENTAL = InPlace(incremental=True)


def _status(mode: int = stat.S_IFREG | 0o644, **changes: Any) -> os.stat_result:
    """Return the status of a file that is equal to the entry, apart from `changes`."""
    fields = {"st_mode": mode, "st_uid": 5, "st_gid": 6, "st_size": 7, "st_mtime_ns": _TIME, "st_nlink": 1}
    return cast("os.stat_result", SimpleNamespace(**fields | changes))


def _decide(rule: InPlace, *, changed: Fingerprints | None = None, precision_ns: int = 1, **changes: Any) -> Step:
    return decide_file(_ENTRY, _status(**changes), rule, path=b"a/f", changed=changed, precision_ns=precision_ns)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, Step.KEEP),
        ({"st_size": 8}, Step.WRITE),
        ({"st_mtime_ns": _TIME + 1}, Step.WRITE),
        ({"st_mtime_ns": _TIME - 1_999_999_999}, Step.WRITE),
        ({"st_mode": stat.S_IFREG | 0o4644}, Step.SET),
        ({"st_uid": 0}, Step.SET),
        ({"st_gid": 0}, Step.SET),
        ({"st_gid": 0, "st_nlink": 2}, Step.WRITE),
        ({"st_nlink": 2}, Step.KEEP),
        ({"st_mode": stat.S_IFLNK | 0o777}, Step.WRITE),
        ({"st_mode": stat.S_IFDIR | 0o644}, Step.WRITE),
    ],
)
def test_a_file_is_written_or_set_unless_it_is_equal(changes: dict[str, Any], step: Step) -> None:
    assert _decide(_INCREMENTAL, **changes) is step
    assert _decide(InPlace(), **changes) is Step.WRITE


@pytest.mark.parametrize(("precision_ns", "step"), [(1, Step.WRITE), (100, Step.KEEP)])
def test_times_are_compared_as_the_volume_keeps_them(precision_ns: int, step: Step) -> None:
    assert _decide(_INCREMENTAL, precision_ns=precision_ns, st_mtime_ns=_TIME // 100 * 100) is step
    assert decide_file(_ENTRY, None, _INCREMENTAL) is Step.WRITE


@pytest.mark.parametrize(
    ("path", "changes", "step"),
    [
        (b"a/g", {}, Step.KEEP),
        (b"a/g", {"st_mtime_ns": 0}, Step.SET),
        (b"a/g", {"st_mtime_ns": 0, "st_nlink": 2}, Step.WRITE),
        (b"a/f", {}, Step.WRITE),
    ],
)
def test_compared_content_counts_and_the_time_does_not(path: bytes, changes: dict[str, Any], step: Step) -> None:
    changed = Fingerprints()
    changed.add_text(path)
    assert _decide(_INCREMENTAL, changed=changed, **changes) is step


_LINK: JsonDict = {"name": "l", "type": "s", "mtime": _ENTRY["mtime"], "uid": 5, "gid": 6, "size": 3, "obj": "ab12"}


@pytest.mark.parametrize(
    ("rule", "obj", "changes", "step"),
    [
        (_INCREMENTAL, "ab12", {}, Step.READ),
        (_INCREMENTAL, "ab12", {"st_nlink": 2}, Step.WRITE),
        (_INCREMENTAL, "ab12", {"mode": stat.S_IFREG | 0o644}, Step.WRITE),
        (_INCREMENTAL, "Zab12", {}, Step.WRITE),
        (InPlace(), "ab12", {}, Step.WRITE),
    ],
)
def test_the_target_of_a_link_is_read_if_need_be(rule: InPlace, obj: str, changes: dict[str, Any], step: Step) -> None:
    status = _status(**{"mode": stat.S_IFLNK | 0o777, **changes})
    assert decide_link(_LINK | {"obj": obj}, status, rule) is step
    assert decide_link(_LINK, None, rule) is Step.WRITE


@pytest.mark.parametrize(
    ("changes", "step"), [({}, Step.KEEP), ({"st_uid": 0}, Step.SET), ({"st_mtime_ns": 1}, Step.SET)]
)
def test_owner_and_time_of_a_link_with_the_same_target_are_set(changes: dict[str, Any], step: Step) -> None:
    assert decide_same_link(_LINK, _status(stat.S_IFLNK | 0o777, **changes)) is step
