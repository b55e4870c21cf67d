"""What is done with each file of a restore in place, and how much one kopia writes of what is still to be written."""

import io
import json
import os
import stat
from typing import Any

import pytest

from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from datamover.data_path.finished import Fingerprints
from datamover.data_path.stage import PendingUnits, Step, Unit, decide_file, decide_link, decide_same_link


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
def test_one_kopia_writes_what_there_is_room_for_or_a_single_unit(
    units: list[Unit], room_bytes: int, runs: list[str]
) -> None:
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
_ENTRY: JsonDict = {
    "name": "f",
    "type": "f",
    "mode": "0644",
    "mtime": "2020-09-13T12:26:40.123456789Z",
    "uid": 5,
    "gid": 6,
    "size": 7,
}
FULL, INCREMENTAL = InPlace(), InPlace(incremental=True)


class Status:
    """A file that is equal to the entry, apart from `changes`."""

    def __init__(self, **changes: Any) -> None:
        self.__dict__ |= {
            "st_mode": stat.S_IFREG | 0o644,
            "st_uid": 5,
            "st_gid": 6,
            "st_size": 7,
            "st_mtime_ns": _TIME,
            "st_nlink": 1,
            **changes,
        }


def _decide(rule: InPlace, *, changed: Fingerprints | None = None, precision_ns: int = 1, **changes: Any) -> Step:
    status: os.stat_result = Status(**changes)  # type: ignore[assignment]  # as far as it is read
    return decide_file(_ENTRY, status, rule, path=b"a/f", changed=changed, precision_ns=precision_ns)


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
def test_a_file_is_written_unless_size_and_time_are_equal_and_then_its_attributes_are_set(
    changes: dict[str, Any], step: Step
) -> None:
    assert _decide(INCREMENTAL, **changes) is step
    assert _decide(FULL, **changes) is Step.WRITE


@pytest.mark.parametrize(("precision_ns", "step"), [(1, Step.WRITE), (100, Step.KEEP)])
def test_times_are_compared_as_the_volume_keeps_them(precision_ns: int, step: Step) -> None:
    assert _decide(INCREMENTAL, precision_ns=precision_ns, st_mtime_ns=_TIME // 100 * 100) is step


def test_what_is_not_there_is_written() -> None:
    assert decide_file(_ENTRY, None, INCREMENTAL) is Step.WRITE


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
    assert _decide(INCREMENTAL, changed=changed, **changes) is step


_LINK: JsonDict = {"name": "l", "type": "s", "mtime": _ENTRY["mtime"], "uid": 5, "gid": 6, "size": 3, "obj": "ab12"}


@pytest.mark.parametrize(
    ("rule", "obj", "changes", "step"),
    [
        (INCREMENTAL, "ab12", {}, Step.READ),
        (INCREMENTAL, "ab12", {"st_nlink": 2}, Step.WRITE),
        (INCREMENTAL, "ab12", {"st_mode": stat.S_IFREG | 0o644}, Step.WRITE),
        (INCREMENTAL, "Zab12", {}, Step.WRITE),
        (FULL, "ab12", {}, Step.WRITE),
    ],
    ids=["a link", "another name", "a file", "compressed", "full"],
)
def test_the_target_of_a_link_is_read_if_it_may_be_equal(
    rule: InPlace, obj: str, changes: dict[str, Any], step: Step
) -> None:
    status: os.stat_result = Status(**{"st_mode": stat.S_IFLNK | 0o777, **changes})  # type: ignore[assignment]  # as far as it is read
    assert decide_link(_LINK | {"obj": obj}, status, rule) is step
    assert decide_link(_LINK, None, rule) is Step.WRITE


@pytest.mark.parametrize(
    ("changes", "step"), [({}, Step.KEEP), ({"st_uid": 0}, Step.SET), ({"st_mtime_ns": 1}, Step.SET)]
)
def test_owner_and_time_of_a_link_with_the_same_target_are_set(changes: dict[str, Any], step: Step) -> None:
    status: os.stat_result = Status(**{"st_mode": stat.S_IFLNK | 0o777, **changes})  # type: ignore[assignment]  # as far as it is read
    assert decide_same_link(_LINK, status) is step
