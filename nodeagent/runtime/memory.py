"""Return of free memory to the system after a burst of work.

What Python keeps for small objects stays: the next transfer uses it again.
Source: malloc_trim(3): since glibc 2.8 it returns whole free pages in all of the heap.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from core.clock import Clock

__all__ = ["MemoryTrimmer", "find_trim"]

_REST_SECONDS: Final = 10.0
"""Pause between two calls of malloc_trim; each takes a millisecond or two."""

_CONNECTIONS_END_SECONDS: Final = 20.0
"""Time after the last request until idle connections are closed. Source: aiohttp 3.13, TCPConnector:
`keepalive_timeout` is 15 s."""


class MemoryTrimmer:
    """Returns free memory during a burst of requests, and once more after it."""

    def __init__(self, clock: Clock, trim: Callable[[], None]) -> None:
        """Return memory by calling `trim`."""
        self._clock = clock
        self._trim = trim
        self._worked = asyncio.Event()

    def record_request(self) -> None:
        """Record that a request was made."""
        self._worked.set()

    async def run(self) -> None:
        """Return memory until canceled; idle while no request is made."""
        while True:
            await self._worked.wait()
            while self._worked.is_set():
                self._worked.clear()
                await self._clock.sleep(_REST_SECONDS)
                self._trim()
            await self._clock.sleep(_CONNECTIONS_END_SECONDS - _REST_SECONDS)
            self._trim()


def find_trim() -> Callable[[], None]:
    """Return a function that returns free memory; without malloc_trim it does nothing."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def trim() -> None:
        if malloc_trim is not None:
            malloc_trim(0)

    return trim
