"""What is still to be written in a restore in place, and how much of it one kopia writes."""

import io
import json
from typing import Any

import pytest

from datamover.data_path.units import PendingUnits, Unit


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
