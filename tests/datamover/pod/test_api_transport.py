"""The pod's transport against a minimal server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import ConfigError
from core.kube.errors import ForbiddenError, GoneError, UnreachableError
from core.kube.transport import MERGE_PATCH, Request
from datamover.pod.api_transport import HostPort, PodTransport, pod_transport
from tests.support.sockets import free_port
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes


class Server:
    """Answers every request of `transport` with `answer`, and records the requests."""

    transport: PodTransport

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
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
                writer.write(self.answer)
                await writer.drain()
                await self.hold.wait()
                writer.write(self.unsolicited)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _transport(port: int, folder: Path) -> PodTransport:
    return PodTransport(HostPort("127.0.0.1", port, authority=None), folder / "token", SystemClock())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    serving = Server()
    listening = await asyncio.start_server(serving.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    (tmp_path / "token").write_text("first-token\n")
    serving.transport = _transport(port, tmp_path)
    yield serving
    await serving.transport.close()
    serving.hold.set()
    listening.close()
    await listening.wait_closed()
    await asyncio.sleep(0.05)


async def test_a_request_has_the_current_token(server: Server, tmp_path: Path) -> None:
    await server.transport.request(Request("GET", "/api/v1/pods", {"fieldSelector": "metadata.name=a b"}))
    (tmp_path / "token").write_text("second-token")
    await server.transport.request(Request("PATCH", "/api/v1/pods/x", body=b'{"a":1}', content_type=MERGE_PATCH))
    first, second = server.received
    assert first.startswith("GET /api/v1/pods?fieldSelector=metadata.name%3Da+b HTTP/1.1")
    assert "Authorization: Bearer first-token\r\n" in first
    assert "Authorization: Bearer second-token\r\n" in second
    assert "Content-Type: application/merge-patch+json\r\n" in second
    assert second.endswith('{"a":1}')


async def test_a_response_of_any_status_is_returned(server: Server) -> None:
    server.answer = b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"
    response = await server.transport.request(Request("GET", "/x"))
    assert (response.status, response.body, response.retry_after) == (429, b"busy", "7")


async def test_a_stream_is_read_line_by_line_however_long_a_line_is(server: Server) -> None:
    long = b"x" * 300_000
    server.answer = (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 300012\r\n\r\none\n" + long + b"\nlast\nno"
    )
    async with server.transport.stream(Request("GET", "/x", {"watch": "true"})) as lines:
        assert [line async for line in lines] == [b"one", long, b"last", b"no"]


async def test_a_response_that_is_larger_than_any_object_is_not_read_to_its_end(
    server: Server,
) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 18000000\r\n\r\n" + b"x" * 18_000_000
    with pytest.raises(UnreachableError, match="GET /x: the response exceeds 16 MiB"):
        await server.transport.request(Request("GET", "/x"))
    with pytest.raises(GoneError, match="GET /x: a line exceeds 16 MiB"):
        async with server.transport.stream(Request("GET", "/x")) as lines:
            await anext(lines)


async def test_a_rejected_stream_raises_the_servers_error(server: Server) -> None:
    body = b'{"message": "no permission", "reason": "Forbidden"}'
    server.answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(ForbiddenError, match="no permission"):
        async with server.transport.stream(Request("GET", "/x")):
            pass


async def test_a_stream_without_data_times_out(server: Server) -> None:
    server.hold.clear()
    server.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\none\n"
    seen = []
    with pytest.raises(UnreachableError):
        async with server.transport.stream(Request("GET", "/x", timeout_seconds=0.1)) as lines:
            seen.extend([line async for line in lines])


async def test_a_closed_port_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    transport = _transport(free_port(), tmp_path)
    with pytest.raises(UnreachableError, match="GET /x"):
        await transport.request(Request("GET", "/x"))
    await transport.close()


def test_outside_a_pod_there_is_no_transport(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        pod_transport({}, SystemClock())
    with pytest.raises(ConfigError, match=r"cannot read .*ca\.crt"):
        pod_transport({"KUBERNETES_SERVICE_HOST": "::1"}, SystemClock(), tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (" \n", "it is empty")],
    ids=["missing", "empty"],
)
async def test_a_token_that_cannot_be_read_for_a_moment_ends_no_watch(
    server: Server, tmp_path: Path, content: str | None, reason: str
) -> None:
    """As while the kubelet replaces it."""
    (tmp_path / "token").rename(tmp_path / "away")
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(UnreachableError, match=f"^GET /x: cannot read service account token .*: {reason}") as e:
        await server.transport.request(Request("GET", "/x"))
    assert e.value.retry
    (tmp_path / "away").rename(tmp_path / "token")
    assert (await server.transport.request(Request("GET", "/x"))).status == 200


def test_a_missing_token_is_an_error_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority").pair.certificate
    (tmp_path / "ca.crt").write_bytes(authority.read_bytes())
    with pytest.raises(ConfigError, match=r"cannot read .*/token: No such file"):
        pod_transport({"KUBERNETES_SERVICE_HOST": "::1"}, SystemClock(), tmp_path)


async def test_one_connection_serves_consecutive_requests(server: Server) -> None:
    for _ in range(3):
        await server.transport.request(Request("GET", "/x"))
    assert (len(server.received), server.connections) == (3, 1)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
async def test_what_a_server_sends_after_a_response_answers_no_request(server: Server, *, late: bool) -> None:
    unsolicited, expected = b"HTTP/1.1 408 Request Time-out\r\nContent-Length: 0\r\n\r\n", server.answer
    server.hold.clear()
    server.unsolicited, server.answer = (unsolicited, expected) if late else (b"", expected + unsolicited)
    assert (await server.transport.request(Request("GET", "/x"))).status == 200
    server.hold.set()
    await asyncio.sleep(0.05)
    assert (await server.transport.request(Request("PATCH", "/x", body=b"{}"))).status == 200
    assert (len(server.received), server.connections) == (2, 2)


async def test_concurrent_requests_do_not_wait_for_each_other(server: Server) -> None:
    async with server.transport.stream(Request("GET", "/x", {"watch": "true"})):
        await server.transport.request(Request("GET", "/x"))
    assert server.connections == 2
