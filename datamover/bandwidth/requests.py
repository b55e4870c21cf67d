"""Heads of HTTP/1.1 requests to a proxy: who asks, where the request goes, and how long its body is.

Source: RFC 9112, sections 3.2.2 (absolute form) and 6.3 (length of a body); RFC 9110, section 7.6.1 (hop-by-hop).
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from datamover.bandwidth.dialing import Address, parse_address

__all__ = ["BadRequestError", "HeadReader", "RequestHead"]

_END: Final = b"\r\n\r\n"
_MOST_BYTES: Final = 65536
_CONNECT: Final = "CONNECT"
_AUTHORIZATION: Final = "proxy-authorization"
_PROXY_HEADERS: Final = frozenset({_AUTHORIZATION, "proxy-connection"})
_CONNECTION: Final = "connection"


class BadRequestError(Exception):
    """What was received is no request to a proxy; the message says why."""


@dataclass(frozen=True)
class RequestHead:
    """The head of one request; `headers` in their order."""

    method: str
    url: str
    version: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, head: bytes) -> "RequestHead":
        """Return the head in the bytes before its empty line.

        Raises:
            BadRequestError: it is not one.
        """
        first, *lines = head.decode("latin-1").split("\r\n")
        words, fields = first.split(" "), [line.partition(":") for line in lines]
        # What else servers accept, they may read in another way than this proxy does.
        if len(words) != len(("method", "url", "version")) or not all(
            colon and name and name == name.strip() for name, colon, _ in fields
        ):
            raise BadRequestError("malformed head")
        return cls(words[0], words[1], words[2], tuple((name, value.strip()) for name, _, value in fields))

    def values(self, name: str) -> list[str]:
        """Return the values of the header with that name in lower case."""
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def tunnels(self) -> bool:
        """Whether all that follows goes to the address."""
        return self.method == _CONNECT

    @property
    def authorization(self) -> str:
        """The credentials for the proxy; empty: there are none."""
        return "".join(self.values(_AUTHORIZATION)[:1])

    @property
    def address(self) -> Address:
        """Where the request goes.

        Raises:
            BadRequestError: it does not say, or it is no URL for a proxy.
        """
        try:
            if self.tunnels:
                return parse_address(self.url, 443)
            parts = urlsplit(self.url)
            if parts.scheme == "http":
                return parse_address(parts.netloc.rpartition("@")[2], 80)
        except ValueError as e:
            raise BadRequestError("malformed URL") from e
        raise BadRequestError("not a URL of http")

    @property
    def body_bytes(self) -> int | None:
        """The length of the body; None: it is chunked.

        Raises:
            BadRequestError: the headers contradict each other.
        """
        lengths = set(self.values("content-length"))
        if self.values("transfer-encoding"):
            if lengths:
                raise BadRequestError("a length and a transfer encoding")
            return None
        if not lengths:
            return 0
        (length, *others) = lengths
        if others or not (length.isascii() and length.isdecimal()):
            raise BadRequestError("malformed length")
        return int(length)

    def encode(self, *, absolute: bool, authorization: str = "") -> bytes:
        """Return the head to send on: without what is for this proxy.

        Args:
            absolute: with the whole URL, for another proxy.
            authorization: credentials for that one.
        """
        # As it was signed: a parsed one may lose a character.
        _, _, path = self.url.removeprefix("http://").partition("/")
        url = self.url if absolute else f"/{path}"
        dropped = _PROXY_HEADERS | ({_CONNECTION} if self.body_bytes is None else set())
        headers = [(name, value) for name, value in self.headers if name.lower() not in dropped]
        if self.body_bytes is None:
            # Its end is not looked for: so nothing may follow it.
            headers.append(("Connection", "close"))
        if authorization:
            headers.append(("Proxy-Authorization", authorization))
        lines = [f"{self.method} {url} {self.version}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class HeadReader:
    """Reads heads from a socket, and keeps what it received after one."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._received = b""

    async def read(self) -> RequestHead | None:
        """Return the next head; None: the connection ended before one.

        Raises:
            BadRequestError: what was received is no head.
            OSError: the connection is broken.
        """
        while _END not in self._received:
            if len(self._received) > _MOST_BYTES:
                raise BadRequestError("head too long")
            piece = await asyncio.get_running_loop().sock_recv(self._source, _MOST_BYTES)
            if not piece:
                return None
            self._received += piece
        head, _, self._received = self._received.partition(_END)
        return RequestHead.parse(head)

    def take(self, most_bytes: int | None) -> bytes:
        """Return what was received after the head, up to so many bytes; None: all of it."""
        end = len(self._received) if most_bytes is None else most_bytes
        taken, self._received = self._received[:end], self._received[end:]
        return taken
