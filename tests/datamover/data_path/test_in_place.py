"""What is done with each file of a restore in place."""

import os
import stat
from typing import Any

import pytest

from core.models.base import JsonDict
from core.models.in_place import InPlace
from datamover.data_path.finished import Fingerprints
from datamover.data_path.in_place import Step, decide_file

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
