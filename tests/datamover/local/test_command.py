"""Local mode: the repository that it is given, and the progress, a bar on a terminal and lines elsewhere."""

import io
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.contract import ProgressMessage
from core.errors import ConfigError
from datamover.arguments import RepositoryOptions
from datamover.local.command import ProgressBar, format_bytes, parse_storage
from datamover.storage.providers import FileStorage
from datamover.storage.s3 import S3Storage

_HALF = ProgressMessage(total_bytes=4_000_000_000, done_bytes=2_000_000_000, bytes_per_second=100_000_000)
_TEXT = "2.0 GB of 4.0 GB, 50 %, 100.0 MB/s, 20 s left"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_is_written_where_there_is_no_terminal() -> None:
    ProgressBar(stream := io.StringIO(), SystemClock()).draw(_HALF, last=True)
    assert stream.getvalue() == f"{_TEXT}\n"


def test_a_terminal_gets_one_line_that_is_drawn_again_and_ended() -> None:
    bar = ProgressBar(stream := _Terminal(), SystemClock())
    bar.draw(ProgressMessage(done_bytes=7))
    bar.draw(_HALF)
    bar.draw(ProgressMessage(total_bytes=1000, done_bytes=1000), last=True)
    drawn = stream.getvalue().split("\r\x1b[K")[1:]
    assert drawn == [f"[{' ' * 30}] 7 B", f"[{'#' * 15}{'.' * 15}] {_TEXT}", f"[{'#' * 30}] 1.0 KB of 1.0 KB, 100 %\n"]


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "1.0 KB"), (1.2e18, "1200.0 PB")])
def test_bytes_have_a_unit_of_their_size(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("/mnt/backups", FileStorage(Path("/mnt/backups"))),
        ("s3://bkt", S3Storage("bkt", "", "http://h:1", "r")),
        ("s3://bkt/a/b/", S3Storage("bkt", "a/b/", "http://h:1", "r")),
    ],
    ids=["folder", "bucket", "prefix"],
)
def test_the_name_of_a_repository_is_a_directory_or_a_bucket(name: str, storage: FileStorage | S3Storage) -> None:
    options = RepositoryOptions(name, "password", endpoint="http://h:1", region="r")
    assert parse_storage(options, {}) == storage


@pytest.mark.parametrize("name", ["ftp://host/x", "s3://"])
def test_a_repository_that_is_neither_directory_nor_bucket_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a directory or s3://bucket/prefix"):
        parse_storage(RepositoryOptions(name, "password"), {})
