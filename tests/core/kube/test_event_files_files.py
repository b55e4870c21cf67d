"""Files that another party may exchange: what is read, and what is not."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from core.kube.event_files import read_start


def test_no_more_than_the_start_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_start(tmp_path / "file", 10) == b"x" * 10
    assert read_start(tmp_path / "file", 1000) == b"x" * 100


def test_a_link_and_a_directory_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for each in (tmp_path / "link", tmp_path, tmp_path / "absent"):
        with pytest.raises(OSError, match=r"\[Errno"):
            read_start(each, 10)


@pytest.mark.parametrize("written", [False, True])
def test_a_pipe_is_not_read_and_does_not_block(tmp_path: Path, written: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = (tmp_path / "pipe").open("rb+", buffering=0) if written else nullcontext()
    with writer, pytest.raises(OSError, match="Not a regular file"):
        read_start(tmp_path / "pipe", 10)


def test_what_is_not_read_stays_not_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="Not a regular file"):
        read_start(tmp_path, 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
