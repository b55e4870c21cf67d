"""Work that goes on beside a test."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
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
