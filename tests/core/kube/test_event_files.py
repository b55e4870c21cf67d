"""Events as files in a directory; a tenant may have written any of them."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from core.kube.event_files import EventFiles, read_start, write_event
from core.models.base import JsonDict

_REASONS = ("Waiting", "Ready")


def build(reason: str, message: str = "m") -> JsonDict:
    return {"reason": reason, "message": message, "lastTimestamp": "2026-11-21T12:00:00Z"}


def test_each_event_is_read_once_and_the_newest_of_a_reason_counts(tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    assert files.read_new(_REASONS) == []
    write_event(tmp_path, build("Waiting", "first"))
    write_event(tmp_path, build("Waiting", "second"))
    write_event(tmp_path, build("Other"))
    assert files.read_new(_REASONS) == [build("Waiting", "second")]
    assert files.read_new(_REASONS) == []
    write_event(tmp_path, build("Waiting", "third"))
    assert files.read_new(_REASONS) == [build("Waiting", "third")]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["Other", "Waiting"]


@pytest.mark.parametrize("first", _REASONS)
def test_events_come_in_the_order_in_which_they_were_written(first: str, tmp_path: Path) -> None:
    for number, reason in enumerate(sorted(_REASONS, key=lambda each: each != first)):
        write_event(tmp_path, build(reason))
        os.utime(tmp_path / reason, (number, number))
    assert EventFiles(tmp_path).read_new(_REASONS)[0]["reason"] == first


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        json.dumps(build("Ready")),
        json.dumps(build("Waiting") | {"message": 1}),
        json.dumps({"reason": "Waiting"}),
        json.dumps(build("Waiting", "x" * 20_000)),
        json.dumps(build("Waiting", "x" * 1025)),
    ],
    ids=["nothing", "half", "a list", "deep", "another reason", "a number", "fields missing", "long", "long message"],
)
def test_what_is_no_event_is_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "Waiting").write_text(content)
    write_event(tmp_path, build("Ready"))
    assert EventFiles(tmp_path).read_new(_REASONS) == [build("Ready")]


def test_links_directories_and_pipes_are_not_opened(tmp_path: Path) -> None:
    """Reading a pipe would block the agent; a link may lead to any file of the node."""
    write_event(tmp_path, build("Ready"))
    (tmp_path / "Waiting").symlink_to(tmp_path / "Ready")
    (tmp_path / "Stopped").mkdir()
    os.mkfifo(tmp_path / "Started")
    assert EventFiles(tmp_path).read_new(("Waiting", "Stopped", "Started", "Ready")) == [build("Ready")]


def test_a_file_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_event(tmp_path, build("Ready"))
    files = EventFiles(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert files.read_new(_REASONS) == []
    assert files.read_new(_REASONS) == [build("Ready")]


def test_a_directory_has_no_event_until_one_was_written(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "events")
    assert not files.has_any(_REASONS)
    files.directory.mkdir()
    (files.directory / "junk").touch()
    assert not files.has_any(_REASONS)
    write_event(files.directory, build("Ready"))
    assert files.has_any(_REASONS)


def test_an_event_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds no file listens in another way."""
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_event(tmp_path, build("Ready"))
    assert list(tmp_path.iterdir()) == []


def test_no_more_than_the_start_of_a_file_is_read_and_nothing_else(tmp_path: Path) -> None:
    """Neither a link nor a pipe, which would block; what is not read stays not open."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_start(tmp_path / "file", 10) == b"x" * 10
    assert read_start(tmp_path / "file", 1000) == b"x" * 100
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for each in (tmp_path / "link", tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"\[Errno|Not a regular file"):
            read_start(each, 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with (tmp_path / "pipe").open("rb+", buffering=0), pytest.raises(OSError, match="Not a regular file"):
        read_start(tmp_path / "pipe", 10)
