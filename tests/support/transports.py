"""Transports around another one: a test decides what becomes of some requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from core.kube.transport import Request, Response, Transport


@dataclass
class Around(Transport):
    """Passes everything on to a transport that others may share: it is not closed."""

    inner: Transport

    async def request(self, request: Request) -> Response:
        return await self.inner.request(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.inner.stream(request)

    async def close(self) -> None:
        pass


@dataclass
class Pause(Around):
    """The way to the server of a process that is paused before the first request that `at` selects.

    Nothing reaches it or leaves it until `over` is set; then everything continues.
    """

    at: Callable[[Request], bool]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, request: Request) -> Response:
        if self.at(request):
            self.stopped.set()
        await self._wait()
        response = await self.inner.request(request)
        await self._wait()
        return response

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        await self._wait()
        async with self.inner.stream(request) as lines:
            yield self._lines(lines)

    async def _lines(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            await self._wait()
            yield line

    async def _wait(self) -> None:
        if self.stopped.is_set():
            await self.over.wait()
