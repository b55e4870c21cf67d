"""When memory is given back: while work goes on, behind its end, and never without any."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nodeagent.runtime.memory import MemoryTrimmer, find_trim
from tests.support.clock import LoopClock


@asynccontextmanager
async def keeping() -> AsyncIterator[tuple[MemoryTrimmer, list[float]]]:
    """Run a keeper; yield it and the times at which it gave memory back."""
    clock = LoopClock()
    began, times = clock.monotonic(), list[float]()
    keeper = MemoryTrimmer(clock, lambda: times.append(clock.monotonic() - began))
    task = asyncio.create_task(keeper.run(), name="memory")
    try:
        yield keeper, times
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_nothing_is_done_where_nothing_was_done() -> None:
    async with keeping() as (_, times):
        await asyncio.sleep(1000)
    assert times == []


@pytest.mark.looptime
async def test_memory_is_given_back_behind_the_last_work_and_once_its_connections_are_closed() -> None:
    async with keeping() as (keeper, times):
        keeper.note()
        await asyncio.sleep(1000)
    assert times == pytest.approx([10, 20])


@pytest.mark.looptime
async def test_memory_is_given_back_while_work_goes_on() -> None:
    async with keeping() as (keeper, times):
        for _ in range(60):
            keeper.note()
            await asyncio.sleep(1)
        worked_until = 59
        await asyncio.sleep(1000)
    assert len(times) <= 9
    assert [at for at in times if at < worked_until] == pytest.approx([10, 20, 30, 40, 50])
    assert times[-1] >= worked_until + 15


def test_this_platforms_library_can_be_asked() -> None:
    find_trim()()
