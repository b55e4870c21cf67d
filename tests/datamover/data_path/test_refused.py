"""What a target lacks of a snapshot, found by comparing both."""

import errno
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import pytest

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES
from core.errors import DataPathError, IncompleteRestoreError, KopiaError
from core.models.base import JsonDict
from datamover.data_path.probe import Probe
from datamover.data_path.refused import Directories, Folded, Refused, TargetComparison, Unit
from datamover.data_path.stage import PendingUnits
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.data_paths import restore_data_path
from tests.datamover.support.stored_directories import StoredDirectories

_AT = 1_600_000_000
_SOUND = Probe(owner=True, mode=True, times=True, names=True)


def _entry(name: str, kind: str = "f", **more: object) -> JsonDict:
    owner = {"uid": os.geteuid(), "gid": os.getegid()}
    return {"name": name, "type": kind, "mode": "640", "mtime": "2020-09-13T12:26:40Z", **owner, **more}


def _directory(name: str, files: int) -> JsonDict:
    summary = {"files": files, "dirs": 1, "maxTime": "2020-09-13T12:26:40Z"}
    return _entry(name, "d", mode="750", obj=f"k{name or 'root'}", summ=summary)


@pytest.fixture
def kopia(tmp_path: Path) -> StoredDirectories:
    """A snapshot of `f`, `l`, and `d` with `d/g`."""
    objects = {"kroot": [_entry("f", size=1), _entry("l", "s"), _directory("d", 1)], "kd": [_entry("g", size=2)]}
    return StoredDirectories(objects, WorkDir(tmp_path, tmp_path))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """It has all of the snapshot, and a file besides."""
    (target := tmp_path / "target").mkdir()
    (target / "d").mkdir()
    (target / "f").write_text("1")
    (target / "d" / "g").write_text("22")
    (target / "l").symlink_to("f")
    (target / "more").touch()
    for path in (target / "f", target / "d" / "g", target / "d", target):
        path.chmod(0o750 if path.is_dir() else 0o640)
    for path in (*target.iterdir(), target / "d" / "g", target):
        os.utime(path, (_AT, _AT), follow_symlinks=False)
    return target


async def _find(kopia: StoredDirectories, target: Path, *, probe: Probe = _SOUND, repair: bool = False) -> Refused:
    snapshot = Snapshot("id", "s", "", "kroot", 3, 4, root_entry=_directory("", 4))
    return await TargetComparison(kopia, snapshot, target, probe, restore_data_path(), repair=repair).run()


@pytest.mark.parametrize("names", [True, False], ids=["names are kept", "names are not kept"])
async def test_nothing_is_found_in_a_complete_target(kopia: StoredDirectories, target: Path, names: bool) -> None:
    found = await _find(kopia, target, probe=replace(_SOUND, names=names))
    assert found == Refused()
    found.check("restore", None)
    assert found.unset_text is None


async def test_what_is_missing_counts_with_what_is_below_it(kopia: StoredDirectories, target: Path) -> None:
    (target / "d" / "g").unlink()
    (target / "d").rmdir()
    (target / "f").write_text("longer")
    (target / "l").unlink()
    (target / "l").mkdir()
    found = await _find(kopia, target)
    assert found.missing == 4
    assert found.missing_names == ["f (6 of 1 bytes)", "l (something else is there)", "d (No such file or directory)"]
    with pytest.raises(IncompleteRestoreError, match=r"all others are restored: 4 missing: f \(6 of 1 bytes\); l"):
        found.check("restore snapshot id to /t", "open /t/d: invalid argument")


async def test_a_link_in_the_place_of_a_directory_is_not_followed(kopia: StoredDirectories, target: Path) -> None:
    (target / "d").rename(target.parent / "outside")
    (target / "d").symlink_to(target.parent / "outside")
    (target.parent / "outside" / "g").chmod(0o600)
    assert (await _find(kopia, target, repair=True)).missing_names == ["d (something else is there)"]
    assert (target.parent / "outside" / "g").stat().st_mode & 0o777 == 0o600


async def test_each_attribute_that_differs_is_counted_and_named(kopia: StoredDirectories, target: Path) -> None:
    (target / "d" / "g").chmod(0o600)
    os.utime(target / "d" / "g", (_AT + 2, _AT + 2))
    (target / "d").chmod(0o700)
    os.utime(target / "f", (_AT + 1, _AT + 1))
    found = await _find(kopia, target)
    assert (found.missing, found.unset, found.counts) == (0, 2, {"mode": 2, "time": 1})
    assert found.unset_text == (
        "the target did not take the mode of 2, the time of 1 of the entries: "
        "d/g (mode 600 instead of 640, time 1600000002 instead of 1600000000); d (mode 700 instead of 750)"
    )


