"""A relay before a server, through which a limited number of bytes passes each second, in each direction.

Knows connections, their pace, and when they are cut off. Does not know what passes.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Final
from urllib.parse import urlsplit

__all__ = ["run_relay"]

_PIECE_BYTES: Final = 1 << 16


class _Pace:
    """Lets bytes pass one piece after another, of all connections."""

    def __init__(self, bytes_per_second: float, passes: asyncio.Event | None) -> None:
        self._rate = bytes_per_second
        self._passes = passes
        self._free_at = 0.0

    async def wait(self, size_bytes: int) -> None:
        if self._passes is not None:
            await self._passes.wait()
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


@asynccontextmanager
async def run_relay(
    url: str,
    bytes_per_second: float = math.inf,
    passes: asyncio.Event | None = None,
    during: Callable[[asyncio.StreamWriter], AbstractContextManager[None]] | None = None,
) -> AsyncIterator[str]:
    """Relay connections to the server at `url`, and yield the URL to reach it by, until the end of the block.

    While `passes` is not set nothing passes, in connections that stay open. Each connection of a client is in the
    context that `during` returns, if there is one.
    """
    address = urlsplit(url)
    up, down = _Pace(bytes_per_second, passes), _Pace(bytes_per_second, passes)

    connections: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address.hostname, address.port)
        try:
            # A connection that breaks on one side breaks on the other.
            with during(writer) if during is not None else nullcontext():
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, back, up), name="relay-up")
                    both.create_task(_copy(there, writer, down), name="relay-down")
        finally:
            back.close()
            writer.close()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(relay(reader, writer), name="relay")
        connections.add(connection)
        await asyncio.wait({connection})
        connections.discard(connection)
        # How it ended is of no interest: a program that is killed closes nothing.
        _ = connection.cancelled() or connection.exception()

    server = await asyncio.start_server(keep, "127.0.0.1", 0, limit=_PIECE_BYTES)
    try:
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
    finally:
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: _Pace) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        await pace.wait(len(piece))
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
