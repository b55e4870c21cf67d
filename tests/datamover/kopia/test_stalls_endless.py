"""Files without an end: what is read of one beyond its size, or while it grows, and how that is reported."""

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock, PropertyMock

import pytest

from core.errors import DataPathError
from datamover.kopia.stalls import EndlessFile, EndlessFiles, Watchdog
from tests.support.clock import LoopClock

_GIB = 1 << 30


class _Reader:
    """This process, which reads a file of any size and to any position: the file has no blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = EndlessFiles(lambda: [os.getpid()])
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT)

    def close(self) -> None:
        os.close(self._fd)

    def find(self, *, size: int, position: int) -> EndlessFile | None:
        os.truncate(self._path, size)
        os.lseek(self._fd, position, os.SEEK_SET)
        self._files.measure(self._files.observe(), lambda: False)
        return self._files.find()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[_Reader]:
    reader = _Reader(tmp_path / "log\n")
    yield reader
    reader.close()


def test_a_file_that_is_read_beyond_its_size_has_no_end(reader: _Reader, tmp_path: Path) -> None:
    assert reader.find(size=0, position=10) is None
    for _ in range(2):
        found = reader.find(size=0, position=_GIB)
        assert found is not None
        assert found[0] == rf"{tmp_path}/log\n"
        assert found.text.startswith(
            rf"no end of {tmp_path}/log\n: {_GIB} bytes of it were read, and its size is 0: leave it out"
        )
        assert not found.certain
    found = reader.find(size=0, position=_GIB + 1)
    assert found is not None
    assert found.certain


@pytest.mark.parametrize(("first_gib", "limit_gib"), [(2, 64), (100, 400)], ids=["small", "large"])
def test_a_file_may_grow_to_four_times_its_size_or_to_64_gib(reader: _Reader, first_gib: int, limit_gib: int) -> None:
    limit = limit_gib * _GIB
    assert reader.find(size=first_gib * _GIB, position=1) is None
    for position in (limit, limit + 1):
        assert reader.find(size=2 * limit, position=position) is None
    found = reader.find(size=2 * limit, position=limit + 2)
    assert found is not None
    assert found.certain


def test_a_file_that_is_cut_while_it_is_read_has_an_end(reader: _Reader) -> None:
    assert reader.find(size=10 * _GIB, position=5 * _GIB) is None
    for _ in range(3):
        assert reader.find(size=0, position=6 * _GIB) is None


def test_a_file_that_was_closed_is_forgotten(tmp_path: Path) -> None:
    reading = [os.getpid()]
    files = EndlessFiles(lambda: reading)
    (tmp_path / "read").write_bytes(b"ab")
    with (tmp_path / "read").open("rb") as file:
        file.seek(1)
        files.measure(files.observe(), lambda: False)
        assert files.find() is None
        assert files._size_bytes
    reading.clear()
    files.observe()
    assert files.find() is None
    assert not files._size_bytes


def test_only_files_that_are_read_count(tmp_path: Path) -> None:
    files = EndlessFiles(lambda: [os.getpid()])
    with (tmp_path / "written").open("wb") as file:
        file.seek(1)
        assert files.observe() == []


def test_a_process_that_has_gone_reads_nothing() -> None:
    assert EndlessFiles(lambda: [2**30]).observe() == []


@pytest.mark.looptime
@pytest.mark.parametrize(("certain", "seconds", "warnings"), [(False, 600, 3), (True, 5, 0)], ids=["slow", "certain"])
async def test_a_file_without_an_end_is_reported_and_fails_the_transfer_though_it_progresses(
    monkeypatch: pytest.MonkeyPatch, certain: bool, seconds: int, warnings: int
) -> None:
    files, meter, warn = Mock(), Mock(refresh=AsyncMock()), AsyncMock()
    type(meter).activity = PropertyMock(side_effect=itertools.count())
    files.observe.return_value = []
    files.find.side_effect = [*([] if certain else [None]), *[EndlessFile("/log", "no end of /log", certain)] * 200]
    monkeypatch.setattr("datamover.kopia.stalls.EndlessFiles", lambda: files)
    started = LoopClock().monotonic()
    with pytest.raises(DataPathError, match=r"^back up /volume: no end of /log$"):
        await Watchdog(LoopClock(), warn, AsyncMock()).guard("back up /volume", meter, asyncio.Event().wait)
    assert LoopClock().monotonic() - started == pytest.approx(seconds, abs=10)
    assert [call.args[0] for call in warn.await_args_list] == ["no end of /log"] * warnings
