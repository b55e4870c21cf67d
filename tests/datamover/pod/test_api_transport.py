"""The pod's transport, and its HTTP/1.1, against a server that sends exactly the bytes of the test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import ConfigError
from core.kube.errors import ForbiddenError, GoneError, UnreachableError
from core.kube.transport import KEEPALIVE_OPTIONS, MERGE_PATCH, Request
from datamover.pod.api_transport import HostPort, HttpError, PodTransport, ServerConnection, pod_transport
from tests.support.sockets import connections_to, free_port
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes

_OK = b"HTTP/1.1 200 OK\r\n"
_LEAVES = b"the server closes the connection"
_GET = Request("GET", "/x")


class Server:
    """Sends its pieces as the response to each request, and what is unsolicited once it may; records the requests."""

    transport: PodTransport
    connection: ServerConnection

    def __init__(self) -> None:
        self.pieces = [_OK + b"Content-Length: 2\r\n\r\n{}"]
        self.unsolicited = b""
        self.hold = asyncio.Event()
        self.hold.set()
        self.received: list[str] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line[16:]) for line in head.split(b"\r\n") if line[:16] == b"Content-Length: "), 0)
                self.received.append((head + await reader.readexactly(length)).decode())
                for piece in self.pieces:
                    if piece == _LEAVES:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                await self.hold.wait()
                writer.write(self.unsolicited)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def ask(self) -> tuple[int, bytes]:
        """Ask on a connection, without the transport."""
        head = await self.connection.send("GET", "/x", {}, None)
        return head.status, b"".join([piece async for piece in self.connection.body()])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    serving = Server()
    listening = await asyncio.start_server(serving.serve, "127.0.0.1", 0)
    address = HostPort("127.0.0.1", listening.sockets[0].getsockname()[1], authority=None)
    (tmp_path / "token").write_text("first-token\n")
    serving.transport = PodTransport(address, tmp_path / "token", SystemClock())
    serving.connection = await ServerConnection.open(address)
    yield serving
    serving.connection.close()
    await serving.transport.close()
    serving.hold.set()
    listening.close()
    await listening.wait_closed()
    await asyncio.sleep(0.05)


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
        ([_OK + b"\r\nall ", b"of it", _LEAVES], 200, b"all of it", False),
    ],
    ids=["length", "close", "chunks", "split-chunk", "trailer", "interim", "no-content", "no-reason", "no-length"],
)
async def test_responses_are_read(
    server: Server, pieces: list[bytes], status: int, body: bytes, reusable: bool
) -> None:
    server.pieces = pieces
    assert await server.ask() == (status, body)
    assert server.connection.reusable is reusable
    assert server.received == [f"GET /x HTTP/1.1\r\nHost: {server.connection._address.header}\r\n\r\n"]
    if reusable:
        assert await server.ask() == (status, body)


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
async def test_a_truncated_or_invalid_response_is_an_error(server: Server, answer: bytes) -> None:
    server.pieces = [answer, _LEAVES]
    with pytest.raises(HttpError):
        await server.ask()
    assert not server.connection.reusable


async def test_a_connection_has_keepalive_and_is_not_reused_once_the_server_closed_it(server: Server) -> None:
    server.pieces = [_OK + b"Content-Length: 1\r\n\r\nx", _LEAVES]
    (found,) = connections_to(server.connection._address.port)
    with found:
        assert {option: found.getsockopt(*option) for option in KEEPALIVE_OPTIONS} == KEEPALIVE_OPTIONS
    await server.ask()
    async with asyncio.timeout(10):
        while server.connection.reusable:
            await asyncio.sleep(0)


async def test_a_request_has_the_current_token_and_a_response_any_status(server: Server, tmp_path: Path) -> None:
    await server.transport.request(Request("GET", "/api/v1/pods", {"fieldSelector": "metadata.name=a b"}))
    (tmp_path / "token").write_text("second-token")
    server.pieces = [b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"]
    response = await server.transport.request(Request("PATCH", "/a", body=b'{"a":1}', content_type=MERGE_PATCH))
    first, second = server.received
    assert first.startswith("GET /api/v1/pods?fieldSelector=metadata.name%3Da+b HTTP/1.1")
    assert "Authorization: Bearer first-token\r\n" in first
    assert "Authorization: Bearer second-token\r\n" in second
    assert "Content-Type: application/merge-patch+json\r\n" in second
    assert second.endswith('{"a":1}')
    assert (response.status, response.body, response.retry_after) == (429, b"busy", "7")
    assert HostPort("::1", 443, authority=None).header == "[::1]:443"


async def test_a_stream_is_read_line_by_line_however_long_a_line_is(server: Server) -> None:
    long = b"x" * 300_000
    server.pieces = [_OK + b"Connection: close\r\nContent-Length: 300012\r\n\r\none\n" + long + b"\nlast\nno"]
    async with server.transport.stream(Request("GET", "/x", {"watch": "true"})) as lines:
        assert [line async for line in lines] == [b"one", long, b"last", b"no"]


async def test_a_response_that_is_larger_than_any_object_is_not_read_to_its_end(server: Server) -> None:
    server.pieces = [_OK + b"Connection: close\r\nContent-Length: 18000000\r\n\r\n" + b"x" * 18_000_000]
    with pytest.raises(UnreachableError, match="GET /x: the response exceeds 16 MiB"):
        await server.transport.request(_GET)
    with pytest.raises(GoneError, match="GET /x: a line exceeds 16 MiB"):
        async with server.transport.stream(_GET) as lines:
            await anext(lines)


async def test_a_rejected_stream_raises_the_servers_error_and_one_without_data_times_out(server: Server) -> None:
    body = b'{"message": "no permission", "reason": "Forbidden"}'
    server.pieces = [b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]
    with pytest.raises(ForbiddenError, match="no permission"):
        async with server.transport.stream(_GET):
            pass
    server.hold.clear()
    server.pieces = [_OK + b"Content-Length: 100\r\n\r\none\n"]
    seen = []
    with pytest.raises(UnreachableError):
        async with server.transport.stream(Request("GET", "/x", timeout_seconds=0.1)) as lines:
            seen.extend([line async for line in lines])


async def test_a_closed_port_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    transport = PodTransport(HostPort("127.0.0.1", free_port(), None), tmp_path / "token", SystemClock())
    with pytest.raises(UnreachableError, match="GET /x"):
        await transport.request(_GET)


def test_outside_a_pod_or_without_a_service_account_there_is_no_transport(tmp_path: Path) -> None:
    in_pod = {"KUBERNETES_SERVICE_HOST": "::1"}
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        pod_transport({}, SystemClock())
    with pytest.raises(ConfigError, match=r"cannot read .*ca\.crt"):
        pod_transport(in_pod, SystemClock(), tmp_path)
    Authority(tmp_path / "authority").pair.certificate.rename(tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match=r"cannot read .*/token: No such file"):
        pod_transport(in_pod, SystemClock(), tmp_path)


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), (" \n", "it is empty")])
async def test_an_unreadable_token_ends_no_watch(
    server: Server, tmp_path: Path, content: str | None, reason: str
) -> None:
    """As while the kubelet replaces it."""
    (tmp_path / "token").rename(tmp_path / "away")
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(UnreachableError, match=f"^GET /x: cannot read service account token .*: {reason}") as e:
        await server.transport.request(_GET)
    assert e.value.retry
    (tmp_path / "away").rename(tmp_path / "token")
    assert (await server.transport.request(_GET)).status == 200


async def test_one_connection_serves_consecutive_requests_and_concurrent_ones_do_not_wait(server: Server) -> None:
    await server.transport.request(_GET)
    before = server.connections
    for _ in range(2):
        await server.transport.request(_GET)
    assert (len(server.received), server.connections) == (3, before)
    async with server.transport.stream(Request("GET", "/x", {"watch": "true"})):
        await server.transport.request(_GET)
    assert server.connections == before + 1


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
async def test_what_a_server_sends_after_a_response_answers_no_request(server: Server, *, late: bool) -> None:
    unsolicited, (expected,) = b"HTTP/1.1 408 Request Time-out\r\nContent-Length: 0\r\n\r\n", server.pieces
    server.hold.clear()
    server.unsolicited, server.pieces = (unsolicited, [expected]) if late else (b"", [expected + unsolicited])
    assert (await server.transport.request(_GET)).status == 200
    server.hold.set()
    await asyncio.sleep(0.05)
    before = server.connections
    assert (await server.transport.request(Request("PATCH", "/x", body=b"{}"))).status == 200
    assert (len(server.received), server.connections) == (2, before + 1)
