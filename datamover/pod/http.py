"""One HTTP/1.1 connection to an API server: one request and one response at a time.

The only module that imports h11. aiohttp would use 9 MiB more, a fifth of what a mover may
use, and a third more CPU time at start.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final

import h11

from core.kube.transport import keep_alive

__all__ = ["Head", "HostPort", "HttpError", "ServerConnection"]

_PIECE_BYTES: Final = 65536


class HttpError(OSError):
    """The server sent invalid HTTP, or closed the connection before the end."""


@dataclass(frozen=True)
class HostPort:
    """Where a server listens; `authority` verifies its certificate, None for no TLS."""

    host: str
    port: int
    authority: ssl.SSLContext | None

    @property
    def header(self) -> str:
        """Host and port, as in the `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Head:
    """A response's status, and its headers by lower-case name."""

    status: int
    headers: Mapping[str, str]


class ServerConnection:
    """One connection to a server."""

    def __init__(self, address: HostPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: HostPort) -> "ServerConnection":
        """Return a new connection, with keepalive.

        Raises:
            OSError: nothing listens there, or its certificate is not trusted.
        """
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.authority)
        keep_alive(writer.get_extra_info("socket"))
        return cls(address, reader, writer)

    @property
    def reusable(self) -> bool:
        """Whether the response was read to its end and the server keeps the connection open."""
        ended = {self._http.our_state, self._http.their_state} <= {h11.DONE, h11.IDLE}
        return ended and not self._reader.at_eof()

    def close(self) -> None:
        """Abort the connection at once; may be called twice."""
        self._writer.transport.abort()

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> Head:
        """Send a request and return the head of its response; read its `body` next.

        Args:
            target: path and query, escaped.

        Raises:
            OSError: no response, or an invalid one.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        length = {} if body is None else {"Content-Length": str(len(body))}
        named = {"Host": self._address.header, **headers, **length}
        self._write(h11.Request(method=method, target=target, headers=list(named.items())))
        if body:
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        await self._writer.drain()
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                return Head(event.status_code, found)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives.

        Raises:
            OSError: the connection was closed before the end.
        """
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _next_event(self) -> h11.Event:
        """Return the next event of the response, including its end."""
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_PIECE_BYTES))
                    continue
            except h11.RemoteProtocolError as e:
                raise HttpError(f"invalid HTTP response, or closed too early: {e}") from e
            if isinstance(event, h11.ConnectionClosed):
                raise HttpError("connection closed before the end of the response")
            return event if isinstance(event, h11.Event) else h11.EndOfMessage()
