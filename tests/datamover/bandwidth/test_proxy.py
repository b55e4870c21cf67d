"""The proxy with real sockets: who may use it, what passes, and how fast; and the rate of a lane."""

import asyncio
import errno
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from core.clock import SystemClock
from core.models.transfer_settings import BandwidthLimits
from datamover.bandwidth import dialing
from datamover.bandwidth.dialing import Address
from datamover.bandwidth.proxy import BandwidthProxy, Lane
from tests.nodeagent.support.hand_clock import FreeClock

_HOST = "storage.example.com"


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is this machine's: kopia uses no proxy for loopback addresses."""
    connect = dialing._connect

    async def local(to: Address) -> socket.socket:
        if to.host == "gone.example.com":
            raise ConnectionRefusedError(111, "refused")
        return await connect(to if ".." in to.host else Address("127.0.0.1", to.port))

    monkeypatch.setattr(dialing, "_connect", local)


class _Server:
    """An HTTP server that keeps what it receives, and answers each request with `answer`."""

    def __init__(self, answer: bytes = b"ok") -> None:
        self.answer = answer
        self.received = b""
        self.heads: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.received += await reader.readexactly(_length_in(head))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.answer) + self.answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            # The other end is done.
            pass
        finally:
            writer.close()


def _length_in(head: bytes) -> int:
    found = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return int(found[0].partition(b":")[2]) if found else 0


@asynccontextmanager
async def _serving(server: _Server) -> AsyncIterator[_Server]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield server


@asynccontextmanager
async def _running(
    limits: BandwidthLimits | None = None, environment: dict[str, str] | None = None
) -> AsyncIterator[BandwidthProxy]:
    with closing(BandwidthProxy(environment or {}, SystemClock(), limits or BandwidthLimits())) as proxy:
        task = asyncio.get_running_loop().create_task(proxy.run())
        try:
            yield proxy
        finally:
            task.cancel()
            await asyncio.wait({task})


