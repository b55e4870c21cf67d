"""HTTP/1.1 against a server that sends exactly the bytes of the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from core.kube.transport import KEEPALIVE_OPTIONS
from datamover.pod.api_transport import HostPort, HttpError, ServerConnection
from tests.support.sockets import connections_to

_OK = b"HTTP/1.1 200 OK\r\n"


@dataclass
class Canned:
    """Sends its pieces as the response to each request, and may close the connection then."""

    pieces: list[bytes]
    leaves: bool = False
    received: list[bytes] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.received.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.leaves:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.set()


@asynccontextmanager
async def connected(canned: Canned) -> AsyncIterator[ServerConnection]:
    listening = await asyncio.start_server(canned.serve, "127.0.0.1", 0)
    connection = await ServerConnection.open(
        HostPort("127.0.0.1", listening.sockets[0].getsockname()[1], authority=None)
    )
    try:
        yield connection
    finally:
        connection.close()
        listening.close()
        await listening.wait_closed()
        await canned.ended.wait()
        # The event loop closes the sockets in its next iteration.
        await asyncio.sleep(0)


async def ask(connection: ServerConnection) -> tuple[int, bytes]:
    head = await connection.send("GET", "/x", {}, None)
    return head.status, b"".join([piece async for piece in connection.body()])


@pytest.mark.parametrize(
    ("pieces", "status", "body", "reusable"),
    [
        ([_OK + b"Content-Length: 4\r\n\r\nbody"], 200, b"body", True),
        ([_OK + b"Content-Length: 4\r\nConnection: close\r\n\r\nbody"], 200, b"body", False),
        ([_OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n2;x=y\r\nBy\r\n0\r\n\r\n"], 200, b"bodyBy", True),
        ([_OK + b"Transfer-Encoding: chunked\r\n\r\nA\r\nsplit", b" body\r", b"\n0\r\n\r\n"], 200, b"split body", True),
        ([_OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nTrailer: 1\r\n\r\n"], 200, b"x", True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"Content-Length: 0\r\n\r\n"], 200, b"", True),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b"", True),
        ([b"HTTP/1.1 500\r\ncontent-length:1\r\n\r\nx"], 500, b"x", True),
    ],
    ids=["length", "close", "chunks", "split-chunk", "trailer", "interim", "no-content", "no-reason"],
)
async def test_a_response_is_read_to_its_end(pieces: list[bytes], status: int, body: bytes, reusable: bool) -> None:
    canned = Canned(pieces)
    async with connected(canned) as connection:
        assert await ask(connection) == (status, body)
        assert connection.reusable is reusable
        if reusable:
            assert await ask(connection) == (status, body)
    assert canned.received[0] == f"GET /x HTTP/1.1\r\nHost: {canned.received[0].split()[4].decode()}\r\n\r\n".encode()


async def test_a_response_without_a_length_ends_with_the_connection() -> None:
    async with connected(Canned([_OK + b"\r\nall ", b"of it"], leaves=True)) as connection:
        assert await ask(connection) == (200, b"all of it")
        assert not connection.reusable


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        _OK + b"Content-Length: 9\r\n\r\nbody",
        _OK + b"Content-Length: -1\r\n\r\nbody",
        _OK + b"Transfer-Encoding: chunked\r\n\r\nfour\r\nbody\r\n0\r\n\r\n",
        _OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"x" * 200_000,
    ],
    ids=["nothing", "half-head", "half-body", "no-length", "no-chunk-size", "no-last-chunk", "ssh", "endless-line"],
)
async def test_a_truncated_or_invalid_response_is_an_error(answer: bytes) -> None:
    async with connected(Canned([answer], leaves=True)) as connection:
        with pytest.raises(HttpError):
            await ask(connection)
        assert not connection.reusable


async def test_a_connection_that_the_server_closed_is_not_reused() -> None:
    async with connected(Canned([_OK + b"Content-Length: 1\r\n\r\nx"], leaves=True)) as connection:
        await ask(connection)
        async with asyncio.timeout(10):
            while connection.reusable:
                await asyncio.sleep(0)


async def test_an_unread_response_makes_its_connection_unusable() -> None:
    async with connected(Canned([_OK + b"Content-Length: 4\r\n\r\nbody"])) as connection:
        await connection.send("GET", "/x", {}, None)
        assert not connection.reusable


def test_an_address_of_ipv6_is_shown_in_brackets() -> None:
    assert HostPort("::1", 443, authority=None).header == "[::1]:443"


async def test_a_connection_has_keepalive() -> None:
    async with connected(Canned([_OK + b"Content-Length: 0\r\n\r\n"])) as connection:
        await ask(connection)
        (found,) = connections_to(connection._address.port)
        with found:
            assert {option: found.getsockopt(*option) for option in KEEPALIVE_OPTIONS} == KEEPALIVE_OPTIONS
