"""What a probe file shows of a target, attributes of an entry, and a restore over files that are not writable."""

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.models.base import JsonDict
from datamover.data_path import probe
from datamover.data_path.probe import Attribute, Attributes, Probe, allow_writing, probe_target
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.runtime.work_dir import open_root
from tests.datamover.support.data_paths import back_up_volume, restore_data_path
from tests.datamover.support.mounts import need_root

_SNAPSHOT = Snapshot("id", "s", "", "k", 0, 0, links=1)
_SOUND = Probe(owner=True, mode=True, times=True, names=True, apart=True)


def _probe(target: Path, latest: str = "2020-09-13T12:26:40Z") -> Probe:
    root = {"uid": 1001, "gid": 1002, "summ": {"maxTime": latest}}
    found = probe_target(target, replace(_SNAPSHOT, root_entry=root), lambda: False)
    assert not [*target.iterdir()]
    return found


def _failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def _nothing(*_: object, **__: object) -> None:
    """Pretend to set something."""


def test_a_file_system_of_linux_is_sound(tmp_path: Path) -> None:
    need_root("owners")
    # An attempt that was killed left it.
    (tmp_path / ".nodeagent-probe-ä").touch()
    assert _probe(tmp_path) == _probe(tmp_path, "no time") == _SOUND
    assert _SOUND.sound
    # Nothing is known of a target that takes no file.
    assert not probe_target(tmp_path / "missing", _SNAPSHOT, lambda: False).sound


@pytest.mark.parametrize("name", [".nodeagent-probe-ä", ".nodeagent-probe-ä-link"])
def test_what_the_target_had_before_stays(tmp_path: Path, name: str) -> None:
    for text, link in (("theirs", None), (None, "elsewhere")):
        had = tmp_path / name
        had.symlink_to(link) if link else had.write_text(str(text))
        found = probe_target(tmp_path, _SNAPSHOT, lambda: False)
        assert not found.sound
        assert [*tmp_path.iterdir()] == [had]
        assert (str(had.readlink()) == link) if link else (had.read_text() == text)
        had.unlink()


@pytest.mark.parametrize(
    ("call", "wrong", "fails"),
    [
        ("fchown", _nothing, {"owner"}),
        ("fchown", _failing(errno.EPERM), {"owner"}),
        ("fchown", _failing(errno.EINVAL), {"owner", "refuses"}),
        ("fchmod", _nothing, {"mode"}),
        ("utime", _nothing, {"times"}),
        ("utime", _failing(errno.EOPNOTSUPP), {"times", "refuses"}),
        ("symlink", _failing(errno.EPERM), {"names", "refuses"}),
    ],
)
def test_what_is_refused_or_only_pretended_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, wrong: Callable[..., Any], fails: set[str]
) -> None:
    need_root("owners")
    monkeypatch.setattr(os, call, wrong)
    found = _probe(tmp_path)
    assert {name for name in ("owner", "mode", "times", "names") if not getattr(found, name)} == fails - {"refuses"}
    assert found.refuses == ("refuses" in fails)


@pytest.mark.parametrize(
    "same", [".NODEAGENT-PROBE-Ä", ".NODEAGENT-PROBE-ä", ".nodeagent-probe-a\u0308", ".nodeagent-probe-ä."]
)
def test_a_name_that_is_found_by_another_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: str) -> None:
    need_root("owners")
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: stat(".nodeagent-probe-ä" if path == same else path, **more))
    assert _probe(tmp_path) == Probe(owner=True, mode=True, times=True, names=False)


def test_a_time_that_the_target_cannot_keep_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_root("owners")
    utime, last = os.utime, 2**31 * 10**9
    monkeypatch.setattr(os, "utime", lambda fd, ns: utime(fd, ns=(min(ns[0], last), min(ns[1], last))))
    assert _probe(tmp_path).times
    assert not _probe(tmp_path, "2100-01-01T00:00:00Z").times


