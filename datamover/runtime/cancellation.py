"""Cancellation of running work, and blocking work in a thread that can be abandoned.

A thread that hangs in the kernel must not keep this process, as one of asyncio's own pool would: it is joined at exit.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.contract import CANCELED_ENDING
from core.errors import AgentError, CanceledError
from datamover.runtime.signals import StopSignal

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

ShouldStop = Callable[[], bool]
"""Returns whether the work is to stop."""

_STOP_TIMEOUT: Final = timedelta(seconds=1)
"""How long to wait for stopped work to end: a canceled transfer ends within 2 seconds."""


class Canceler:
    """Takes requests to end the work; the first one counts."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self.error: AgentError | None = None
        """The error to end with; None while the work may go on."""

    @property
    def requested(self) -> bool:
        """Whether the work is to end."""
        return self._requested.is_set()

    def cancel(self, reason: str) -> None:
        """Cancel the transfer, because of `reason`."""
        self.fail(CanceledError(f"{reason}: {CANCELED_ENDING}"))

    def fail(self, error: AgentError) -> None:
        """Fail the transfer with `error`."""
        self.error = self.error or error
        self._requested.set()

    def cancel_on(self, stop: StopSignal) -> None:
        """Cancel the transfer when this process gets a signal."""
        loop = asyncio.get_running_loop()
        stop.listen(lambda: loop.call_soon_threadsafe(self.cancel, stop.reason))

    async def wait(self) -> AgentError:
        """Wait for a request, and return the error to end with."""
        await self._requested.wait()
        return self.error or CanceledError(CANCELED_ENDING)


async def run_unless_canceled(work: Callable[[], Coroutine[Any, Any, _T]], canceler: Canceler) -> _T:
    """Return what `work` returns; a request of `canceler` cancels it, and raises its AgentError."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work(), name="work")
    waiting = loop.create_task(canceler.wait(), name="canceler")
    both: set[asyncio.Task[Any]] = {working, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        requested = waiting.done()
        waiting.cancel()
        await asyncio.wait(both)
    if requested and (working.cancelled() or working.exception()):
        raise waiting.result()
    return working.result()


async def run_beside(companion: Callable[[], Coroutine[Any, Any, None]], work: Awaitable[_T], *, name: str) -> _T:
    """Return what `work` returns; run `companion` at the same time, whose errors are only logged."""
    task = asyncio.get_running_loop().create_task(companion(), name=name)
    try:
        return await work
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()):
            _logger.error("%s failed", name, exc_info=error)


@asynccontextmanager
async def run_in_background(work: Callable[[ShouldStop], _T], *, name: str) -> AsyncIterator["asyncio.Future[_T]"]:
    """Run `work` in a thread, and yield a future of what it returns or raises.

    At the end of the block the work is stopped; after a second without an end it is abandoned, and at once if a wait
    for the future was canceled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    stopped = threading.Event()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            set_outcome = partial(future.set_result, work(stopped.is_set))
        except Exception as e:  # noqa: BLE001 - the future raises it
            set_outcome = partial(future.set_exception, e)
        # The loop is closed if the thread hung and was abandoned.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        yield future
    finally:
        stopped.set()
        wait, deadline = partial(asyncio.wait, {future}), Deadline.after(SystemClock(), _STOP_TIMEOUT)
        with suppress(TimeoutError):
            await run_shielded(wait, name=f"end of {name}", deadline=deadline)
        if future.done() and not future.cancelled():
            future.exception()
        future.cancel()


async def call_in_thread(work: Callable[[], _T], *, name: str) -> _T:
    """Return what `work` returns in a thread, which is abandoned like one in the background."""
    async with run_in_background(lambda _: work(), name=name) as working:
        return await working
