"""A proxy before the test bed's S3 server that can be shut while data moves.

A data mover that reaches the server through a gate is held in mid-transfer by construction: a shut gate
lets a connection carry what a repository is opened with, and stops in the middle of its first
large blob, until it is opened. Knows nothing of S3.
"""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.testbed.processes import LIMIT_SECONDS, BedError, wait_for
from tests.testbed.settings import S3_ADDRESS, S3_PORT

_CHUNK_BYTES = 64 << 10
_PASSES_BYTES = 1 << 20
"""What a connection carries through a shut gate: an index of a small repository has some KiB."""

HELD_BYTES = 24 << 20
"""Random data of this size does not pass a shut gate: it is one blob of about 20 MiB, and more."""

_POLL_SECONDS = 0.05
_LAST_CALLBACKS = 5


class Gate:
    """A proxy before the S3 server."""

    def __init__(self) -> None:
        """Start open, without a connection."""
        self.port = 0
        self._passes_bytes = _PASSES_BYTES
        self._together = False
        self._carried: Counter[tuple[str, str]] = Counter()
        self._held: dict[int, str] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._numbers = itertools.count()
        self._opened = asyncio.Event()
        self._opened.set()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Where the S3 server is, for a storage location."""
        return f"http://{S3_ADDRESS}:{self.port}"

    def shut(self, *, passes_bytes: int = _PASSES_BYTES, together: bool = False) -> None:
        """Hold what moves from now on, but for the first bytes.

        They are those of each connection, or of all connections of a client `together`, in each direction.
        """
        self._passes_bytes, self._together = passes_bytes, together
        self._carried.clear()
        self._loop.call_soon_threadsafe(self._opened.clear)

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._opened.set)

    def wait_held(self, *addresses: str) -> None:
        """Return once the data path of each of these pods is held."""
        wait_for(
            lambda: f"{addresses} to be held, and only {sorted(set(self._held.values()))} are",
            lambda: set(addresses) <= set(self._held.values()),
        )

    async def serve(self, ready: threading.Event) -> None:
        """Serve until `end`; `ready` is set when the port is known. No connection is left behind."""
        self._loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self._carry, S3_ADDRESS, 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._ended.wait()
        self._opened.set()
        # Not by canceling: asyncio's streams log that as an error.
        while carrying := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.wait(carrying, timeout=_POLL_SECONDS)
        # A socket is closed by a callback, which may come after the task of its connection has ended.
        for _ in range(_LAST_CALLBACKS):
            await asyncio.sleep(0)

    def end(self) -> None:
        """Let `serve` return; connections that are left are dropped."""
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str(writer.get_extra_info("peername")[0])
        writers = {writer}
        self._writers.add(writer)
        try:
            from_server, to_server = await asyncio.open_connection(S3_ADDRESS, S3_PORT)
            writers.add(to_server)
            self._writers.add(to_server)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, to_server, (address, "up")), name="to the server")
                group.create_task(self._pump(from_server, writer, (address, "down")), name="from the server")
        except OSError:
            # No server, no connection.
            pass
        finally:
            for each in writers:
                if not each.transport.is_closing():
                    each.transport.abort()
                with suppress(OSError):
                    await each.wait_closed()
            self._writers -= writers

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: tuple[str, str]) -> None:
        number, carried = next(self._numbers), 0
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                carried = 0 if self._opened.is_set() else carried + len(chunk)
                self._carried[way] += 0 if self._opened.is_set() else len(chunk)
                if (self._carried[way] if self._together else carried) > self._passes_bytes:
                    self._held[number] = way[0]
                    await self._opened.wait()
                    del self._held[number]
                writer.write(chunk)
                await writer.drain()
        writer.close()


@contextmanager
def open_gate() -> Iterator[Gate]:
    """Run a gate in a thread of its own; it is open."""
    gate, ready = Gate(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(gate.serve(ready)), name="gate")
    thread.start()
    try:
        if not ready.wait(LIMIT_SECONDS):
            raise BedError("the gate before the S3 server was not ready in time")
        yield gate
    finally:
        gate.end()
        thread.join()
