"""A transfer in which nothing moves any more: told, looked into, and given up at last."""

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

_DEAD = Reachability(answers=False, told="repository r (s3://b) does not answer: connection refused")
_ALIVE = Reachability(answers=True, told="repository r (s3://b) answers")


def _due(limits: StallLimits, seconds: int) -> list[float]:
    """When somebody is told of a transfer that never moves."""
    still = StallDetector(limits)
    still.take("the same", 0)
    return [still.idle_seconds for _ in range(seconds // 5) if still.take("the same", 5)]


def test_a_standstill_is_told_at_each_doubling_and_when_it_may_be_given_up() -> None:
    assert _due(StallLimits(), 4000) == [120, 240, 480, 600, 1200, 2400, 3600]


def test_without_an_end_it_is_only_told() -> None:
    limits = StallLimits(timedelta(0))
    assert _due(limits, 4000) == [120, 240, 480, 960, 1920, 3840]
    assert limits.give_up_seconds(answers=False) == float("inf")


def test_whatever_moves_begins_it_anew() -> None:
    still = StallDetector(StallLimits())
    for second in range(0, 3600, 60):
        assert not still.take(second // 120, 60)
    assert still.idle_seconds <= 60


def test_a_transfer_that_was_frozen_gets_its_time() -> None:
    still = StallDetector(StallLimits())
    still.take("the same", 5)
    still.take("the same", 50_000)
    assert still.idle == timedelta(minutes=1)


@pytest.mark.parametrize(
    ("idle", "answers", "ends"), [(599, False, False), (600, False, True), (3599, True, False), (3600, True, True)]
)
def test_it_is_given_up_sooner_where_the_repository_does_not_answer(idle: int, answers: bool, ends: bool) -> None:
    still = StallDetector(StallLimits())
    still.idle_seconds = idle
    assert still.too_long(answers=answers) is ends


@pytest.mark.parametrize(("text", "span"), [("", 600), ("30m", 1800), ("0", 0)])
def test_the_environment_sets_the_time(text: str, span: int) -> None:
    assert read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text}).give_up.total_seconds() == span


@pytest.mark.parametrize("text", ["soon", "-1m"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^DATA_MOVER_STALL_TIMEOUT: "):
        read_stall_limits({"DATA_MOVER_STALL_TIMEOUT": text})


class _StillMeter(Meter):
    """Reads what a test puts there, and no port."""

    moved = 0

    @property
    def activity(self) -> int:
        return self.moved

    async def refresh(self) -> None:
        pass


class _HangingKopia(Kopia):
    """Says something, and never ends."""

    def __init__(self) -> None:
        super().__init__({}, Redactor())

    async def transfer(self, attempted: str, *arguments: str, files: Any, listener: Listener) -> KopiaAnswer:
        del attempted, arguments, files
        listener.hear("the last thing that kopia said")
        await asyncio.Event().wait()
        raise AssertionError


def _hang(ask: Callable[[], Awaitable[Reachability]], warned: list[str], meter: _StillMeter | None = None) -> DataPath:
    clock = LoopClock()

    async def warn(message: str) -> None:
        warned.append(message)

    return DataPath(meter or _StillMeter(clock, Direction.UPLOAD), Watchdog(clock, warn, ask))


async def _end_of(transfer: DataPath) -> AgentError:
    with pytest.raises(AgentError) as failed:
        await transfer.run(_HangingKopia(), "back up /volume", "snapshot", "create")
    return failed.value


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("found", "kind", "seconds", "warnings"),
    [
        (_DEAD, RepositoryError, 600, ["2m0s", "4m0s", "8m0s"]),
        (_ALIVE, DataPathError, 3600, ["2m0s", "4m0s", "8m0s", "10m0s", "20m0s", "40m0s"]),
    ],
    ids=["dead", "alive"],
)
async def test_a_transfer_that_stands_still_is_told_of_and_fails_at_last(
    found: Reachability, kind: type[AgentError], seconds: int, warnings: list[str]
) -> None:
    async def ask() -> Reachability:
        return found

    warned: list[str] = []
    began = LoopClock().monotonic()
    error = await _end_of(_hang(ask, warned))
    assert type(error) is kind
    assert LoopClock().monotonic() - began == pytest.approx(seconds, abs=10)
    shown = "10m0s" if kind is RepositoryError else "1h0m0s"
    assert str(error) == f"back up /volume: no progress for {shown}: {found.told}\nthe last thing that kopia said"
    last_words = "; kopia's last words: the last thing that kopia said"
    assert warned == [f"no progress for {span}: {found.told}{last_words}" for span in warnings]


@pytest.mark.looptime
async def test_a_transfer_that_goes_on_while_the_repository_is_asked_is_let_alone() -> None:
    """Asking takes its time, and the answer is of no interest then."""
    warned: list[str] = []
    meter = _StillMeter(LoopClock(), Direction.UPLOAD)
    asked = asyncio.Event()

    async def ask() -> Reachability:
        meter.moved += 1
        asked.set()
        return _DEAD

    transfer = _hang(ask, warned, meter)
    running = asyncio.create_task(transfer.run(_HangingKopia(), "back up /volume"))
    await asyncio.sleep(1000)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asked.is_set()
    assert warned == []


@pytest.mark.looptime
async def test_a_fault_in_watching_fails_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> NoReturn:
        raise ZeroDivisionError

    running = asyncio.create_task(_hang(ask, []).run(_HangingKopia(), "back up /volume"))
    await asyncio.sleep(1000)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "standstill ended before its time" in [one.message for one in caplog.records if one.levelno == logging.ERROR]
