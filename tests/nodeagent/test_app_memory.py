"""Return of free memory: during and after a burst of requests, never when idle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nodeagent.app import MemoryTrimmer, find_trim
from tests.support.clock import LoopClock


@asynccontextmanager
async def keeping() -> AsyncIterator[tuple[MemoryTrimmer, list[float]]]:
    """Run a trimmer; yield it and the times at which it returned memory."""
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
async def test_an_idle_agent_returns_nothing() -> None:
    async with keeping() as (_, times):
        await asyncio.sleep(1000)
    assert times == []


@pytest.mark.looptime
async def test_memory_is_returned_after_the_last_request_and_after_its_connections_closed() -> None:
    async with keeping() as (keeper, times):
        keeper.record_request()
        await asyncio.sleep(1000)
    assert times == pytest.approx([10, 20])


@pytest.mark.looptime
async def test_memory_is_returned_during_a_burst() -> None:
    async with keeping() as (keeper, times):
        for _ in range(60):
            keeper.record_request()
            await asyncio.sleep(1)
        worked_until = 59
        await asyncio.sleep(1000)
    assert len(times) <= 9
    assert [at for at in times if at < worked_until] == pytest.approx([10, 20, 30, 40, 50])
    assert times[-1] >= worked_until + 15


def test_the_c_library_of_this_platform_is_supported() -> None:
    find_trim()()
