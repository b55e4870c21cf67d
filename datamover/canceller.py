"""The request to end before the work is done, and work that heeds it.

Knows how work is canceled, and waited for until it has ended. Does not know what the work is;
`datamover.follower` reads the request from a custom resource.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from core.contract import CANCELED_ENDING
from core.errors import AgentError, CanceledError
from datamover.signals import StopSignal

__all__ = ["Canceller", "run_beside", "run_unless_canceled"]

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
