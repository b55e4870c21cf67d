"""The transport to the API server from inside a pod, with its service account, over one HTTP/1.1 connection.

The only module that imports h11. aiohttp would use 9 MiB more, a fifth of what a mover may use, and a third more CPU
time at start.
Source: Kubernetes v1.34, "Accessing the Kubernetes API from a Pod".
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

import h11

from core.clock import Clock
from core.errors import ConfigError, Translated
from core.kube.errors import UnreachableError, raise_for_status
from core.kube.transport import LineSplitter, Request, Response, keep_alive, reaching, read_all, trust_like_go
from datamover.runtime.work_dir import attempting

_PIECE_BYTES: Final = 65536


class HttpError(OSError):
    """The server sent invalid HTTP, or closed the connection before the end."""


@dataclass(frozen=True)
class HostPort:
    """Where a server listens; `authority` verifies its certificate, None for no TLS."""

    host: str
    port: int
    authority: ssl.SSLContext | None

    @property
    def header(self) -> str:
        """Host and port, as in the `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Head:
    """A response's status, and its headers by lower-case name."""

    status: int
    headers: Mapping[str, str]


class ServerConnection:
    """One connection to a server."""

    def __init__(self, address: HostPort, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    async def open(cls, address: HostPort) -> "ServerConnection":
        """Return a new connection, with keepalive. Raises OSError without a server, or if it is not trusted."""
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.authority)
        keep_alive(writer.get_extra_info("socket"))
        return cls(address, reader, writer)

    @property
    def reusable(self) -> bool:
        """Whether the response was read to its end, nothing follows it, and the server keeps the connection open."""
        ended = {self._http.our_state, self._http.their_state} <= {h11.DONE, h11.IDLE}
        return ended and not self._http.trailing_data[0] and not self._reader.at_eof()

    async def is_silent(self) -> bool:
        """Return whether nothing has arrived since the response: what has would be read as the answer to a request.

        Load balancers send a 408 before they close an idle connection.
        Source: Go 1.26, net/http/transport.go (readLoopPeekFailLocked, is408Message).
        """
        try:
            async with asyncio.timeout(0):
                await self._reader.read(1)
        except TimeoutError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Abort the connection at once; may be called twice."""
        self._writer.transport.abort()

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> Head:
        """Send a request for an escaped path and query, and return the head of its response; read its `body` next.

        Raises:
            OSError: no response, or an invalid one.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        length = {} if body is None else {"Content-Length": str(len(body))}
        named = {"Host": self._address.header, **headers, **length}
        self._write(h11.Request(method=method, target=target, headers=list(named.items())))
        if body:
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        await self._writer.drain()
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                found = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                return Head(event.status_code, found)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises OSError if the connection was closed before the end."""
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")

    async def _next_event(self) -> h11.Event:
        while True:
            with Translated(h11.RemoteProtocolError, HttpError, "invalid HTTP response, or closed too early"):
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._reader.read(_PIECE_BYTES))
                    continue
            if isinstance(event, h11.ConnectionClosed):
                raise HttpError("connection closed before the end of the response")
            return event if isinstance(event, h11.Event) else h11.EndOfMessage()


_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_SECONDS: Final = 10.0
_FIRST_ERROR_STATUS: Final = 400
_IDLE_SECONDS: Final = 15.0
"""A connection that was idle for longer is not reused: the server may be about to close it."""


class PodTransport:
    """Sends requests to one API server and keeps one idle connection."""

    def __init__(self, address: HostPort, token_file: Path, clock: Clock) -> None:
        """Use the API server at `address`; `token_file` is read for each request."""
        self._address = address
        self._token_file = token_file
        self._clock = clock
        self._idle: ServerConnection | None = None
        self._idle_until = 0.0

    async def request(self, request: Request) -> Response:
        """Return the response, of any status.

        Raises:
            UnreachableError: none arrived in time, or one larger than any object, or the token cannot be read.
        """
        with reaching(request):
            async with asyncio.timeout(request.timeout_seconds), self._sent(request) as (head, connection):
                body = await _read_all(request, connection)
        return Response(head.status, body, head.headers.get("retry-after"))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a streamed response and yield it line by line, without line ends.

        Raises:
            KubeError: the server rejected the request.
            UnreachableError: the connection failed, broke, or had no data before the timeout.
            GoneError: a line is longer than any object.
        """
        async with AsyncExitStack() as held:
            with reaching(request):
                async with asyncio.timeout(request.timeout_seconds):
                    head, connection = await held.enter_async_context(self._sent(request))
                    body = await _read_all(request, connection) if head.status >= _FIRST_ERROR_STATUS else b""
            attempted, retry_after = f"{request.method} {request.path}", head.headers.get("retry-after")
            raise_for_status(head.status, body, attempted=attempted, retry_after=retry_after)
            yield await held.enter_async_context(aclosing(_lines(request, connection)))

    async def close(self) -> None:
        """Close all connections; may be called twice."""
        if self._idle is not None:
            self._idle.close()
            self._idle = None
            # The event loop closes the socket in its next iteration.
            await asyncio.sleep(0)

    @asynccontextmanager
    async def _sent(self, request: Request) -> AsyncIterator[tuple[Head, ServerConnection]]:
        """Send the request; yield the head of the response, and the connection to read its body from."""
        headers = self._headers(request)
        query = urlencode(request.query)
        target = quote(request.path) + (f"?{query}" if query else "")
        if (connection := await self._take_idle()) is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await ServerConnection.open(self._address)
        try:
            yield await connection.send(request.method, target, headers, request.body), connection
        finally:
            self._keep(connection)

    async def _take_idle(self) -> ServerConnection | None:
        connection, self._idle = self._idle, None
        if connection is None:
            return None
        usable = False
        try:
            young = self._clock.monotonic() < self._idle_until
            usable = young and connection.reusable and await connection.is_silent()
        finally:
            if not usable:
                connection.close()
        return connection if usable else None

    def _keep(self, connection: ServerConnection) -> None:
        if self._idle is not None or not connection.reusable:
            connection.close()
            return
        self._idle = connection
        self._idle_until = self._clock.monotonic() + _IDLE_SECONDS

    def _headers(self, request: Request) -> Mapping[str, str]:
        try:
            # The kubelet replaces the file before the token expires.
            token, why = self._token_file.read_text().strip(), "it is empty"
        except OSError as e:
            token, why = "", str(e.strerror)
        if not token:
            # Retried: a read may fail in that moment.
            raise UnreachableError(
                f"{request.method} {request.path}: cannot read service account token {self._token_file}: {why}"
            )
        content = {} if request.body is None else {"Content-Type": request.content_type}
        return {"User-Agent": "datamover", "Accept": "application/json", "Authorization": f"Bearer {token}", **content}


async def _read_all(request: Request, connection: ServerConnection) -> bytes:
    async with aclosing(connection.body()) as pieces:
        return await read_all(request, pieces)


async def _lines(request: Request, connection: ServerConnection) -> AsyncGenerator[bytes, None]:
    splitter = LineSplitter(request)
    async with aclosing(connection.body()) as pieces:
        while True:
            with reaching(request):
                async with asyncio.timeout(request.timeout_seconds):
                    piece = await anext(pieces, b"")
            if not piece:
                break
            for line in splitter.split(piece):
                yield line
    if splitter.rest:
        yield splitter.rest


def pod_transport(environment: Mapping[str, str], clock: Clock, account: Path = _ACCOUNT) -> PodTransport:
    """Return the transport for this pod. Raises ConfigError outside of one, or without a service account."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("not running in a pod: KUBERNETES_SERVICE_HOST is not set (local mode needs --repository)")
    if not port.isdecimal():
        raise ConfigError(f'KUBERNETES_SERVICE_PORT: invalid port "{port}"')
    file, token = account / "ca.crt", account / "token"
    with attempting(f"read {file}", ConfigError):
        authority = ssl.create_default_context(cafile=str(file))
        trust_like_go(authority)
    with attempting(f"read {token}", ConfigError):
        token.read_bytes()
    return PodTransport(HostPort(host, int(port), authority), token, clock)
