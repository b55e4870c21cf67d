"""Heads of requests to the proxy, and which proxy of the environment leads to a host, as kopia would decide."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from core.errors import ConfigError
from datamover.bandwidth import dialing
from datamover.bandwidth.dialing import (
    Address,
    BadRequestError,
    DialError,
    HeadReader,
    NextProxy,
    RequestHead,
    Routes,
    dial,
)
from datamover.kopia.causes import NOT_TRUSTED, find_cause
from tests.testbed.pki import Authority

_PUT = (
    b"PUT http://s3.example.com:9000/b/x%20y?z=1 HTTP/1.1\r\nHost: s3.example.com:9000\r\n"
    b"Proxy-Authorization: Basic abc\r\nProxy-Connection: keep-alive\r\nContent-Length: 5"
)


def test_a_request_is_sent_on_without_what_is_for_the_proxy() -> None:
    head = RequestHead.parse(_PUT)
    assert (head.address, head.body_bytes, head.authorization) == (Address("s3.example.com", 9000), 5, "Basic abc")
    assert head.encode(absolute=False) == (
        b"PUT /b/x%20y?z=1 HTTP/1.1\r\nHost: s3.example.com:9000\r\nContent-Length: 5\r\n\r\n"
    )
    whole = head.encode(absolute=True, authorization="Basic own")
    assert whole.startswith(b"PUT http://s3.example.com:9000/b/x%20y?z=1 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic own\r\n" in whole


@pytest.mark.parametrize(
    ("to", "address"),
    [
        ("s3.example.com:443", Address("s3.example.com", 443)),
        ("s3.example.com", Address("s3.example.com", 443)),
        ("[2001:db8::1]:9000", Address("2001:db8::1", 9000)),
    ],
)
def test_connect_names_the_address_of_a_tunnel(to: str, address: Address) -> None:
    head = RequestHead.parse(f"CONNECT {to} HTTP/1.1".encode())
    assert (head.tunnels, head.address) == (True, address)


def test_a_chunked_body_ends_the_connection() -> None:
    head = RequestHead.parse(b"PUT http://a/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive")
    assert (head.address, head.body_bytes) == (Address("a", 80), None)
    assert b"Connection: close\r\n" in head.encode(absolute=False)
    assert b"keep-alive" not in head.encode(absolute=False)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        # What servers read in different ways.
        (b"GET http://a/ HTTP/1.1 x", "malformed head"),
        (b"GET http://a/ HTTP/1.1\r\nno colon", "malformed head"),
        (b"GET http://a/ HTTP/1.1\r\nName : x", "malformed head"),
        (b"GET http://a/ HTTP/1.1\r\n continued: x", "malformed head"),
        (b"GET /x HTTP/1.1", "not a URL of http"),
        (b"GET https://a/x HTTP/1.1", "not a URL of http"),
        (b"CONNECT :443 HTTP/1.1", "malformed URL"),
        (b"GET http://a:x/ HTTP/1.1", "malformed URL"),
        (b"GET http://a/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", "malformed length"),
        (b"GET http://a/ HTTP/1.1\r\nContent-Length: +1", "malformed length"),
        (b"GET http://a/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: x", "a length and a transfer encoding"),
    ],
)
def test_a_malformed_request_is_refused(head: bytes, error: str) -> None:
    with pytest.raises(BadRequestError, match=error):
        _ = (parsed := RequestHead.parse(head)).address, parsed.body_bytes


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The end that is read, and the client's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        yield ours, theirs


async def test_what_follows_a_head_is_kept(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    theirs.sendall(_PUT + b"\r\n\r\nbodyGET http://a/ HTTP/1.1\r\n\r\n")
    reader = HeadReader(ours)
    first = await reader.read()
    assert first is not None
    assert (first.method, reader.take(4)) == ("PUT", b"body")
    second = await reader.read()
    assert second is not None
    assert second.method == "GET"
    theirs.close()
    assert await reader.read() is None


async def test_a_head_has_a_largest_size(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = sockets
    theirs.settimeout(0)
    for _ in range(2):
        theirs.send(b"x" * 40_000)
    with pytest.raises(BadRequestError, match="head too long"):
        await HeadReader(ours).read()


_PROXY = {"HTTPS_PROXY": "http://user:pass%40word@proxy.example.com:3128", "http_proxy": "proxy.example.com"}


def test_each_scheme_has_its_proxy() -> None:
    routes, storage = Routes(_PROXY), Address("s3.example.com", 443)
    proxy = Address("proxy.example.com", 3128)
    assert routes.find("https", storage) == NextProxy("http", proxy, "user", "pass@word")
    assert routes.find("http", storage) == NextProxy("http", Address("proxy.example.com", 80))
    assert Routes({}).find("https", storage) is None
    assert "pass" not in repr(routes.find("https", storage))


@pytest.mark.parametrize(
    ("excluded", "host", "direct"),
    [
        ("*", "s3.example.com", True),
        ("example.com", "s3.example.com", True),
        ("example.com", "example.com", True),
        (".example.com", "example.com", False),
        ("*.example.com", "s3.example.com", True),
        ("example.com", "s3.example.org", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("s3.example.com:9000", "s3.example.com", False),
        ("s3.example.com:443", "s3.example.com", True),
        ("2001:db8::1", "2001:db8::1", True),
        ("other, S3.EXAMPLE.COM", "s3.example.com", True),
        ("", "127.0.0.1", True),
        ("", "localhost", True),
        ("", "::1", True),
    ],
)
def test_what_no_proxy_excludes_is_reached_directly(excluded: str, host: str, *, direct: bool) -> None:
    routes = Routes({**_PROXY, "NO_PROXY": excluded})
    assert (routes.find("https", Address(host, 443)) is None) is direct


@pytest.mark.parametrize("url", ["ftp://proxy:1", "http://", "http://proxy:port", "://secret@x"])
def test_an_invalid_proxy_is_an_error_that_does_not_quote_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^HTTPS_PROXY: not the URL of a proxy, such as ") as e:
        Routes({"HTTPS_PROXY": url})
    assert "secret" not in str(e.value)


@pytest.mark.parametrize(
    ("user", "method", "refused", "code", "bound", "error"),
    [
        (None, 0, 0, 0, b"\x01" + bytes(6), None),
        ("me", 2, 0, 0, b"\x03\x04name" + bytes(2), None),
        ("me", 0, 0, 0, b"\x04" + bytes(18), None),
        ("me", 2, 1, 0, b"", "username/password authentication failed"),
        (None, 255, 0, 0, b"", "no acceptable authentication methods"),
        (None, 0, 0, 5, b"\x01" + bytes(6), "connection refused"),
    ],
)
async def test_a_socks_proxy_connects_to_a_name_that_it_resolves(
    user: str | None, method: int, refused: int, code: int, bound: bytes, error: str | None
) -> None:
    """Source: RFC 1928 and 1929."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(3))
        writer.write(bytes([5, method]))
        if method == 2:
            asked.append(await reader.readexactly(9))
            writer.write(bytes([1, refused]))
        asked.append(await reader.read(99))
        writer.write(bytes([5, code, 0]) + bound + b"s3")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        proxy = NextProxy("socks5h", Address("127.0.0.1", port), user, "pass")
        link = dial(Address("s3.example.com", 443), proxy, tunnel=True)
        if error:
            with pytest.raises(DialError, match=rf"^proxy 127.0.0.1:{port}: {error}$"):
                await link.__aenter__()
            return
        async with link as connected:
            assert await asyncio.get_running_loop().sock_recv(connected, 9) == b"s3"
    assert asked[0] == (b"\x05\x01\x02" if user else b"\x05\x01\x00")
    assert asked[1:-1] == ([b"\x01\x02me\x04pass"] if method == 2 else [])
    assert asked[-1] == b"\x05\x01\x00\x03\x0es3.example.com\x01\xbb"


