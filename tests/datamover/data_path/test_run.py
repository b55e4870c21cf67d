"""A stalled data path: reported, inspected, and failed after the timeout."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from core.errors import AgentError, ConfigError, DataPathError, RepositoryError
from datamover.data_path.run import DataPath, StallDetector, StallLimits, Watchdog, read_stall_limits
from datamover.kopia.process import Kopia, KopiaAnswer, Listener
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Reachability
from datamover.runtime.redact import Redactor
from tests.support.clock import LoopClock

pytestmark = pytest.mark.processes

_UNREACHABLE = Reachability(reachable=False, message="repository r (s3://b) does not answer: connection refused")
_REACHABLE = Reachability(reachable=True, message="repository r (s3://b) answers")


def _due(limits: StallLimits, seconds: int) -> list[float]:
    """Return the idle times at which a data path that never moves is reported."""
    detector = StallDetector(limits)
    detector.observe("the same", 0)
    return [detector.idle_seconds for _ in range(seconds // 5) if detector.observe("the same", 5)]


def test_a_stall_is_reported_at_each_doubling_and_at_each_timeout() -> None:
    assert _due(StallLimits(), 4000) == [120, 240, 480, 600, 1200, 2400, 3600]


def test_without_a_timeout_a_stall_is_only_reported() -> None:
    limits = StallLimits(timedelta(0))
    assert _due(limits, 4000) == [120, 240, 480, 960, 1920, 3840]
    assert limits.timeout_seconds(reachable=False) == float("inf")


def test_any_activity_resets_the_idle_time() -> None:
    detector = StallDetector(StallLimits())
    for second in range(0, 3600, 60):
        assert not detector.observe(second // 120, 60)
    assert detector.idle_seconds <= 60


def test_a_pause_of_the_container_counts_as_one_minute() -> None:
    detector = StallDetector(StallLimits())
    detector.observe("the same", 5)
    detector.observe("the same", 50_000)
    assert detector.idle == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("idle", "reachable", "fails"), [(599, False, False), (600, False, True), (3599, True, False), (3600, True, True)]
)
def test_the_timeout_is_shorter_when_the_repository_does_not_answer(idle: int, reachable: bool, fails: bool) -> None:
    detector = StallDetector(StallLimits())
    detector.idle_seconds = idle
    assert detector.timed_out(reachable=reachable) is fails


@pytest.mark.parametrize(("text", "seconds"), [("", 600), ("30m", 1800), ("0", 0)])
def test_the_environment_sets_the_timeout(text: str, seconds: int) -> None:
    assert read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text}).timeout.total_seconds() == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [("soon", ".*soon.*"), ("-5m", 'must not be negative: "-5m"$')],
    ids=["no duration", "negative"],
)
def test_an_invalid_timeout_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^DATA_MOVER_STALL_TIMEOUT: {message}"):
        read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text})


class _FakeMeter(Meter):
    """Reads what a test sets, and no port."""

    moved = 0

    @property
    def activity(self) -> int:
        return self.moved

    async def refresh(self) -> None:
        pass


class _HangingKopia(Kopia):
    """Writes one line, and never exits."""

    def __init__(self) -> None:
        super().__init__({}, Redactor())

    async def move_data(self, attempted: str, *arguments: str, files: Any, listener: Listener) -> KopiaAnswer:
        del attempted, arguments, files
        listener.keep("the last line")
        await asyncio.Event().wait()
        raise AssertionError


def _hang(probe: Callable[[], Awaitable[Reachability]], warned: list[str], meter: _FakeMeter | None = None) -> DataPath:
    clock = LoopClock()

    async def warn(message: str) -> None:
        warned.append(message)

    return DataPath(meter or _FakeMeter(clock, Direction.BACKUP), Watchdog(clock, warn, probe))


async def _error_of(data_path: DataPath) -> AgentError:
    with pytest.raises(AgentError) as failed:
        await data_path.run(_HangingKopia(), "back up /volume", "snapshot", "create")
    return failed.value


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("found", "kind", "seconds", "warnings"),
    [
        (_UNREACHABLE, RepositoryError, 600, ["2m0s", "4m0s", "8m0s"]),
        (_REACHABLE, DataPathError, 3600, ["2m0s", "4m0s", "8m0s", "10m0s", "20m0s", "40m0s"]),
    ],
    ids=["unreachable", "reachable"],
)
async def test_a_stalled_data_path_is_reported_and_fails_after_the_timeout(
    found: Reachability, kind: type[AgentError], seconds: int, warnings: list[str]
) -> None:
    async def probe() -> Reachability:
        return found

    warned: list[str] = []
    started = LoopClock().monotonic()
    error = await _error_of(_hang(probe, warned))
    assert type(error) is kind
    assert LoopClock().monotonic() - started == pytest.approx(seconds, abs=10)
    shown = "10m0s" if kind is RepositoryError else "1h0m0s"
    assert str(error) == f"back up /volume: no progress for {shown}: {found.message}\nthe last line"
    output = "; last output of kopia: the last line"
    assert warned == [f"no progress for {idle}: {found.message}{output}" for idle in warnings]


@pytest.mark.looptime
async def test_activity_during_the_probe_ends_the_stall() -> None:
    """The result of the probe does not matter then."""
    warned: list[str] = []
    meter = _FakeMeter(LoopClock(), Direction.BACKUP)
    probed = asyncio.Event()

    async def probe() -> Reachability:
        meter.moved += 1
        probed.set()
        return _UNREACHABLE

    data_path = _hang(probe, warned, meter)
    running = asyncio.create_task(data_path.run(_HangingKopia(), "back up /volume"))
    await asyncio.sleep(1000)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert probed.is_set()
    assert warned == []


@pytest.mark.looptime
async def test_an_error_of_the_watchdog_does_not_fail_the_data_path(caplog: pytest.LogCaptureFixture) -> None:
    async def probe() -> NoReturn:
        raise ZeroDivisionError

    running = asyncio.create_task(_hang(probe, []).run(_HangingKopia(), "back up /volume"))
    await asyncio.sleep(1000)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "watchdog failed" in [one.message for one in caplog.records if one.levelno == logging.ERROR]
