"""Which parts a snapshot is restored in, if it has more entries than the memory limit suffices for."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from core.errors import DataPathError
from core.models.base import JsonDict
from datamover.data_path import parts as parts_module
from datamover.data_path.parts import Part, Parts, Placeholders, find_parts
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.mounts import need_root


def _file(name: str, size: int = 1) -> JsonDict:
    return {"name": name, "type": "f", "size": size, "obj": f"f{name}"}


def _directory(name: str, files: int, **more: Any) -> JsonDict:
    return {"name": name, "type": "d", "obj": f"k{name}", "summ": {"files": files, "size": 10 * files}, **more}


_TREE: dict[str, list[JsonDict]] = {
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
        if name not in _TREE:
            return KopiaAnswer(attempted, 1, b"", ["ERROR no space left on device"])
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


def _paths(parts: Parts, target: Path, fitting: int) -> list[list[str]]:
    return [[part.path for part in run] for run in parts.runs(target, fitting)]


async def test_directories_are_restored_together_and_anything_else_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    target = Path("/t")
    assert sorted(_paths(found, target, 12)) == [["few", "many/left", "many/right"], ["l"], ["z"]]
    assert sorted(_paths(found, target, 11)) == [["few", "many/left"], ["l"], ["many/right"], ["z"]]
    assert sorted(_paths(found, target, 6)) == [["few"], ["l"], ["many/left"], ["many/right"], ["z"]]
    monkeypatch.setattr(parts_module, "_PATHS_BYTES", len("/t/few.kopia-entry/t/many/left.kopia-entry") + 20)
    assert sorted(_paths(found, target, 12)) == [["few", "many/left"], ["l"], ["many/right"], ["z"]]


@pytest.mark.parametrize(
    ("path", "placeholder"),
    [("a/" + "d" * 243, True), ("a/" + "d" * 244, False), ("ü" * 122, False), ("d/" * 1700 + "d", True)],
)
def test_a_name_that_is_too_long_for_a_placeholder_has_none(path: str, placeholder: bool) -> None:
    assert bool(Part(path, 5, 5, "{}").placeholder) is placeholder
    assert not Part("d/" * 1800 + "d", 5, 5, "{}").placeholder


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a\0b", "x.kopia-entry"])
async def test_a_name_that_the_mover_must_not_write_leaves_its_directory_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A tenant who writes to a volume that is backed up may choose it."""
    monkeypatch.setitem(_TREE, "kmany", [_directory(name, 4), _directory("right", 5)])
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    assert {part.path for part in found.parts} == {"z", "few", "l", "many"}
    assert found.largest == Part("many", 9, 90)


async def test_a_directory_that_cannot_be_listed_is_one_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = {"type": "d", "obj": "kbroken"}
    found = await find_parts(_Reader(tmp_path), Snapshot("id", "s", "", "k", 130, 14, root_entry=root), 5)
    assert found == Parts([Part("", 14, 130)], [])
    assert "cannot split the snapshot: snapshot id" in caplog.text


async def test_placeholders_are_made_beside_the_directories_and_follow_no_link(tmp_path: Path) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    target = tmp_path / "target"
    (target / "many").mkdir(parents=True)
    (tmp_path / "outside").write_text("unchanged")
    (target / "many" / "left.kopia-entry").symlink_to(tmp_path / "outside")
    (run,) = [run for run in found.runs(target, 99) if len(run) > 1]
    made = Placeholders(target, run)
    made.make(lambda: False)
    assert (tmp_path / "outside").read_text() == "unchanged"
    written = [json.loads(Path(path).read_text()) for path in made.paths]
    assert sorted(one["obj"] for one in written) == ["kfew", "kleft", "kright"]
    assert made.done == 3
    made.remove(lambda: False)
    assert [path.name for path in target.rglob("*")] == ["many"]


async def test_a_canceled_transfer_makes_no_more_placeholders(tmp_path: Path) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 9)
    runs = [run for run in found.runs(tmp_path, 99) if len(run) > 1]
    made = Placeholders(tmp_path, runs[0])
    made.make(lambda: made.done == 1)
    assert len([*tmp_path.glob("*.kopia-entry")]) == 1
    Placeholders(tmp_path).remove_left(lambda: False, began_empty=False)
    assert not [*tmp_path.glob("*.kopia-entry")]


async def test_a_directory_gets_its_attributes_once_what_is_in_it_is_restored(tmp_path: Path) -> None:
    need_root("owners")
    attributes = {"mode": "020000750", "uid": 1000, "gid": 1001, "mtime": "2020-09-13T12:26:40.123456789Z"}
    root = {"type": "d", "obj": "kmany", **attributes}
    found = await find_parts(_Reader(tmp_path), Snapshot("id", "s", "", "k", 1, 9, root_entry=root), 8)
    target = tmp_path / "target"
    target.mkdir()
    found.make_directories(target, lambda: False)
    (target / "left").mkdir()
    found.set_attributes(target, lambda: False)
    status = target.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o2750, 1000, 1001)
    assert status.st_mtime_ns == 1_600_000_000_123_456_789


async def test_what_the_target_refuses_of_split_directories_is_counted(tmp_path: Path) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    (tmp_path / "many").touch()
    assert found.make_directories(tmp_path, lambda: False) == {"many"}
    assert found.set_attributes(tmp_path, lambda: False) == 1


async def test_a_target_that_fails_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DataPathError, match=r"^cannot restore directory /: No space left on device$"):
        found.make_directories(tmp_path, lambda: False)