@pytest.mark.parametrize(
    ("host", "password", "method", "error"),
    [
        ("s" * 256, "", 0, "lookup: no such host"),
        ("s3.example.com", "p" * 256, 2, "the user name or the password is too long"),
    ],
    ids=["name", "password"],
)
async def test_what_is_too_long_for_a_socks_proxy_is_an_error(
    host: str, password: str, method: int, error: str
) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes([5, method]))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        proxy = NextProxy("socks5h", Address("127.0.0.1", server.sockets[0].getsockname()[1]), "me", password)
        with pytest.raises(DialError, match=rf"{error}$"):
            await dial(Address(host, 443), proxy, tunnel=True).__aenter__()


async def test_an_address_that_drops_packets_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a storage that vanishes is noticed, as by kopia without this proxy."""
    monkeypatch.setattr(dialing, "_CONNECT_SECONDS", 1.0)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_server(("127.0.0.1", 0)) as server,
        # The kernel drops further requests for connections.
        socket.create_connection(full.getsockname()),
    ):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (full, server)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        async with dial(Address("s3.example.com", 443), None, tunnel=True) as link:
            assert link.getpeername() == server.getsockname()
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "authority")


@asynccontextmanager
async def _proxy_with_tls(authority: Authority, end: bytes) -> AsyncIterator[tuple[NextProxy, asyncio.Event]]:
    """A proxy that answers what follows a request with `end`, and the event that its client has closed."""
    context, closed = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), asyncio.Event()
    pair = authority.issue("proxy", user="proxy", addresses=("IP:127.0.0.1",))
    context.load_cert_chain(pair.certificate, pair.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + end)
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield NextProxy("https", Address("127.0.0.1", server.sockets[0].getsockname()[1])), closed


@pytest.mark.processes
async def test_a_proxy_with_tls_loses_a_client_that_has_ended(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS has no end of one direction alone, and the proxy would keep the connection."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.pair.certificate))
    async with (
        asyncio.timeout(20),
        _proxy_with_tls(authority, b"through") as (proxy, closed),
        dial(Address("s3.example.com", 443), proxy, tunnel=True) as link,
    ):
        assert await asyncio.get_running_loop().sock_recv(link, 9) == b"through"
        link.shutdown(socket.SHUT_WR)
        await closed.wait()
        assert await asyncio.get_running_loop().sock_recv(link, 9) == b""


@pytest.mark.processes
async def test_a_proxy_with_a_certificate_of_an_unknown_authority_is_refused(authority: Authority) -> None:
    async with _proxy_with_tls(authority, b"") as (proxy, _):
        with pytest.raises(DialError, match="x509: ") as error:
            await dial(Address("s3.example.com", 443), proxy, tunnel=True).__aenter__()
    assert find_cause([str(error.value)]) == NOT_TRUSTED
