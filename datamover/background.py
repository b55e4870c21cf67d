"""Blocking work in a thread that nobody has to wait for.

Knows how work is told to stop, and that a thread which hangs in the kernel must not keep this
process: neither asyncio's own threads nor their pool can be left. Does not know the work.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final, TypeVar

from core.aio import run_shielded
from core.clock import Deadline, SystemClock

__all__ = ["Stop", "run_in_background"]

Stop = Callable[[], bool]
"""Whether the work shall end now."""

_STOP_TIME: Final = timedelta(seconds=1)
"""What work that was told to stop gets to look at that: a canceled load ends within 2 seconds."""

_T = TypeVar("_T")


@asynccontextmanager
async def run_in_background(work: Callable[[Stop], _T], *, name: str) -> AsyncIterator["asyncio.Future[_T]"]:
    """Run `work` in a thread from now on, and yield what it will return or raise.

    At the end of the block the work is told to stop, and waited for, but not for long.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    stopped = threading.Event()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # there is a result where there is no error

    def run() -> None:
        result: _T | None = None
        error: BaseException | None = None
        try:
            result = work(stopped.is_set)
        except Exception as e:  # noqa: BLE001 - it is raised where the work is waited for
            error = e
        # The loop is closed when nobody waited for a thread that hung.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        yield future
    finally:
        stopped.set()
        await _wait_for_end(future, name)


async def _wait_for_end(future: "asyncio.Future[_T]", name: str) -> None:
    async def ended() -> None:
        await asyncio.wait({future})

    with suppress(TimeoutError):
        await run_shielded(ended, name=f"end of {name}", deadline=Deadline.after(SystemClock(), _STOP_TIME))
    if future.done() and not future.cancelled():
        future.exception()
    future.cancel()
