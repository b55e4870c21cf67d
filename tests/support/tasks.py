"""Work that goes on beside a test, and waiting for what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], *, lead_seconds: float = 0.0) -> AsyncIterator[None]:
    """Have `work` run, from so long before what is inside; it has not ended when that has, and is canceled then."""
    task = asyncio.create_task(work, name="beside the test")
    try:
        await asyncio.sleep(lead_seconds)
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def interrupt(work: Coroutine[Any, Any, Any], reached: Awaitable[object]) -> None:
    """Have `work` run until `reached` has returned, and cancel it; assert that it ends by that."""
    task = asyncio.create_task(work, name="interrupted")
    await reached
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], bool], *, seconds: float = 10.0, every: float = 0.05) -> None:
    """Wait until `condition` holds, checking it `every` so many seconds; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(every)
