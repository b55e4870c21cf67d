"""Which files a later attempt skips: those that are listed, and nothing that changed since."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from unittest.mock import Mock

import pytest

from datamover.data_path.finished import (
    FinishedList,
    WalkProgress,
    find_finished,
    find_unlisted,
    open_list,
    remove_list,
    remove_unlisted,
)
from datamover.runtime.work_dir import join

_NAME = ".list"
_OWNER = b"transfer 1"
_OLD_NS = 1_600_000_000_123_456_789


def _go_on() -> bool:
    return False


def _open(target: Path, owner: bytes = _OWNER) -> FinishedList:
    finished = open_list(target, _NAME, owner, _go_on)
    assert finished is not None
    return finished


def _finish(path: Path, content: str = "data") -> Path:
    """Do to a file what kopia does: write it, and set its times."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.utime(path, ns=(_OLD_NS, _OLD_NS))
    return path


def _record(finished: FinishedList, since_ns: int = 0) -> int:
    found = find_finished(finished.path.parent, since_ns, _go_on, WalkProgress())
    finished.append(found)
    return len(found)


def _unlisted(target: Path) -> list[bytes]:
    """Return what the next attempt does not skip."""
    finished = _open(target)
    assert finished.resumed
    found = find_unlisted(target, finished, _go_on, WalkProgress())
    return sorted(join(directory, name) for directory, names in found for name in names)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with a list of two finished files, and what must not be on it."""
    target = tmp_path / "target"
    target.mkdir()
    finished = _open(target)
    assert not finished.resumed
    _finish(target / "a" / "one")
    _finish(target / "two")
    (target / "partial").write_text("da")
    (target / "link").symlink_to("two")
    os.utime(target / "link", ns=(_OLD_NS, _OLD_NS), follow_symlinks=False)
    assert _record(finished) == 2
    return target


def test_finished_files_are_skipped_and_partial_ones_and_links_are_not(target: Path) -> None:
    assert _unlisted(target) == [b"link", b"partial"]
    progress = WalkProgress()
    assert list(find_unlisted(target, _open(target), _go_on, progress))
    assert (progress.listed_files, progress.listed_bytes) == (2, 8)


def _add_name(one: Path) -> None:
    (one.parent / "name").hardlink_to(one)
    (one.parent / "name").unlink()


def _exchange_directories(one: Path) -> None:
    """The files in them keep their times."""
    _finish(one.parent.with_name("b") / "one", "evil")
    one.parent.rename(one.parent.with_name("c"))
    one.parent.with_name("b").rename(one.parent)
    shutil.rmtree(one.parent.with_name("c"))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: _finish(one, "evil"),
        lambda one: _finish(one.with_name("other"), "evil").rename(one),
        lambda one: os.chown(one, one.stat().st_uid, one.stat().st_gid),
        lambda one: one.chmod(one.stat().st_mode),
        _add_name,
        _exchange_directories,
        lambda one: one.parent.rename(one.parent.with_name("elsewhere")),
    ],
    ids=["content", "another file", "owner", "mode", "another name", "directories", "place"],
)
def test_a_file_that_was_touched_since_is_not_skipped(target: Path, change: Callable[[Path], object]) -> None:
    change(target / "a" / "one")
    place = b"a/one" if (target / "a").exists() else b"elsewhere/one"
    assert _unlisted(target) == sorted([place, b"link", b"partial"])


def test_finished_directories_are_not_read_again(target: Path) -> None:
    os.utime(target / "a", ns=(_OLD_NS, _OLD_NS))
    progress = WalkProgress()
    now = _open(target).now_ns() + 1
    find_finished(target, now, _go_on, progress)
    assert progress.entries == len([_NAME, "a", "two", "partial", "link"])
    os.utime(target / "a")
    find_finished(target, now, _go_on, progress := WalkProgress())
    assert progress.entries == len([_NAME, "a", "two", "partial", "link", "one"])


@pytest.mark.parametrize("lost", [1, 4, 20, 35])
def test_a_batch_that_was_not_written_completely_is_ignored(target: Path, lost: int) -> None:
    whole = (target / _NAME).stat().st_size
    finished = _open(target)
    now = finished.now_ns()
    _finish(target / "three")
    _finish(target / "four")
    assert _record(finished, now) == 2
    written = (target / _NAME).read_bytes()
    assert len(written) == whole + 4 + 2 * 8 + 16
    os.truncate(target / _NAME, whole + 36 - lost)
    # A file system may have written the size and not the data, whose last byte may be zero.
    with (target / _NAME).open("ab") as file:
        file.write(b"\xff" * lost if written.endswith(b"\0") else bytes(lost))
    assert _unlisted(target) == [b"four", b"link", b"partial", b"three"]
    assert _record(_open(target)) == 4
    assert _unlisted(target) == [b"link", b"partial"]


def test_the_list_of_another_restore_is_removed_and_none_begun_beside_files(target: Path) -> None:
    assert open_list(target, _NAME, b"transfer 10", _go_on) is None
    assert not (target / _NAME).exists()
    shutil.rmtree(target)
    (target / "lost+found" / "empty").mkdir(parents=True)
    begun = _open(target)
    assert (target / _NAME).stat().st_mode & 0o777 == 0o600
    # Nothing is removed by one that this attempt began.
    with pytest.raises(ValueError, match="new"):
        remove_unlisted(begun, _go_on, WalkProgress())
    assert _open(target).resumed
    remove_list(target / _NAME)
    (target / "lost+found" / "file").write_text("")
    assert open_list(target, _NAME, _OWNER, _go_on) is None


def test_the_root_keeps_its_times_when_the_list_is_removed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(target, ns=(_OLD_NS, _OLD_NS + 1))
    remove_list(target / _NAME)
    status = target.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (_OLD_NS, _OLD_NS + 1)
    assert not (target / _NAME).exists()
    # As on a file server that maps root to an account without rights.
    (target / _NAME).touch()
    monkeypatch.setattr(os, "utime", denied := Mock(side_effect=PermissionError(errno.EPERM, "not permitted")))
    remove_list(target / _NAME)
    denied.assert_called_once()
    assert not (target / _NAME).exists()


def test_the_list_does_not_use_the_last_space(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (target / _NAME).read_bytes()
    monkeypatch.setattr("datamover.data_path.finished._SPARE_BYTES", 1 << 60)
    assert _record(_open(target)) == 2
    assert (target / _NAME).read_bytes() == before


def test_long_lists_with_any_names_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.data_path.finished._BATCH", 16)
    finished = _open(tmp_path)
    names = [b"%d%s" % (number, end) for number in range(70) for end in (b"\n", b"\xc3\xa4", b"\xff")]
    for name in names:
        _finish(tmp_path / os.fsdecode(name))
    assert _record(finished) == 210
    assert _unlisted(tmp_path) == []
    some = random.Random(1).sample(names, 30)
    for name in some:
        _finish(tmp_path / os.fsdecode(name))
    assert _unlisted(tmp_path) == sorted(some)


def test_removed_files_mark_the_directories_above_as_unfinished(target: Path) -> None:
    _finish(target / "x" / "y" / "z" / "file")
    for directory in ("x/y/z", "x/y", "x", "a"):
        os.utime(target / directory, ns=(_OLD_NS, _OLD_NS))
    remove_unlisted(_open(target), _go_on, progress := WalkProgress())
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()) == [
        _NAME,
        "a/one",
        "two",
    ]
    assert progress.removed == len(["x/y/z/file", "link", "partial"])
    changed = [name for name in ("x/y/z", "x/y", "x", "a") if (target / name).stat().st_mtime_ns != _OLD_NS]
    assert changed == ["x/y/z", "x/y", "x"]


def test_a_directory_is_read_before_a_file_in_it_is_removed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a directory's position means after a removal is up to the file system."""
    for number in range(100):
        (target / "a" / f"partial {number}").touch()
    steps: list[str] = []
    unlink = os.unlink

    def note_read(directory: bytes, name: str) -> bytes:
        steps.append(f"read {directory!r}")
        return join(directory, name)

    def note_unlink(name: str, *, dir_fd: int) -> None:
        steps.append("unlink")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr("datamover.data_path.finished.join", note_read)
    monkeypatch.setattr(os, "unlink", note_unlink)
    remove_unlisted(_open(target), _go_on, WalkProgress())
    assert [step for step, _ in groupby(steps)] == ["read b''", "unlink", "read b'a'", "unlink"]


def test_a_canceled_removal_ends_at_once(target: Path) -> None:
    (target / "other").touch()
    progress = WalkProgress()
    remove_unlisted(_open(target), lambda: progress.removed > 0, progress)
    assert progress.removed == 1
