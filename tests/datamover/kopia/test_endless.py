"""Files without an end: what is read of one beyond its size, or while it grows."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from datamover.kopia.endless import EndlessFiles

_GIB = 1 << 30


class _Reader:
    """This process, which reads a file of any size and to any position: the file has no blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = EndlessFiles(lambda: [os.getpid()])
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT)

    def close(self) -> None:
        os.close(self._fd)

    def find(self, *, size: int, position: int) -> str:
        os.truncate(self._path, size)
        os.lseek(self._fd, position, os.SEEK_SET)
        observed = self._files.observe()
        return self._files.judge(observed, lambda: False) if observed else ""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[_Reader]:
    reader = _Reader(tmp_path / "log\n")
    yield reader
    reader.close()


def test_a_file_that_is_read_a_gib_beyond_its_size_has_no_end(reader: _Reader, tmp_path: Path) -> None:
    assert reader.find(size=0, position=_GIB) == ""
    assert reader.find(size=0, position=_GIB + 1) == ""
    assert reader.find(size=0, position=_GIB + 2).startswith(
        rf"{tmp_path}/log\n has no end, or grows as fast as it is read: {_GIB + 2} bytes were read, and its size is 0"
    )


@pytest.mark.parametrize(("first_gib", "limit_gib"), [(2, 64), (100, 400)], ids=["small", "large"])
def test_a_file_may_grow_to_four_times_its_size_or_to_64_gib(reader: _Reader, first_gib: int, limit_gib: int) -> None:
    limit = limit_gib * _GIB
    assert reader.find(size=first_gib * _GIB, position=2 * _GIB) == ""
    for position in (limit - 1, limit, limit + 1):
        assert reader.find(size=2 * limit, position=position) == ""
    assert "has no end" in reader.find(size=2 * limit, position=limit + 2)


def test_a_file_that_is_cut_while_it_is_read_has_an_end(reader: _Reader) -> None:
    assert reader.find(size=10 * _GIB, position=5 * _GIB) == ""
    for _ in range(3):
        assert reader.find(size=0, position=6 * _GIB) == ""


def test_only_files_that_are_read_count(tmp_path: Path) -> None:
    with (tmp_path / "written").open("wb") as file:
        file.seek(2 * _GIB)
        assert EndlessFiles(lambda: [os.getpid()]).observe() == {}


def test_a_process_that_has_gone_reads_nothing() -> None:
    assert EndlessFiles(lambda: [2**30]).observe() == {}