@dataclass(frozen=True)
class _Client:
    """One connection to the proxy, as kopia would open it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    authorization: str

    async def request(self, method: str, url: str, body: bytes = b"", headers: str | None = None) -> bytes:
        """Send a request and return the head of the answer with its body."""
        own = self.authorization if headers is None else headers
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        self.writer.write(f"{method} {url} HTTP/1.1\r\nHost: {_HOST}\r\n{own}{length}\r\n".encode() + body)
        await self.writer.drain()
        head = await self.reader.readuntil(b"\r\n\r\n")
        return head + await self.reader.readexactly(_length_in(head))


@asynccontextmanager
async def _open(proxy: BandwidthProxy) -> AsyncIterator[_Client]:
    url = urlsplit(proxy.environment["HTTP_PROXY"])
    credentials = b64encode(f"{url.username}:{url.password}".encode()).decode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        yield _Client(reader, writer, f"Proxy-Authorization: Basic {credentials}\r\n")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_kopia_is_given_this_proxy_alone_and_only_who_knows_the_password_is_served() -> None:
    environment = {"NO_PROXY": "*", "https_proxy": "http://p:1", "HOME": "/root"}
    async with _serving(_Server()) as server, _running(environment=environment) as proxy, _open(proxy) as client:
        assert proxy.environment.keys() == {"HOME", "HTTP_PROXY", "HTTPS_PROXY"}
        assert proxy.password in proxy.environment["HTTPS_PROXY"]
        answer = await client.request(
            "GET", f"http://{_HOST}:{server.port}/", headers="Proxy-Authorization: Basic eDp5\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 407 ")
        assert server.heads == []


async def test_requests_of_one_connection_are_forwarded_one_after_the_other() -> None:
    async with _serving(_Server(b"answer")) as server, _running() as proxy, _open(proxy) as client:
        for number in range(3):
            answer = await client.request("PUT", f"http://{_HOST}:{server.port}/{number}", b"body")
            assert answer.endswith(b"answer")
        assert server.received == b"body" * 3
        assert [head.split(b" ")[1] for head in server.heads] == [b"/0", b"/1", b"/2"]
        assert all(b"Proxy-Authorization" not in head for head in server.heads)


async def test_a_connection_may_go_on_to_another_address() -> None:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(_serving(_Server(name))) for name in (b"a", b"b")]
        client = await stack.enter_async_context(_open(await stack.enter_async_context(_running())))
        assert (await client.request("GET", f"http://{_HOST}:{first.port}/")).endswith(b"a")
        assert (await client.request("GET", f"http://{_HOST}:{second.port}/")).endswith(b"b")


async def test_a_connection_that_cannot_be_accepted_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamover.bandwidth.proxy._ACCEPT_SECONDS", 0.0)
    loop = asyncio.get_running_loop()
    outcomes = iter([OSError(errno.EMFILE, "Too many open files")])
    accept = loop.sock_accept

    async def accept_later(listener: socket.socket) -> Any:
        for error in outcomes:
            raise error
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", accept_later)
    async with _serving(_Server(b"answer")) as server, _running() as proxy, _open(proxy) as client:
        assert (await client.request("GET", f"http://{_HOST}:{server.port}/")).endswith(b"answer")


async def test_a_tunnel_passes_everything() -> None:
    async with _serving(_Server(b"through")) as server, _running() as proxy, _open(proxy) as client:
        assert (await client.request("CONNECT", f"{_HOST}:{server.port}")).startswith(b"HTTP/1.1 200 ")
        assert (await client.request("PUT", "/x", b"payload", headers="")).endswith(b"through")
        assert server.received == b"payload"


@pytest.mark.parametrize("method", ["CONNECT", "GET"])
async def test_the_proxy_that_is_set_is_the_next_one(method: str) -> None:
    async with _serving(_Server(b"by the next")) as upstream:
        url = f"http://user:secret@proxy.example.com:{upstream.port}"
        environment = {"HTTPS_PROXY": url, "HTTP_PROXY": url}
        async with _running(environment=environment) as proxy, _open(proxy) as client:
            target = "bucket.example.com:443" if method == "CONNECT" else "http://bucket.example.com/x"
            await client.request(method, target)
            (head, *_) = upstream.heads
            assert head.startswith(f"{method} {target} HTTP/1.1\r\n".encode())
            assert b"Proxy-Authorization: Basic " + b64encode(b"user:secret") in head


@pytest.mark.parametrize(
    ("host", "cause"),
    [("gone.example.com", "connect: connection refused"), ("s3..example.com", "lookup: no such host")],
)
async def test_a_storage_that_refuses_is_an_answer_with_the_cause(host: str, cause: str) -> None:
    async with _running() as proxy, _open(proxy) as client:
        answer = await client.request("CONNECT", f"{host}:443")
        assert answer.startswith(f"HTTP/1.1 502 dial tcp {host}:443: {cause}\r\n".encode())


@pytest.mark.parametrize("direction", ["upload", "download"])
async def test_both_directions_are_limited_by_themselves(direction: str) -> None:
    """One megabyte takes a second less the quarter that may pass at once; the other direction has no limit."""
    limits = BandwidthLimits(**{f"{direction}_bytes_per_second": 1_000_000})
    size, clock = 2_000_000, SystemClock()
    async with _serving(_Server(b"x" * size)) as server, _running(limits) as proxy, _open(proxy) as client:
        begin = clock.monotonic()
        await client.request("PUT", f"http://{_HOST}:{server.port}/", b"y" * size)
        assert clock.monotonic() - begin >= 1.5
        assert len(server.received) == size


async def _take(lane: Lane, size_bytes: int) -> None:
    """Take so many bytes, a piece after the other."""
    while size_bytes:
        piece = min(size_bytes, lane.piece_bytes)
        await lane.take(piece)
        size_bytes -= piece


@pytest.mark.parametrize("rate", [100_000, 1_000_000, 100_000_000])
async def test_a_minute_has_the_rate(rate: int) -> None:
    clock = FreeClock()
    lane = Lane(clock, rate)
    await _take(lane, 60 * rate)
    assert clock.seconds == pytest.approx(60, rel=0.02)


async def test_what_was_not_used_for_long_may_not_pass_at_once() -> None:
    clock = FreeClock()
    lane = Lane(clock, 1_000_000)
    clock.seconds += 3600
    begin = clock.seconds
    await _take(lane, 2_000_000)
    assert clock.seconds - begin == pytest.approx(1.75, abs=0.05)


async def test_a_limit_holds_from_its_change_on() -> None:
    clock = FreeClock()
    lane = Lane(clock)
    await _take(lane, 10**9)
    assert clock.seconds == 0
    lane.rate = 1_000_000
    await _take(lane, 10_000_000)
    assert clock.seconds == pytest.approx(10, abs=0.5)
    lane.rate = 0
    await _take(lane, 10**9)
    assert clock.seconds == pytest.approx(10, abs=0.5)
