"""Requests and streams to an API server over aiohttp."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from core.kube.errors import UnreachableError, build_error, raise_for_status
from core.kube.transport import LineSplitter, Request, Response, reaching, read_all

_CONNECT_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 900.0
"""Of a WebSocket: longer than a data mover waits for a storage that does not answer."""

_MESSAGE_BYTES: Final = 4 << 20
"""Kubelets send 32 KiB at a time."""

_FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True)
class Endpoint:
    """The address of an API server, and the credentials for it.

    `url` is the base URL, without a trailing slash. `open_session` returns a new session, which the transport closes.
    `headers` returns what identifies the client; it is called for each request, and raises UnauthorizedError where the
    credentials cannot be read. `options` are more arguments for aiohttp: `ssl`, `proxy`, `server_hostname`.
    `on_untrusted` is called with the session after the server was not trusted.
    """

    url: str
    open_session: Callable[[], aiohttp.ClientSession]
    headers: Callable[[], Awaitable[Mapping[str, str]]]
    options: Mapping[str, Any] = field(default_factory=dict)
    on_untrusted: Callable[[aiohttp.ClientSession], None] = lambda _: None


class HttpTransport:
    """Sends requests to one endpoint. The first request opens the session."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def request(self, request: Request) -> Response:
        """Return the response; see `Transport`."""
        timeout = aiohttp.ClientTimeout(total=request.timeout_seconds, sock_connect=_CONNECT_SECONDS)
        with reaching(request, _FAILURES):
            async with await self._send(request, timeout) as answer:
                headers = answer.headers
                body = await read_all(request, answer.content.iter_any())
                return Response(answer.status, body, headers.get("Retry-After"), headers.get("Date"))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a stream and yield its lines; see `Transport`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=request.timeout_seconds)
        with reaching(request, _FAILURES):
            answer = await self._send(request, timeout)
        try:
            body = b"" if answer.ok else await _read_rejection(request, answer)
            raise_for_status(
                answer.status,
                body,
                attempted=f"{request.method} {request.path}",
                retry_after=answer.headers.get("Retry-After"),
            )
            async with aclosing(_lines(request, answer)) as lines:
                yield lines
        finally:
            # A watch never ends by itself; abort instead of draining it or of a TLS shutdown.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
            answer.close()

    @asynccontextmanager
    async def messages(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a WebSocket with one of these protocols, and yield its binary messages until the server closes it.

        Messages are received as they are read. Leaving the context closes the connection. Errors are as for a stream;
        it may be silent for a quarter of an hour.
        """
        request = Request("GET", path)
        with reaching(request, _FAILURES):
            try:
                # No heartbeat: its answer would be read as late as everything else, when a disk is slow.
                opened = await self._open_session().ws_connect(
                    self._endpoint.url + path,
                    params=query,
                    protocols=protocols,
                    headers=await self._endpoint.headers(),
                    timeout=aiohttp.ClientWSTimeout(ws_receive=_SILENCE_SECONDS, ws_close=_CONNECT_SECONDS),
                    max_msg_size=_MESSAGE_BYTES,
                    **self._endpoint.options,
                )
            except aiohttp.WSServerHandshakeError as e:
                if e.status < HTTPStatus.BAD_REQUEST:
                    raise
                # The library does not read the answer.
                raise build_error(e.status, b"", attempted=f"GET {path}") from e
        async with opened:
            yield _binary(request, opened)

    async def close(self) -> None:
        """Close all connections, and open none any more; may be called twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            # A read beside the one that failed a command may be at its second attempt.
            raise aiohttp.ClientConnectionError("this client is closed")
        if self._session is None:
            self._session = self._endpoint.open_session()
        return self._session

    async def _send(self, request: Request, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"} | dict(await self._endpoint.headers())
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        session = self._open_session()
        try:
            return await session.request(
                request.method,
                self._endpoint.url + request.path,
                params=dict(request.query),
                data=request.body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                **self._endpoint.options,
            )
        except aiohttp.ClientSSLError:
            self._endpoint.on_untrusted(session)
            raise


async def _binary(request: Request, opened: aiohttp.ClientWebSocketResponse) -> AsyncGenerator[bytes, None]:
    while True:
        with reaching(request, _FAILURES):
            message = await opened.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            yield message.data
        elif message.type is aiohttp.WSMsgType.ERROR:
            raise UnreachableError(f"{request.method} {request.path}: {message.data}")
        elif message.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED}:
            return


async def _read_rejection(request: Request, answer: aiohttp.ClientResponse) -> bytes:
    with reaching(request, _FAILURES):
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await read_all(request, answer.content.iter_any())


async def _lines(request: Request, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the lines; aiohttp's own line reader rejects lines above its buffer size."""
    splitter = LineSplitter(request)
    with reaching(request, _FAILURES):
        async for piece in answer.content.iter_any():
            for line in splitter.split(piece):
                yield line
    if splitter.rest:
        yield splitter.rest
