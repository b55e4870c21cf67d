from pathlib import Path
from tempfile import TemporaryFile

import pytest

from core.errors import DataPathError
from core.models.base import JsonDict
from datamover.data_path.links import Links, TargetLinks, find_links, read_entries, remove_links
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.stored_directories import StoredDirectories


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


def test_all_links_are_found_and_hard_ones_on_request(target: Path) -> None:
    (target / "one").write_text("")
    (target / "a" / "two").hardlink_to(target / "one")
    (target / "alone").write_text("")
    with TemporaryFile() as file:
        found = TargetLinks(file)
        find_links(target, _go_on, found, hard=True)
        (part,) = found.in_parts()
    links = [b"a/relative", b"a/up", b"absolute-in", b"chain", b"dangling", b"in", b"out"]
    assert sorted(part.symbolic) == links
    assert found.symbolic == len(links)
    assert [sorted(names) for names in part.hard.values()] == [[b"a/two", b"one"]]
    assert sorted(part.paths) == sorted([*links, b"a/two", b"one"])
    assert found.entries == len(part.paths) + len(["a", "alone"])
    with TemporaryFile() as file:
        found = TargetLinks(file)
        find_links(target, _go_on, found)
        assert [one.hard for one in found.in_parts()] == [{}]
    with pytest.raises(DataPathError, match=r"cannot read target .*missing: No such file or directory"):
        find_links(target / "missing", _go_on, found)


def test_many_links_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamover.data_path.links._READ_AT_A_TIME", 2)
    with TemporaryFile() as file:
        found = TargetLinks(file)
        for name in (b"a", b"b\n", b"\xff"):
            found.add(name)
        for name in (b"f", b"g"):
            found.add(name, (1, 2, 2))
        parts = list(found.in_parts())
    assert [one.symbolic for one in parts] == [[b"a", b"b\n"], [b"\xff"], []]
    assert [one.hard for one in parts] == [{}, {(1, 2, 2): [b"f"]}, {(1, 2, 2): [b"g"]}]
    assert parts[1].in_the_way({b"f": _CONTENT, b"g": _CONTENT}) == [b"f"]


_CONTENT: JsonDict = {"type": "f", "obj": "1", "mode": "0644", "mtime": "2024-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("entries", "in_the_way"),
    [
        ({}, []),
        ({"f": _CONTENT, "g": _CONTENT}, []),
        ({"f": _CONTENT}, ["f"]),
        ({"f": _CONTENT, "g": {**_CONTENT, "obj": "2"}}, ["f", "g"]),
        ({"f": _CONTENT, "g": {**_CONTENT, "mode": "0600"}}, ["f", "g"]),
        ({"f": _CONTENT, "g": {"type": "s"}}, ["f"]),
        ({"f": {"type": "d"}, "g": {"type": "d"}}, []),
    ],
    ids=["of others", "alike", "one", "other content", "other mode", "one a link", "directories"],
)
def test_hard_links_are_in_the_way_unless_all_are_alike(entries: dict[str, JsonDict], in_the_way: list[str]) -> None:
    found = Links(hard={(1, 2, 2): [b"f", b"g"]})
    named = {name.encode(): {**entry, "name": name} for name, entry in entries.items()}
    assert found.in_the_way(named) == [name.encode() for name in in_the_way]
    # One more name is elsewhere.
    assert Links(hard={(1, 2, 3): [b"f", b"g"]}).in_the_way({b"f": _CONTENT, b"g": _CONTENT}) == [b"f", b"g"]


def test_only_links_are_removed(target: Path) -> None:
    (target / "file").write_text("kept")
    (target / "f").write_text("kept")
    (target / "g").hardlink_to(target / "f")
    remove_links(target, [b"out"], lambda: True)
    assert (target / "out").is_symlink()
    remove_links(target, [b"out", b"a/relative", b"file", b"missing", b"in/up", b"missing/x", b"f", b"g"], _go_on)
    assert not (target / "out").is_symlink()
    assert not (target / "a" / "relative").is_symlink()
    assert (target / "file").read_text() == "kept"
    # Its path leads through a link.
    assert (target / "a" / "up").is_symlink()
    assert not (target / "f").exists()
    assert (target / "g").read_text() == "kept"


async def test_entries_of_one_depth_are_read_together(tmp_path: Path) -> None:
    directories = {"d": "Ik1", "e": "k2", "g": "k3"}
    root: list[JsonDict] = [{"name": name, "type": "d", "obj": obj} for name, obj in directories.items()]
    objects: dict[str, list[JsonDict]] = {
        "k0": [*root, {"name": "l", "type": "s"}, {"name": "\ufffd", "type": "f"}],
        "Ik1": [{"name": "f", "type": "f"}],
        "k2": [{"name": "f", "type": "s"}],
        "k3": [],
    }
    kopia, snapshot = StoredDirectories(objects, WorkDir(tmp_path, tmp_path)), Snapshot("id", "s", "", "k0", 0, 0)
    assert await read_entries(kopia, snapshot, []) == {}
    assert kopia.received == []
    paths = [b"d", b"l", b"\xff", b"d/f", b"d/x", b"l/x", b"missing/x/y", b"e/f", b"g/f"]
    found = await read_entries(kopia, snapshot, paths)
    types = {path: entry["type"] for path, entry in found.items()}
    assert types == {b"d": "d", b"l": "s", b"\xff": "f", b"d/f": "f", b"e/f": "s"}
    assert kopia.received == [("content", "show", "k0"), ("content", "show", "k2", "k3"), ("show", "Ik1")]