@pytest.mark.parametrize(("step_ns", "precision_ns"), [(1, 1), (100, 100), (10**9, 10**9), (7, 1)])
def test_cut_times_have_a_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ns: int, precision_ns: int
) -> None:
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda fd, ns: utime(fd, ns=(ns[0], ns[1] // step_ns * step_ns)))
    found = _probe(tmp_path)
    assert (found.precision_ns, found.times) == (precision_ns, True)


_ENTRY = {"type": "f", "mode": "40000750", "uid": 1001, "gid": 1002, "mtime": "2020-09-13T12:26:40.123456789Z"}
_NS = 1_600_000_000_123_456_789
_OLD = {"type": "d", "mtime": "1970-01-01T00:00:01Z", "summ": {"maxTime": "1970-01-01T00:00:02Z"}}


def _set(path: Path, attributes: Attributes, unset: Collection[str]) -> None:
    with open_root(path.parent) as fd:
        for change in attributes.changes(path.name, fd, unset):
            change()


def test_what_differs_is_named_and_set(tmp_path: Path) -> None:
    need_root("owners")
    (file := tmp_path / "f").touch(0o600)
    os.utime(file, ns=(_NS - 3 * 10**9, _NS - 3 * 10**9))
    attributes = Attributes.of(_ENTRY)
    unset = attributes.find_unset(file.lstat())
    assert unset == {
        Attribute.OWNER: "owner 0:0 instead of 1001:1002",
        Attribute.MODE: "mode 600 instead of 4750",
        Attribute.TIME: "time 1599999997 instead of 1600000000",
    }
    _set(file, attributes, unset)
    assert attributes.find_unset(file.lstat()) == {}
    assert file.lstat().st_mtime_ns == _NS
    # A new owner takes no setuid away.
    os.chown(file, 0, 0)
    file.chmod(0o4750)
    _set(file, attributes, {Attribute.OWNER})
    assert file.lstat().st_mode & 0o7777 == 0o4750


def test_a_link_is_not_followed_and_has_no_mode(tmp_path: Path) -> None:
    need_root("owners")
    (other := tmp_path / "other").touch(0o600)
    (link := tmp_path / "l").symlink_to("other")
    before = other.lstat()
    attributes = Attributes.of({**_ENTRY, "type": "s"})
    assert Attribute.MODE not in attributes.find_unset(link.lstat())
    _set(link, attributes, set(Attribute))
    # A tenant may replace a file by a link.
    _set(link, Attributes.of(_ENTRY), {Attribute.MODE})
    assert attributes.find_unset(link.lstat()) == {}
    assert other.lstat() == before


@pytest.mark.parametrize(
    ("entry", "root", "time_ns"),
    [
        (_OLD, False, 2 * 10**9),
        (_OLD, True, 10**9),
        ({"type": "f", "mtime": "1969-12-31T23:59:59.5Z"}, False, -500_000_000),
        ({"type": "f", "mtime": "30828-01-01T00:00:00Z"}, False, None),
        ({"type": "f"}, False, 0),
    ],
    ids=["directory", "root", "before 1970", "invalid", "absent"],
)
def test_the_time_is_the_one_that_kopia_sets(entry: JsonDict, root: bool, time_ns: int | None) -> None:
    assert Attributes.of(entry, root=root) == Attributes((0, 0), 0, time_ns)


def _make(folder: Path) -> dict[str, Path]:
    """Make a read-only directory with a file and a link in it, and return its paths."""
    (folder / "ro").mkdir(parents=True)
    (folder / "ro" / "file").touch(0o444)
    (folder / "ro" / "link").symlink_to("file")
    (folder / "ro").chmod(0o555)
    return {name: folder / "ro" / name for name in ("", "file", "link")}


@pytest.mark.processes
@pytest.mark.parametrize("files", [True, False], ids=["files", "directories-only"])
async def test_only_what_is_written_may_be(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: bool
) -> None:
    monkeypatch.setattr(probe, "_overrides_modes", lambda: False)
    target, outside = tmp_path / "target", tmp_path / "outside"
    backup = await back_up_volume(mover_repository, _make(tmp_path / "volume")[""].parent)
    snapshot = await read_snapshot(mover_repository, backup.snapshot_id)
    again, others = _make(target), _make(target / "others")
    outside.touch(0o400)
    again["link"].unlink()
    again["link"].symlink_to(outside)
    target.chmod(0o500)
    await allow_writing(mover_repository, snapshot, target, data_path=restore_data_path(), files=files)
    modes = {name: oct(path.lstat().st_mode & 0o777) for name, path in again.items()}
    assert modes == {"": "0o755", "file": "0o644" if files else "0o444", "link": "0o777"}
    assert [oct(path.stat().st_mode & 0o777) for path in (target, outside)] == ["0o700", "0o400"]
    assert [oct(others[name].stat().st_mode & 0o777) for name in ("", "file")] == ["0o555", "0o444"]
