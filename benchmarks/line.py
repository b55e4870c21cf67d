"""A line to a server, on which a round trip takes a time, and which lets a number of bytes pass each second."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

_PIECE_BYTES: Final = 1 << 16
_PIECES: Final = 512
"""The limit of one connection in one direction; more is not read before: what 3 GB/s have on their way in 10 ms."""

_PIECES_OF_A_SLOW_LINE: Final = 2

_EARLY_SECONDS: Final = 0.0005
"""A pause takes whole milliseconds."""


class _Pace:
    """Says when the next bytes of any connection arrive."""

    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        self._seconds, self._rate = seconds, bytes_per_second
        self._free_at = 0.0
        self.pieces = _PIECES if math.isinf(bytes_per_second) else _PIECES_OF_A_SLOW_LINE

    def arrival(self, size_bytes: int) -> float:
        self._free_at = max(time.monotonic(), self._free_at) + size_bytes / self._rate
        return self._free_at + self._seconds


@asynccontextmanager
async def run_line(url: str, *, round_trip: float = 0.0, bytes_per_second: float = math.inf) -> AsyncIterator[str]:
    """Yield the URL by which the server at `url` is reached: `round_trip` seconds there and back, at that rate."""
    address = urlsplit(url)
    up, down = _Pace(round_trip / 2, bytes_per_second), _Pace(round_trip / 2, bytes_per_second)
    connections: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address.hostname, address.port)
        try:
            # The client has its connection at once: what it sends first comes later for that.
            await asyncio.sleep(round_trip)
            # A connection that breaks on one side breaks on the other.
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, back, up), name="line-up")
                both.create_task(_pass_on(there, writer, down), name="line-down")
        finally:
            back.close()
            writer.close()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(relay(reader, writer), name="line")
        connections.add(connection)
        await asyncio.wait({connection})
        connections.discard(connection)
        # How it ended is of no interest: a program that is killed closes nothing.
        _ = connection.cancelled() or connection.exception()

    server = await asyncio.start_server(keep, "127.0.0.1", 0, limit=_PIECE_BYTES, backlog=1024)
    try:
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: _Pace) -> None:
    """Read what may be on its way at a time, and write each piece when it arrives; the end is an empty one."""
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(pace.pieces)

    async def deliver() -> None:
        piece = b"any"
        while piece:
            arrives_at, piece = await underway.get()
            if (pause := arrives_at - time.monotonic() - _EARLY_SECONDS) > 0:
                await asyncio.sleep(pause)
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    async with asyncio.TaskGroup() as both:
        both.create_task(deliver(), name="line-deliver")
        piece = b"any"
        while piece:
            piece = await reader.read(_PIECE_BYTES)
            await underway.put((pace.arrival(len(piece)), piece))
