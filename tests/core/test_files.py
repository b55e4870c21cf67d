"""Files that another party may exchange: what is read, and what is not."""

import os
from pathlib import Path

import pytest

from core.files import read_start


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


def test_a_pipe_without_a_writer_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_start(tmp_path / "pipe", 10) == b""
