"""The request to end before the work is done, and work that heeds it.

Knows how work is canceled, and waited for until it has ended. Does not know what the work is;
`datamover.pod.follower` reads the request from a custom resource.

Blocking work in a thread that nobody has to wait for.

Knows how work is told to stop, and that a thread which hangs in the kernel must not keep this
process: neither asyncio's own threads nor their pool can be left. Does not know the work.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.contract import CANCELED_ENDING
from core.errors import AgentError, CanceledError
from datamover.runtime.signals import StopSignal

__all__ = ["Canceller", "ShouldStop", "run_beside", "run_in_background", "run_unless_canceled"]


_logger = logging.getLogger(__name__)


_T = TypeVar("_T")


class Canceller:
    """A request to end; the first one counts."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._error: AgentError | None = None

    @property
    def requested(self) -> bool:
        """Whether the end was asked for."""
        return self._requested.is_set()

    def request(self, reason: str) -> None:
        """Ask for the end: the load is canceled, because of `reason`."""
        self.fail(CanceledError(f"{reason}: {CANCELED_ENDING}"))

    def fail(self, error: AgentError) -> None:
        """Ask for the end: the load has failed with `error`."""
        self._error = self._error or error
        self._requested.set()

    def heed(self, stop: StopSignal) -> None:
        """Take a signal to this process as a request too."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            loop.call_soon_threadsafe(self.request, f"the data mover was told to stop by {stop.received}")

        stop.listen(on_signal)

    async def wait(self) -> AgentError:
        """Return what the load ends with, once the end was asked for."""
        await self._requested.wait()
        return self._error or CanceledError(CANCELED_ENDING)


async def run_unless_canceled(work: Callable[[], Coroutine[Any, Any, _T]], canceller: Canceller) -> _T:
    """Return what `work` returns; on a request to end it is canceled, and so what it runs.

    Raises:
        AgentError: what the request said, if it came before `work` was done.
    """
    loop = asyncio.get_running_loop()
    working = loop.create_task(work(), name="work")
    waiting = loop.create_task(canceller.wait(), name="canceller")
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
    """Return what `work` returns; `companion` runs as long as it does, and cannot fail it."""
    task = asyncio.get_running_loop().create_task(companion(), name=name)
    try:
        return await work
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()):
            _logger.error("%s ended before its time", name, exc_info=error)


ShouldStop = Callable[[], bool]
"""Whether the work shall end now."""


_STOP_TIME: Final = timedelta(seconds=1)
"""What work that was told to stop gets to look at that: a canceled load ends within 2 seconds."""


@asynccontextmanager
async def run_in_background(work: Callable[[ShouldStop], _T], *, name: str) -> AsyncIterator["asyncio.Future[_T]"]:
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
