"""Work that goes on beside a test, and waiting for what comes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


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


async def until(condition: Callable[[], bool], *, seconds: float = 10.0, every: float = 0.05) -> None:
    """Wait until `condition` holds, checking it `every` so many seconds; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(every)
