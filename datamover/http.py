"""HTTP/1.1 as an API server speaks it: one question, one answer at a time.

Knows lines, lengths and chunks. Does not know what is asked, or who asks. aiohttp would do
the same for 10 MiB more and 0.1 s longer, which is a quarter of what the whole mover takes.
Source: RFC 9112.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Address", "Connection", "Head", "HttpError"]

_PIECE_BYTES: Final = 65536
_INTERIM: Final = range(100, 200)
_WITHOUT_BODY: Final = (204, 304)


class HttpError(OSError):
    """What the server sent is no HTTP, or ends too early."""


@dataclass(frozen=True)
class Address:
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

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._head = Head(0, {})
        self._finished = True

    @classmethod
    async def open(cls, address: Address) -> "Connection":
        """Return a new connection.

        Raises:
            OSError: there is nobody, or nobody who can be trusted.
        """
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.authority)
        return cls(address, reader, writer)

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end, and the server keeps the connection open."""
        kept = self._head.headers.get("connection", "").lower() != "close"
        return self._finished and kept and not self._reader.at_eof()

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
        self._finished = False
        length = {} if body is None else {"Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in {"Host": self._address.shown, **headers, **length}.items()]
        head = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""])
        self._writer.write(head.encode("latin-1") + (body or b""))
        await self._writer.drain()
        self._head = await self._read_head()
        while self._head.status in _INTERIM:
            self._head = await self._read_head()
        return self._head

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives.

        Raises:
            OSError: it ended before its end.
        """
        length = self._head.headers.get("content-length")
        if self._head.status in _WITHOUT_BODY:
            pass
        elif self._head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _parse_size(await self._line()):
                async for piece in self._exactly(size):
                    yield piece
                await self._line()
            while await self._line():
                pass
        elif length is not None:
            async for piece in self._exactly(_parse_length(length)):
                yield piece
        else:
            while piece := await self._reader.read(_PIECE_BYTES):
                yield piece
        self._finished = True

    async def _exactly(self, size: int) -> AsyncGenerator[bytes, None]:
        while size:
            piece = await self._reader.read(min(size, _PIECE_BYTES))
            if not piece:
                raise HttpError("the connection ended before the answer did")
            size -= len(piece)
            yield piece

    async def _read_head(self) -> Head:
        version, _, rest = (await self._line()).partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not status.isdecimal():
            raise HttpError("what answered does not speak HTTP")
        headers: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return Head(int(status), headers)

    async def _line(self) -> str:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as e:
            raise HttpError("the connection ended before the answer did") from e
        except asyncio.LimitOverrunError as e:
            raise HttpError("a line of the answer has no end") from e
        return line.decode("latin-1").rstrip("\r\n")


def _parse_size(line: str) -> int:
    """Return the size of a chunk; what may follow it means nothing here."""
    try:
        return int(line.partition(";")[0], 16)
    except ValueError as e:
        raise HttpError("the answer has a chunk without a size") from e


def _parse_length(text: str) -> int:
    if not text.isdecimal():
        raise HttpError("the answer has a length that is no number")
    return int(text)
