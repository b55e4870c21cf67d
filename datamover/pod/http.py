"""One connection to an API server: one question, one answer at a time.

Knows sockets and h11, which no other module imports and which knows HTTP/1.1. Does not know
what is asked, or who asks. aiohttp would take 9 MiB more, a fifth of what a mover may take, and
a third more processor time to start.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final

import h11

__all__ = ["Connection", "Head", "HostPort", "HttpError"]

_PIECE_BYTES: Final = 65536


class HttpError(OSError):
    """What the server sent is no HTTP, or ends too early."""


@dataclass(frozen=True)
class HostPort:
    """Where a server listens; `authority` is what its certificate is checked with, None for no TLS."""

    host: str
    port: int
    authority: ssl.SSLContext | None

    @property
    def shown(self) -> str:
        """Host and port, as the header `Host` has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Head:
    """An answer's status, and its headers by their names in lower case."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """One connection to a server."""

    def __init__(self, address: HostPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: HostPort) -> "Connection":
        """Return a new connection.

        Raises:
            OSError: there is nobody, or nobody who can be trusted.
        """
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.authority)
        return cls(address, reader, writer)

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end, and the server keeps the connection open."""
        ended = {self._http.our_state, self._http.their_state} <= {h11.DONE, h11.IDLE}
        return ended and not self._reader.at_eof()

    def close(self) -> None:
        """Leave at once, whatever is still to come; it may be called twice."""
        self._writer.transport.abort()

    async def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> Head:
        """Send a question and return the head of its answer; its body is to be read next.

        Args:
            target: path and query, escaped.

        Raises:
            OSError: no answer, or none that can be read.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        length = {} if body is None else {"Content-Length": str(len(body))}
        named = {"Host": self._address.shown, **headers, **length}
        self._send(h11.Request(method=method, target=target, headers=list(named.items())))
        if body:
            self._send(h11.Data(data=body))
        self._send(h11.EndOfMessage())
        await self._writer.drain()
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                return Head(event.status_code, found)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives.

        Raises:
            OSError: it ended before its end.
        """
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    def _send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _next_event(self) -> h11.Event:
        """Return the next piece of the answer, its end included."""
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_PIECE_BYTES))
                    continue
            except h11.RemoteProtocolError as e:
                raise HttpError(f"what answered does not speak HTTP, or left too early: {e}") from e
            if isinstance(event, h11.ConnectionClosed):
                raise HttpError("the connection ended before the answer did")
            return event if isinstance(event, h11.Event) else h11.EndOfMessage()
