"""A FakeKube over HTTP, for a data mover in a process of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qsl, unquote, urlsplit

from core.kube.transport import Request
from tests.support.fakekube import FakeKube


class KubeServer:
    """Its port, and whether it answers: otherwise it accepts connections and requests, as behind a lost network."""

    def __init__(self, kube: FakeKube) -> None:
        self.port = 0
        self._kube = kube
        self._answering = asyncio.Event()
        self._answering.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def silence(self) -> None:
        """Answer no request, and send nothing on a watch."""
        self._answering.clear()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="kube-connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Close all connections."""
        for task in (tasks := set(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    request = await _read(reader)
                    await self._answering.wait()
                    if request.query.get("watch"):
                        await self._watch(request, writer)
                        return
                    response = await self._kube.request(request)
                    await self._answering.wait()
                    length = f"Content-Length: {len(response.body)}"
                    writer.write(f"HTTP/1.1 {response.status} -\r\n{length}\r\n\r\n".encode() + response.body)
                    await writer.drain()
        finally:
            writer.close()

    async def _watch(self, request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        async with self._kube.stream(request) as lines:
            async for line in lines:
                await self._answering.wait()
                writer.write(line + b"\n")
                await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Request:
    first, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = first.split(" ")
    named = {name.lower(): value for name, _, value in (header.partition(": ") for header in headers)}
    body = await reader.readexactly(int(named.get("content-length", "0")))
    address = urlsplit(target)
    return Request(method, unquote(address.path), dict(parse_qsl(address.query)), body or None)


@asynccontextmanager
async def serve_kube(kube: FakeKube) -> AsyncIterator[KubeServer]:
    """Serve it on a port of loopback."""
    server = KubeServer(kube)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await server.end()
