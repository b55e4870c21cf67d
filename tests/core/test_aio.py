"""Shielded steps, deadlines and cancellations."""

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest

from core.aio import run_apart, run_shielded, wait_for_event
from core.clock import Deadline
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


def _deadline(seconds: float) -> Deadline:
    return Deadline.after(LoopClock(), timedelta(seconds=seconds))


async def test_shielded_step_completes_when_its_caller_is_canceled() -> None:
    done: list[str] = []

    async def step() -> None:
        await asyncio.sleep(5)
        done.append("step")

    task = asyncio.create_task(run_shielded(step, name="clean-up", deadline=_deadline(10)))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["step"]


async def test_shielded_step_is_canceled_at_its_deadline(looptime: float) -> None:
    with pytest.raises(TimeoutError):
        await run_shielded(lambda: asyncio.sleep(100), name="clean-up", deadline=_deadline(10))
    assert looptime == 10


async def test_shielded_step_returns_its_result_and_raises_its_error() -> None:
    async def fails() -> None:
        await asyncio.sleep(5)
        raise KeyError

    assert await run_shielded(lambda: asyncio.sleep(1, "x"), name="a", deadline=_deadline(10)) == "x"
    with pytest.raises(KeyError):
        await run_shielded(fails, name="b", deadline=_deadline(10))
    # Its failure is the cause of its caller's cancellation.
    task = asyncio.create_task(run_shielded(fails, name="clean-up", deadline=_deadline(10)))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as canceled:
        await task
    assert isinstance(canceled.value.__cause__, KeyError)


async def test_waiting_for_an_event_has_a_timeout(looptime: float) -> None:
    event = asyncio.Event()
    assert await wait_for_event(event, 3) is False
    assert looptime == 3
    event.set()
    assert await wait_for_event(event, 3) is True
    assert looptime == 3


async def test_deadline_uses_its_own_clock() -> None:
    deadline = _deadline(10)
    await asyncio.sleep(4)
    assert deadline.remaining_seconds == 6
    assert not deadline.expired
    await asyncio.sleep(7)
    assert deadline.expired
    assert deadline.remaining_seconds == 0


async def test_a_cancellation_takes_precedence_over_an_error() -> None:
    """A TaskGroup raises only the error in this case."""
    failed, working = asyncio.Event(), asyncio.Event()

    async def fail_when_canceled() -> None:
        working.set()
        try:
            await asyncio.Event().wait()
        finally:
            failed.set()
            raise ValueError("at the same time")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail_when_canceled(), name="failing")

    async def go_on() -> None:
        while True:
            with suppress(ExceptionGroup):
                await run_apart(work, name="work")

    task = asyncio.create_task(go_on(), name="going on")
    await working.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert failed.is_set()


@pytest.mark.parametrize("errors", [1, 2])
async def test_errors_of_a_group_never_count_as_a_cancellation(errors: int) -> None:
    """A TaskGroup counts its own cancellations as its task's."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(errors):
                group.create_task(fail(), name="failing")

    for _ in range(2):
        with pytest.raises(ExceptionGroup):
            await run_apart(work, name="work")


async def test_a_step_run_apart_returns_and_is_canceled_like_an_awaited_one() -> None:
    async def two() -> int:
        return 2

    assert await run_apart(two, name="two") == 2
    canceled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            canceled.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_apart(wait, name="waiting")
    assert canceled.is_set()
