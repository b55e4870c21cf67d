"""Processes in pods, over a real WebSocket: what arrives, how an end is reported, and a slow reader is waited for."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from core.kube.errors import KubeError, UnreachableError
from nodeagent.runtime.connection import ERRORS, OUTPUT, ExecError, ExecProcess, PodExec
from nodeagent.runtime.http import Endpoint, HttpTransport
from tests.support.sockets import free_port

_PROCESS = ExecProcess("velero", "pod-x", "main", ("python", "-m", "a b"))
_SUCCESS = b'\x03{"status":"Success"}'
_MEBIBYTE = b"\x01" + bytes(1 << 20)

Handler = Callable[[web.WebSocketResponse], Awaitable[None]]


def _endpoint(port: int) -> Endpoint:
    """Return an API server without TLS."""

    async def headers() -> Mapping[str, str]:
        return {"Authorization": "Bearer t"}

    return Endpoint(f"http://127.0.0.1:{port}", aiohttp.ClientSession, headers)


class _Server:
    """An API server that executes one kind of process; it keeps the requests."""

    def __init__(self, handler: Handler | None, status: int) -> None:
        self.requests: list[web.Request] = []
        self._handler = handler
        self._status = status

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if self._handler is None:
            return web.Response(status=self._status)
        opened = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await opened.prepare(request)
        await self._handler(opened)
        return opened


@asynccontextmanager
async def _serving(handler: Handler | None, status: int = 0) -> AsyncIterator[tuple[_Server, PodExec]]:
    server, app = _Server(handler, status), web.Application()
    app.router.add_get("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    transport = HttpTransport(_endpoint(listening.getsockname()[1]))
    try:
        yield server, PodExec(transport)
    finally:
        await transport.close()
        await runner.cleanup()


def _send(*messages: bytes) -> Handler:
    async def handle(opened: web.WebSocketResponse) -> None:
        for message in messages:
            await opened.send_bytes(message)

    return handle


async def _read(handler: Handler | None, status: int = 0) -> list[tuple[int, bytes]]:
    async with _serving(handler, status) as (_, process):
        return [piece async for piece in process.run(_PROCESS)]


async def test_what_a_process_writes_arrives_by_channel() -> None:
    async with _serving(_send(b"\x01", b"\x01one", b"\x02err", b"\x01two", _SUCCESS)) as (server, process):
        found = [piece async for piece in process.run(_PROCESS)]
    assert found == [(OUTPUT, b"one"), (ERRORS, b"err"), (OUTPUT, b"two")]
    (request,) = server.requests
    assert request.path == "/api/v1/namespaces/velero/pods/pod-x/exec"
    assert request.query.getall("command") == ["python", "-m", "a b"]
    assert (request.query["container"], request.query["stdout"]) == ("main", "true")
    assert request.headers["Authorization"] == "Bearer t"
    assert "v5.channel.k8s.io" in request.headers["Sec-WebSocket-Protocol"]


async def test_a_process_that_ends_with_an_exit_code_was_executed() -> None:
    failure = b'\x03{"status":"Failure","reason":"NonZeroExitCode","message":"exit code 1"}'
    assert await _read(_send(b"\x01one", failure)) == [(OUTPUT, b"one")]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([b"\x01one"], "the connection ended before the process did"),
        ([b'\x03{"status":"Failure","reason":"InternalError","message":"no python"}'], "no python"),
        ([b"\x03no json"], "is invalid"),
    ],
    ids=["cut", "not-executed", "odd"],
)
async def test_an_end_that_is_none_is_an_error(messages: list[bytes], error: str) -> None:
    with pytest.raises(ExecError, match=rf"Pod velero/pod-x: execute python -m a b: .*{error}"):
        await _read(_send(*messages))


@pytest.mark.parametrize(
    ("status", "text"), [(403, "missing permission: create and get pods/exec in namespace velero"), (500, "500")]
)
async def test_a_rejection_is_an_error_and_a_missing_permission_named(status: int, text: str) -> None:
    with pytest.raises(KubeError, match=text):
        await _read(None, status)


async def test_a_server_that_does_not_answer_is_unreachable() -> None:
    transport = HttpTransport(_endpoint(free_port()))
    with pytest.raises(UnreachableError):
        await anext(PodExec(transport).run(_PROCESS))
    await transport.close()


async def test_a_reader_that_waits_makes_the_process_wait() -> None:
    """The server sends as much as sockets take, and goes on only when it is read."""
    sent, moved = 0, asyncio.Event()

    async def handle(opened: web.WebSocketResponse) -> None:
        nonlocal sent
        for _ in range(64):
            await opened.send_bytes(_MEBIBYTE)
            sent += 1
            moved.set()
        await opened.send_bytes(_SUCCESS)

    async with _serving(handle) as (_, process), aclosing(process.run(_PROCESS)) as pieces:
        await anext(pieces)
        while not await _is_silent(moved):
            pass
        assert sent < 32
        assert [len(content) async for _, content in pieces] == [1 << 20] * 63
    assert sent == 64


async def _is_silent(moved: asyncio.Event) -> bool:
    moved.clear()
    try:
        async with asyncio.timeout(0.5):
            await moved.wait()
    except TimeoutError:
        return True
    return False
