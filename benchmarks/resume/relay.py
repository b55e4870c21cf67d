"""A relay before the storage, through which a limited number of bytes passes each second, in each direction.

Knows connections and their pace. Does not know what passes.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import urlsplit

__all__ = ["run_relay"]

_PIECE_BYTES: Final = 1 << 16


class _Pace:
    """Lets bytes pass one piece after another, of all connections."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def wait(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


@asynccontextmanager
async def run_relay(url: str, bytes_per_second: float) -> AsyncIterator[str]:
    """Relay connections to the server at `url`, and yield the URL to reach it by, until the end of the block."""
    address = urlsplit(url)
    up, down = _Pace(bytes_per_second), _Pace(bytes_per_second)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The server is closed while connections are open.
        with suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(address.hostname, address.port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, back, up), name="relay-up")
                    both.create_task(_copy(there, writer, down), name="relay-down")
            finally:
                back.close()
                writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, limit=_PIECE_BYTES)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: _Pace) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            await pace.wait(len(piece))
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