async def test_what_kopia_left_unset_after_an_error_is_set_and_what_is_only_pretended_found(
    kopia: StoredDirectories, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (target / "d" / "g", target / "d", target):
        path.chmod(0o700)
        os.utime(path, (0, 0))
    assert await _find(kopia, target, repair=True) == Refused()
    assert {path.stat().st_mode & 0o777 for path in (target / "d", target)} == {0o750}
    (target / "f").chmod(0o600)
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    assert (await _find(kopia, target, repair=True)).unset_names == ["f (mode 600 instead of 640)"]


async def test_names_that_the_target_takes_for_one_are_missing_and_another_form_is_reported(
    kopia: StoredDirectories, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, kept, stat = kopia.objects["kroot"], {"F": "f", "D": "d"}, os.stat
    monkeypatch.setattr(os, "stat", lambda name, **more: stat(kept.get(name) or name, **more))
    kopia.objects["kroot"] = [*entries, _entry("F", size=7), _directory("D", 3)]
    found = await _find(kopia, target, probe=replace(_SOUND, names=False))
    assert (found.missing, found.unset) == (5, 0)
    assert found.missing_names == ["F (the target takes it for f)", "D (the target takes it for d)"]
    kopia.objects["kroot"] = entries
    (target / "f").rename(target / "F")
    os.utime(target, (_AT, _AT))
    kept["f"] = "F"
    found = await _find(kopia, target, probe=replace(_SOUND, names=False))
    assert found.unset_text == "the target did not take the name of 1 of the entries: f (another form of its name)"


@pytest.mark.parametrize(
    ("name", "other", "alike"),
    [
        ("zero\u200bwidth\ufe0f", "zerowidth", True),
        ("\ufb01le", "file", True),
        ("d\u0131n", "DIN", True),
        ("a\u0345\u0301", "a\u0301\u0399", True),
        ("\u0430", "a", False),
    ],
)
def test_names_that_any_target_may_take_for_one(name: str, other: str, alike: bool) -> None:
    folded, names = Folded(), (name, other, "third")
    folded.add([(Unit(b"d", {}), map(_entry, names))], Directories(BytesIO()), lambda: False)
    assert bool(folded) is folded.has_within(b"d") is alike
    assert [one for one in names if folded.has(f"d/{one}".encode())] == ([name, other] if alike else [])


@pytest.mark.parametrize("name", ["..", "a/b", "a\0b", ""])
async def test_a_name_that_no_file_can_have_is_not_looked_up(kopia: StoredDirectories, target: Path, name: str) -> None:
    kopia.objects["kd"] = [_entry(name, mode="600")]
    found = await _find(kopia, target, repair=True)
    assert (found.missing, found.unset) == (1, 0)


async def test_an_unread_directory_is_named(
    kopia: StoredDirectories, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def fail(fd: int) -> list[str]:
        names = listdir(fd)
        if "g" in names:
            raise PermissionError(13, "Permission denied")
        return names

    monkeypatch.setattr(os, "listdir", fail)
    found = await _find(kopia, target, probe=replace(_SOUND, names=False))
    assert (found.missing, found.uncompared) == (0, 1)
    assert found.unset_text == "the target does not let 1 entries be compared: d (Permission denied)"
    found.check("restore", None)
    error = r": not all are written \(kopia's first error: open\)\. Also, the target does"
    with pytest.raises(IncompleteRestoreError, match=error):
        found.check("restore", "open")


async def test_what_is_no_fault_of_the_target_is_an_error(
    kopia: StoredDirectories, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Directories, "inner_first", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            await _find(kopia, target)
    with pytest.raises(DataPathError, match=rf"^cannot open target {target}/missing: No such file"):
        await _find(kopia, target / "missing")
    kopia.objects["kroot"].append(_directory("e", 0))
    (target / "e").mkdir()
    kopia.objects["ke"] = {}  # type: ignore[assignment]  # no list
    with pytest.raises(KopiaError, match="kopia's output is not a directory"):
        await _find(kopia, target)
    with Path("/dev/full").open("r+b", buffering=0) as full, pytest.raises(DataPathError, match="No space left"):
        Directories(full).add(b"d", _directory("d", 1))
    with Path("/dev/full").open("r+b", buffering=0) as full, pytest.raises(DataPathError, match="No space left"):
        PendingUnits(full).add(Unit(b"d", _directory("d", 1)))


def test_names_of_any_length_leave_room_in_a_message() -> None:
    found = Refused()
    for number in range(20):
        found.add_missing(f"{number}/".encode() + "\N{SNOWMAN}".encode() * 1000, "x" * 100)
        found.add_unset(f"{number}/".encode() + b"\x01" * 1000, {"owner": "y" * 100})
    assert (found.missing, len(found.missing_names), len(found.unset_names)) == (20, 10, 10)
    with pytest.raises(IncompleteRestoreError) as failed:
        found.check("restore snapshot id to /t", "z" * 5000)
    assert len(str(failed.value).encode()) < TERMINATION_MESSAGE_LIMIT_BYTES
