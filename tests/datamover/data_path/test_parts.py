"""Which parts a snapshot with too many entries is restored in, and the runs of kopia for them."""

import errno
import json
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from core.errors import DataPathError, KopiaError
from core.models.base import JsonDict
from datamover.data_path import parts as parts_module
from datamover.data_path.parts import SKIP_EXISTING, SPARSE, Part, PartRestorer, Parts, Placeholders, find_parts
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.data_paths import restore_data_path
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


class _Reader(Repository):
    """Shows directories of `_TREE`, and notes which."""

    def __init__(self, folder: Path) -> None:
        self.work_dir = WorkDir(folder, folder)
        self.shown: list[str] = []

    async def call(self, attempted: str, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        verb, name = arguments
        assert verb == "show"
        assert output_fd is not None
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
        (9, {"many": 90}, [""]),
        (5, {"many/left": 40, "many/right": 50}, ["", "many"]),
        (4, {"many/left": 40} | {f"many/right/{number}": 1 for number in range(5)}, ["", "many", "many/right"]),
    ],
)
async def test_what_does_not_fit_is_split(
    tmp_path: Path, fitting: int, paths: dict[str, int], split: list[str]
) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), fitting)
    assert {part.path: part.size_bytes for part in found.parts} == {"z": 5, "few": 30, "l": 0} | paths
    assert len(found.parts) == 3 + len(paths)
    assert [one.path for one in found.split] == split


@pytest.mark.parametrize(("name", "most"), [("_MOST_PARTS", 7), ("_MOST_ALONE", 6)])
async def test_a_directory_of_too_many_parts_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(parts_module, name, most)
    found = await find_parts(_Reader(tmp_path), _snapshot(), 4)
    assert (len(found.parts), found.largest) == (5, Part("many/right", 5, 50))
    assert found.largest.name == "many/right of the snapshot"
    monkeypatch.setattr(parts_module, name, 1)
    assert (await find_parts(_Reader(tmp_path), _snapshot(), 4)).parts == [Part("", 14, 130)]


def _paths(parts: Parts, fitting: int) -> list[list[str]]:
    return sorted([part.path for part in run] for run in parts.runs(Path("/t"), fitting))


async def test_directories_are_restored_together_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    assert _paths(found, 12) == [["few", "many/left", "many/right"], ["l"], ["z"]]
    assert _paths(found, 11) == [["few", "many/left"], ["l"], ["many/right"], ["z"]]
    assert _paths(found, 6) == [["few"], ["l"], ["many/left"], ["many/right"], ["z"]]
    monkeypatch.setattr(parts_module, "_PATHS_BYTES", len("/t/few.kopia-entry/t/many/left.kopia-entry") + 20)
    assert _paths(found, 12) == [["few", "many/left"], ["l"], ["many/right"], ["z"]]


@pytest.mark.parametrize(
    ("path", "placeholder"),
    [("a/" + "d" * 243, True), ("a/" + "d" * 244, False), ("ü" * 122, False), ("d/" * 1700 + "d", True)],
)
def test_a_name_that_is_too_long_for_a_placeholder_has_none(path: str, placeholder: bool) -> None:
    assert bool(Part(path, 5, 5, "{}").placeholder) is placeholder
    assert not Part("d/" * 1800 + "d", 5, 5, "{}").placeholder


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a\0b", "x.kopia-entry"])
async def test_a_name_that_must_not_be_written_is_no_part(
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
    (run,) = [run for run in found.runs(tmp_path, 99) if len(run) > 1]
    made = Placeholders(tmp_path, run)
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


async def test_what_is_refused_of_split_directories_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await find_parts(_Reader(tmp_path), _snapshot(), 5)
    (tmp_path / "many").touch()
    assert found.make_directories(tmp_path, lambda: False) == {"many"}
    assert found.set_attributes(tmp_path, lambda: False) == 1
    # A target that fails is no refusal.
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DataPathError, match=r"^cannot restore directory /: No space left on device$"):
        found.make_directories(tmp_path, lambda: False)


_REFUSED = "ERROR error restoring: restore error: copy file: error creating file: open /t/a:b: invalid argument"
_DIRECTORY = json.dumps({"type": "d", "obj": "k1"})


def _restorer(target: Path, answers: Sequence[KopiaAnswer], **more: Any) -> tuple[PartRestorer, list[list[str]]]:
    """Return a restorer whose kopia gives these answers, and the arguments that it will get."""
    calls: list[list[str]] = []
    left = list(answers)

    async def run(attempt: Callable[[], Awaitable[KopiaAnswer]]) -> KopiaAnswer:
        return await attempt()

    async def move(_: object, __: str, *arguments: str, on_line: Callable[[str], None], **___: object) -> KopiaAnswer:
        calls.append([one.replace(str(target), "/t") for one in arguments[1:]])
        answer = left.pop(0)
        for line in answer.lines:
            on_line(line)
        return answer

    data_path = restore_data_path()
    data_path.run = move  # type: ignore[assignment,method-assign]  # kopia's place
    snapshot, repository = Snapshot("id", "s", "", "k", 2, 2), Mock(run=run)
    return PartRestorer(repository, snapshot, target, ["-f", SKIP_EXISTING], KopiaFiles(), data_path, **more), calls


