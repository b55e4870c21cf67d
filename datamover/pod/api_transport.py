"""The API server, reached from inside a pod with its service account.

Knows addresses, token and authority as the kubelet mounts them, and how failures read. Does
not know HTTP's own form (`datamover.pod.http`), kinds, retries or watches.
Source: Kubernetes v1.34, "Accessing the Kubernetes API from a Pod".
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from core.clock import Clock
from core.errors import ConfigError
from core.kube.errors import UnreachableError, raise_for_status
from core.kube.transport import Request, Response
from datamover.pod.http import Connection, Head, HostPort

__all__ = ["PodTransport", "pod_transport"]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_SECONDS: Final = 10.0
_FIRST_REFUSAL: Final = 400
_KEPT_SECONDS: Final = 15.0
"""A connection that was idle for longer is not used again: the server may be about to close it."""


class PodTransport:
    """Sends requests to one API server; one idle connection is kept for the next."""

    def __init__(self, address: HostPort, token_file: Path, clock: Clock) -> None:
        """Reach the API server at `address`; `token_file` is read anew for each request."""
        self._address = address
        self._token_file = token_file
        self._clock = clock
        self._kept: Connection | None = None
        self._kept_until = 0.0

    async def request(self, request: Request) -> Response:
        """Return the answer, of any status.

        Raises:
            UnreachableError: no answer arrived in time.
        """
        try:
            async with asyncio.timeout(request.timeout_seconds), self._asked(request) as (head, connection):
                body = await _read_all(connection)
        except OSError as e:
            raise _unreachable(request, e) from e
        return Response(head.status, body, head.headers.get("retry-after"))

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a long answer and yield it line by line, without line ends.

        Raises:
            KubeError: the server refused.
            UnreachableError: the connection failed, broke, or was silent for too long.
        """
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(request.timeout_seconds):
                    head, connection = await held.enter_async_context(self._asked(request))
                    body = await _read_all(connection) if head.status >= _FIRST_REFUSAL else b""
            except OSError as e:
                raise _unreachable(request, e) from e
            raise_for_status(
                head.status,
                body,
                attempted=f"{request.method} {request.path}",
                retry_after=head.headers.get("retry-after"),
            )
            yield await held.enter_async_context(aclosing(_lines(request, connection)))

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            # The loop takes the socket away in its next round.
            await asyncio.sleep(0)

    @asynccontextmanager
    async def _asked(self, request: Request) -> AsyncIterator[tuple[Head, Connection]]:
        """Yield the head of the answer, and where its body comes from."""
        headers = self._headers(request)
        query = urlencode(request.query)
        target = quote(request.path) + (f"?{query}" if query else "")
        connection = self._take_kept()
        if connection is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                connection = await Connection.open(self._address)
        try:
            yield await connection.ask(request.method, target, headers, request.body), connection
        finally:
            self._keep(connection)

    def _take_kept(self) -> Connection | None:
        connection, self._kept = self._kept, None
        if connection is None or (connection.reusable and self._clock.monotonic() < self._kept_until):
            return connection
        connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        if self._kept is not None or not connection.reusable:
            connection.close()
            return
        self._kept = connection
        self._kept_until = self._clock.monotonic() + _KEPT_SECONDS

    def _headers(self, request: Request) -> Mapping[str, str]:
        try:
            # The kubelet replaces the file before the token in it expires.
            token = self._token_file.read_text().strip()
        except OSError as e:
            raise ConfigError(f"service account token {self._token_file} cannot be read: {e.strerror}") from e
        content = {} if request.body is None else {"Content-Type": request.content_type}
        return {"User-Agent": "datamover", "Accept": "application/json", "Authorization": f"Bearer {token}", **content}


async def _read_all(connection: Connection) -> bytes:
    async with aclosing(connection.body()) as pieces:
        return b"".join([piece async for piece in pieces])


async def _lines(request: Request, connection: Connection) -> AsyncGenerator[bytes, None]:
    rest = b""
    async with aclosing(connection.body()) as pieces:
        while True:
            try:
                async with asyncio.timeout(request.timeout_seconds):
                    piece = await anext(pieces, b"")
            except OSError as e:
                raise _unreachable(request, e) from e
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    if rest:
        yield rest


def _unreachable(request: Request, error: OSError) -> UnreachableError:
    what = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return UnreachableError(f"{request.method} {request.path}: {what}")


def pod_transport(environment: Mapping[str, str], clock: Clock, account: Path = _ACCOUNT) -> PodTransport:
    """Return the transport of the pod this process runs in.

    Raises:
        ConfigError: it does not run in one.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "this is no pod (KUBERNETES_SERVICE_HOST is not set); by hand, name --repository and what to move"
        )
    if not port.isdecimal():
        raise ConfigError(f"KUBERNETES_SERVICE_PORT is {port!r}, which is no port")
    try:
        authority = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as e:
        raise ConfigError(f"{account / 'ca.crt'} cannot be read: {e.strerror}") from e
    return PodTransport(HostPort(host, int(port), authority), account / "token", clock)
