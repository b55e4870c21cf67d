"""Gives memory back that a burst of work has left behind.

Knows when work was done lately, and how the C library returns free pages. Does not know the
work. What Python itself keeps for small objects stays: it is used again by the next load.
Source: malloc_trim(3): since glibc 2.8 it returns whole free pages in all of the heap.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

from core.clock import Clock

__all__ = ["MemoryTrimmer", "find_trim"]

_REST_SECONDS: Final = 10.0
"""Between two returns: each takes a millisecond or two."""

_CONNECTIONS_END_SECONDS: Final = 20.0
"""So long after the last request connections that nobody needs are closed. Source: aiohttp 3.13, TCPConnector:
`keepalive_timeout` is 15 s."""


class MemoryTrimmer:
    """Returns free memory while work goes on, and once more behind its end."""

    def __init__(self, clock: Clock, trim: Callable[[], None]) -> None:
        """Return memory by `trim`."""
        self._clock = clock
        self._trim = trim
        self._worked = asyncio.Event()

    def note(self) -> None:
        """Note that something was done just now."""
        self._worked.set()

    async def run(self) -> None:
        """Return memory until canceled; nothing happens where nothing is done."""
        while True:
            await self._worked.wait()
            while self._worked.is_set():
                self._worked.clear()
                await self._clock.sleep(_REST_SECONDS)
                self._trim()
            await self._clock.sleep(_CONNECTIONS_END_SECONDS - _REST_SECONDS)
            self._trim()


def find_trim() -> Callable[[], None]:
    """Return what gives free memory back; it does nothing where the C library cannot."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def trim() -> None:
        if malloc_trim is not None:
            malloc_trim(0)

    return trim