def _answer(exit_code: int, *lines: str) -> KopiaAnswer:
    return KopiaAnswer("restore", exit_code, b"", list(lines))


async def test_a_refusal_is_ignored_by_a_second_kopia_and_by_those_of_later_parts(tmp_path: Path) -> None:
    answers = [_answer(1, _REFUSED), _answer(0, "ignored error open /t/a:b: invalid argument on a:b"), _answer(0)]
    restorer, calls = _restorer(tmp_path, answers)
    assert not restorer.refused
    await restorer.restore(Parts([Part("f", 1, 1), Part("g", 1, 1)]), 9)
    assert calls == [
        ["id/f", "/t/f", "-f", SKIP_EXISTING],
        # What the first one has left unfinished may look finished.
        ["id/f", "/t/f", "-f", "--ignore-errors"],
        ["id/g", "/t/g", "-f", SKIP_EXISTING, "--ignore-errors"],
    ]
    assert restorer.refused
    # A target that is known to refuse needs one kopia.
    restorer, calls = _restorer(tmp_path, [_answer(0)], tolerant=True)
    await restorer.restore(Parts([Part("", 1, 1)]), 9)
    assert calls == [["id", "/t", "-f", SKIP_EXISTING, "--ignore-errors"]]
    assert not restorer.refused


@pytest.mark.parametrize(
    ("answers", "tolerant"),
    [
        ([_answer(1, "ERROR error restoring: restore error: copy file: no space left on device")], False),
        ([_answer(0, "ignored error copy file: error creating file: open /t/f: no space left on device on f")], True),
        ([_answer(1, _REFUSED), _answer(1, "ERROR unable to open repository")], False),
    ],
    ids=["no refusal", "ignored, and no refusal", "the second kopia fails"],
)
async def test_any_other_error_ends_the_restore(tmp_path: Path, answers: Sequence[KopiaAnswer], tolerant: bool) -> None:
    restorer, calls = _restorer(tmp_path, answers, tolerant=tolerant)
    with pytest.raises(KopiaError):
        await restorer.restore(Parts([Part("", 1, 1)]), 9)
    assert len(calls) == len(answers)


@pytest.mark.parametrize(("block_bytes", "flags"), [(65536, [SPARSE]), (1 << 20, [])])
async def test_kopia_writes_holes_only_where_its_buffer_has_room_for_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, flags: list[str]
) -> None:
    """Else it would crash at the first file: with NFS, CephFS and ZFS."""
    blocks = {tmp_path.parent: block_bytes, tmp_path: 4096, tmp_path / "d": 4096}
    monkeypatch.setattr(os, "statvfs", lambda path: Mock(f_bsize=blocks[path]))
    restorer, calls = _restorer(tmp_path, [_answer(0), _answer(0)])
    restorer.flags = [SPARSE]
    await restorer.restore(Parts([Part("", 1, 1), Part("d/f", 1, 1)]), 9)
    assert calls == [["id", "/t", *flags], ["id/d/f", "/t/d/f", SPARSE]]


async def test_placeholders_are_made_for_each_kopia_and_none_stays(tmp_path: Path) -> None:
    """kopia removes a directory's once it has finished that, and no other one."""
    parts = [Part(name, 1, 1, _DIRECTORY) for name in ("d", "e", "no/such")]
    restorer, calls = _restorer(tmp_path, [_answer(1, _REFUSED), _answer(0)])
    await restorer.restore(Parts(parts), 9)
    assert [call[:2] for call in calls] == [["/t/d.kopia-entry", "/t/e.kopia-entry"]] * 2
    assert not [*tmp_path.iterdir()]
    # One for a directory that the target has refused cannot be made.
    assert restorer.refusals == 1
    restorer, _ = _restorer(tmp_path, [_answer(1, "ERROR unable to open repository")])
    with pytest.raises(KopiaError):
        await restorer.restore(Parts(parts), 9)
    assert not [*tmp_path.iterdir()]
    # No kopia runs for parts whose directory was refused.
    restorer, calls = _restorer(tmp_path, [])
    await restorer.restore(Parts([Part(f"no/{name}", 1, 1, _DIRECTORY) for name in "de"]), 9)
    assert (calls, restorer.refusals) == ([], 2)
