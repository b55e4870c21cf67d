"""Retries: which requests, and when; and the keepalive of connections."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from core.kube.errors import (
    ConflictError,
    ForbiddenError,
    KubeError,
    ServerError,
    ThrottledError,
    UnauthorizedError,
    UnreachableError,
)
from core.kube.transport import KEEPALIVE_OPTIONS, Retry, keep_alive
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


class Script:
    """Raises one error after the other, then returns; records the times of its calls."""

    def __init__(self, *errors: KubeError) -> None:
        self._errors = list(errors)
        self.called_at: list[float] = []

    async def __call__(self) -> str:
        self.called_at.append(asyncio.get_running_loop().time())
        if self._errors:
            raise self._errors.pop(0)
        return "done"


def _many(build: Callable[[str], KubeError], count: int = 20) -> Script:
    return Script(*(build(f"no {number}") for number in range(count)))


@pytest.mark.parametrize("error", [ServerError("x"), UnreachableError("x"), ThrottledError("x")], ids=repr)
async def test_a_transient_error_is_retried(error: KubeError) -> None:
    script = Script(error, error)
    assert await Retry(LoopClock()).run(script) == "done"
    assert len(script.called_at) == 3


@pytest.mark.parametrize(
    ("error", "after_lost_response"),
    [
        (ForbiddenError("x"), True),
        (UnauthorizedError("x"), True),
        (ConflictError("x"), True),
        (ServerError("x"), False),
        (UnreachableError("x"), False),
    ],
    ids=repr,
)
async def test_neither_a_permanent_error_nor_what_may_have_been_applied_is_retried(
    error: KubeError, *, after_lost_response: bool
) -> None:
    script = Script(error)
    with pytest.raises(type(error)):
        await Retry(LoopClock()).run(script, after_lost_response=after_lost_response)
    assert len(script.called_at) == 1


async def test_a_throttled_request_is_always_retried() -> None:
    script = Script(ThrottledError("x", retry_after_seconds=3.0))
    assert await Retry(LoopClock()).run(script, after_lost_response=False) == "done"
    assert 3.0 <= script.called_at[1] < 4.0


@pytest.mark.parametrize(("first", "lost"), [(UnreachableError("x"), True), (ThrottledError("x"), False)], ids=repr)
async def test_a_conflict_after_a_lost_response_may_be_with_the_request_itself(first: KubeError, lost: bool) -> None:
    with pytest.raises(ConflictError) as found:
        await Retry(LoopClock()).run(Script(first, ConflictError("y")))
    assert found.value.may_be_own is lost


async def test_delays_grow_to_a_limit() -> None:
    script = _many(UnreachableError)
    with pytest.raises(UnreachableError, match="no 7"):
        await Retry(LoopClock(), attempts=8).run(script)
    delays = [round(after - before, 3) for before, after in zip(script.called_at, script.called_at[1:], strict=False)]
    assert 0.2 <= delays[0] <= 0.4
    assert delays == sorted(delays)
    assert max(delays) <= 5.2


async def test_no_attempt_starts_after_the_timeout(looptime: float) -> None:
    script = _many(UnreachableError)
    with pytest.raises(UnreachableError):
        await Retry(LoopClock(), attempts=100, total_seconds=20.0).run(script)
    assert looptime <= 20.0
    assert len(script.called_at) < 12


async def test_what_waits_for_hours_outlasts_an_outage_of_minutes(looptime: float) -> None:
    script = _many(UnreachableError, 50)
    assert await Retry(LoopClock(), attempts=1).patient.run(script) == "done"
    assert 200 < looptime < 300


async def test_the_servers_retry_after_is_limited(looptime: float) -> None:
    script = Script(ThrottledError("x", retry_after_seconds=3600.0))
    await Retry(LoopClock()).run(script)
    assert 30.0 <= looptime < 31.0


@pytest.mark.parametrize("error", [ForbiddenError, UnauthorizedError])
async def test_a_denial_is_retried_for_the_configured_time(error: type[KubeError]) -> None:
    script = _many(error, 8)
    assert await Retry(LoopClock(), forbidden_seconds=30).run(script) == "done"
    assert len(script.called_at) == 9
    script = _many(error, 100)
    with pytest.raises(error):
        await Retry(LoopClock(), forbidden_seconds=20).run(script)
    assert 10 < script.called_at[-1] - script.called_at[0] <= 20


def test_a_dead_connection_is_closed_within_30_seconds() -> None:
    with socket.socket() as connection:
        keep_alive(connection)
        assert {option: connection.getsockopt(*option) for option in KEEPALIVE_OPTIONS} == KEEPALIVE_OPTIONS
        idle, interval, probes = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + interval * probes == 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
