"""Which parts a snapshot is restored in, if it has more entries than the memory limit suffices for."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataPathError
from core.models.base import JsonDict
from datamover.data_path import parts as parts_module
from datamover.data_path.parts import Part, Parts, find_parts
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.mounts import need_root


def _file(name: str, size: int = 1) -> JsonDict:
    return {"name": name, "type": "f", "size": size, "obj": f"f{name}"}


def _directory(name: str, files: int, **more: Any) -> JsonDict:
    return {"name": name, "type": "d", "obj": f"k{name}", "summ": {"files": files, "size": 10 * files}, **more}


_TREE = {
    "k": [_file("z", 5), _directory("many", 9), _directory("few", 3), {"name": "l", "type": "s", "obj": "l"}],
    "kmany": [_directory("left", 4), _directory("right", 5)],
    "kright": [_file(str(number)) for number in range(5)],
}


class _Reader:
    """Shows directories of `_TREE`, and notes which."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shown: list[str] = []

    @property
    def work_dir(self) -> WorkDir:
        return WorkDir(self._folder, self._folder)

    async def call(self, attempted: str, *arguments: str, output_fd: int) -> KopiaAnswer:
        verb, name = arguments
        assert verb == "show"
        self.shown.append(name)
        os.pwrite(output_fd, json.dumps({"stream": "kopia:directory", "entries": _TREE[name]}).encode(), 0)
        return KopiaAnswer(attempted, 0, b"", [])


def _snapshot(entries: int = 14) -> Snapshot:
    return Snapshot("id", "s", "", "k", 130, entries, root_entry={"name": "", "type": "d", "obj": "k"})


@pytest.mark.parametrize("fitting", [None, 14])
async def test_a_snapshot_that_fits_is_one_part(tmp_path: Path, fitting: int | None) -> None:
    reader = _Reader(tmp_path)
    assert await find_parts(reader, _snapshot(), fitting) == Parts([Part("", 14, 130)])
    assert reader.shown == []


@pytest.mark.parametrize(
    ("fitting", "paths", "split"),
    [
        (9, {"z": 5, "many": 90, "few": 30, "l": 0}, [""]),
        (5, {"z": 5, "few": 30, "l": 0, "many/left": 40, "many/right": 50}, ["", "many"]),
        (
            4,
            {"z": 5, "few": 30, "l": 0, "many/left": 40, **{f"many/right/{number}": 1 for number in range(5)}},
            ["", "many", "many/right"],
        ),
    ],
)
async def test_a_directory_that_does_not_fit_is_split(
    tmp_path: Path, fitting: int, paths: dict[str, int], split: list[str]
) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), fitting)
    assert {part.path: part.size_bytes for part in found.parts} == paths
    assert len(found.parts) == len(paths)
    assert [one.path for one in found.split] == split


@pytest.mark.parametrize(("name", "most"), [("_MOST_PARTS", 7), ("_MOST_ALONE", 6)])
async def test_a_directory_of_too_many_parts_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(parts_module, name, most)
    found = await find_parts(_Reader(tmp_path), _snapshot(), 4)
    assert (len(found.parts), found.largest, found.largest.name) == (
        5,
        Part("many/right", 5, 50),
        "many/right of the snapshot",
    )
    monkeypatch.setattr(parts_module, name, 1)
    assert (await find_parts(_Reader(tmp_path), _snapshot(), 4)).parts == [Part("", 14, 130)]


async def test_directories_are_restored_together_and_anything_else_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    runs = [[part.path for part in run] for run in found.runs()]
    assert sorted(runs) == [["few", "many/left", "many/right"], ["l"], ["z"]]
    monkeypatch.setattr(parts_module, "_PATHS_BYTES", len("few.kopia-entry"))
    runs = [[part.path for part in run] for run in found.runs()]
    assert sorted(runs) == [["few", "many/left"], ["l"], ["many/right"], ["z"]]


@pytest.mark.parametrize(("name", "placeholder"), [("d" * 243, True), ("d" * 244, False), ("ü" * 122, False)])
def test_a_name_that_is_too_long_for_a_placeholder_has_none(name: str, placeholder: bool) -> None:
    assert bool(Part(f"a/{name}", 5, 5, _directory(name, 5)).placeholder) is placeholder


async def test_a_directory_gets_its_attributes_once_what_is_in_it_is_restored(tmp_path: Path) -> None:
    need_root("owners")
    attributes = {"mode": "020000750", "uid": 1000, "gid": 1001, "mtime": "2020-09-13T12:26:40.123456Z"}
    root = {"type": "d", "obj": "kmany", **attributes}
    found = await find_parts(_Reader(tmp_path), Snapshot("id", "s", "", "k", 1, 9, root_entry=root), 8)
    target = tmp_path / "target"
    target.mkdir()
    found.make_directories(target, lambda: False)
    (target / "left").mkdir()
    found.set_attributes(target, lambda: False)
    status = target.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o2750, 1000, 1001)
    assert status.st_mtime_ns == 1_600_000_000_123_456_000


async def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    (tmp_path / "many").touch()
    with pytest.raises(DataPathError, match=r"^cannot restore directory many: File exists$"):
        found.make_directories(tmp_path, lambda: False)
