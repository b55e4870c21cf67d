"""When a data path is stalled, and files without an end: what is read of one beyond its size, or while it grows."""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock, Mock, PropertyMock

import pytest

from core.errors import ConfigError, DataPathError
from datamover.kopia.backup_process import read_checkpoint_grace
from datamover.kopia.snapshots import read_checkpoint_interval
from datamover.kopia.stalls import EndlessFile, EndlessFiles, StallDetector, StallLimits, Watchdog, read_stall_limits
from tests.support.clock import LoopClock


def _due(limits: StallLimits, seconds: int) -> list[float]:
    """Return the idle times at which a data path that never moves is reported."""
    detector = StallDetector(limits)
    detector.observe("the same", 0)
    return [detector.idle_seconds for _ in range(seconds // 5) if detector.observe("the same", 5)]


def test_a_stall_is_reported_at_each_doubling_and_at_each_timeout() -> None:
    assert _due(StallLimits(), 4000) == [120, 240, 480, 600, 1200, 2400, 3600]
    # Without a timeout, it is only reported.
    assert _due(limits := StallLimits(timedelta(0)), 4000) == [120, 240, 480, 960, 1920, 3840]
    assert limits.timeout_seconds(reachable=False) == float("inf")


def test_any_activity_resets_the_idle_time_and_a_pause_of_the_container_counts_as_one_minute() -> None:
    detector = StallDetector(StallLimits())
    for second in range(0, 3600, 60):
        assert not detector.observe(second // 120, 60)
    assert detector.idle_seconds <= 60
    detector.observe("another", 5)
    detector.observe("another", 50_000)
    assert detector.idle == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("idle", "reachable", "fails"), [(599, False, False), (600, False, True), (3599, True, False), (3600, True, True)]
)
def test_the_timeout_is_shorter_when_the_repository_does_not_answer(idle: int, reachable: bool, fails: bool) -> None:
    detector = StallDetector(StallLimits())
    detector.idle_seconds = idle
    assert detector.timed_out(reachable=reachable) is fails


_STALL, _GRACE, _INTERVAL = (
    f"DATA_MOVER_{name}" for name in ("STALL_TIMEOUT", "CHECKPOINT_GRACE", "CHECKPOINT_INTERVAL")
)
_READERS: dict[str, Callable[[dict[str, str]], timedelta | None]] = {
    _STALL: lambda environment: read_stall_limits(environment).timeout,
    _GRACE: read_checkpoint_grace,
    _INTERVAL: read_checkpoint_interval,
}


@pytest.mark.parametrize(
    ("variable", "text", "seconds"),
    [
        (_STALL, "", 600),
        (_STALL, "30m", 1800),
        (_STALL, "0", 0),
        (_GRACE, "", 25),
        (_GRACE, "0", 0),
        (_GRACE, "29999ms", 29.999),
        (_INTERVAL, "", None),
        (_INTERVAL, "10s", 10),
        (_INTERVAL, "45m", 2700),
    ],
)
def test_the_environment_sets_durations(variable: str, text: str, seconds: float | None) -> None:
    assert _READERS[variable]({variable: text}) == (None if seconds is None else timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (_STALL, "soon", ".*soon.*"),
        (_STALL, "-5m", 'must not be negative: "-5m"'),
        (_GRACE, "30s", 'must be less than the grace period of the pod, 30s: "30s"'),
        (_INTERVAL, "9s", 'must be from 10s to 45m0s: "9s"'),
        (_INTERVAL, "46m", 'must be from 10s to 45m0s: "46m"'),
    ],
)
def test_an_invalid_duration_is_rejected(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: {message}$"):
        _READERS[variable]({variable: text})


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

    def is_endless(self, *, size: int, position: int) -> bool:
        """Whether it is read beyond all limits."""
        found = self.find(size=size, position=position)
        return found is not None and found.certain


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[_Reader]:
    reader = _Reader(tmp_path / os.fsdecode(b"log\n\xff"))
    yield reader
    reader.close()


def test_a_file_that_is_read_beyond_its_size_has_no_end(reader: _Reader, tmp_path: Path) -> None:
    assert reader.find(size=0, position=10) is None
    for _ in range(2):
        found = reader.find(size=0, position=_GIB)
        assert found is not None
        assert found[0] == rf"{tmp_path}/log\n\udcff"
        assert found.text.startswith(
            rf"no end of {tmp_path}/log\n\udcff: {_GIB} bytes of it were read, and its size is 0: leave it out"
        )
        assert not found.certain
    assert reader.is_endless(size=0, position=_GIB + 1)


@pytest.mark.parametrize(("first_gib", "limit_gib"), [(2, 64), (100, 400)], ids=["small", "large"])
def test_a_file_may_grow_to_four_times_its_size_or_to_64_gib(reader: _Reader, first_gib: int, limit_gib: int) -> None:
    limit = limit_gib * _GIB
    assert reader.find(size=first_gib * _GIB, position=1) is None
    for position in (limit, limit + 1):
        assert reader.find(size=2 * limit, position=position) is None
    assert reader.is_endless(size=2 * limit, position=limit + 2)


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
    # Neither one that is written, nor a process that has gone is observed.
    with (tmp_path / "written").open("wb") as file:
        file.seek(1)
        assert EndlessFiles(lambda: [os.getpid(), 2**30]).observe() == []


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
