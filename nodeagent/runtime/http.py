"""Requests and long answers over HTTP, for a process that reaches API servers of any kind.

Knows aiohttp, which no other module of `core` imports, and how its failures read. Does not
know addresses or credentials: `nodeagent.runtime.transport` brings them. The mover does without.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Protocol

import aiohttp

from core.kube.errors import UnreachableError, raise_for_status
from core.kube.transport import Request, Response

__all__ = ["Endpoint", "HttpTransport"]

_CONNECT_SECONDS: Final = 10.0
_FAILURES: Final = (aiohttp.ClientError, TimeoutError, OSError)


class Endpoint(Protocol):
    """An API server, and who asks it."""

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """What aiohttp needs beside URL and headers: `ssl`, `proxy`, `server_hostname`."""
        ...

    def open_session(self) -> aiohttp.ClientSession:
        """Return a new session; the transport closes it."""
        ...

    async def headers(self) -> Mapping[str, str]:
        """Return the headers that say who asks, fresh for each request.

        Raises:
            ConfigError: the credentials cannot be read.
        """
        ...


class HttpTransport:
    """Sends requests to one endpoint. The session is opened with the first one."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Reach `endpoint`; nothing is opened yet."""
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def request(self, request: Request) -> Response:
        """Return the answer, of any status.

        Raises:
            UnreachableError: no answer arrived in time.
        """
        timeout = aiohttp.ClientTimeout(total=request.timeout_seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with await self._send(request, timeout) as answer:
                return Response(answer.status, await answer.read(), answer.headers.get("Retry-After"))
        except _FAILURES as e:
            raise _unreachable(request, e) from e

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a long answer and yield it line by line, without line ends.

        Raises:
            KubeError: the server refused.
            UnreachableError: the connection failed, broke, or was silent for too long.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=request.timeout_seconds)
        try:
            answer = await self._send(request, timeout)
        except _FAILURES as e:
            raise _unreachable(request, e) from e
        try:
            body = b"" if answer.ok else await _read_refusal(request, answer)
            raise_for_status(
                answer.status,
                body,
                attempted=f"{request.method} {request.path}",
                retry_after=answer.headers.get("Retry-After"),
            )
            async with aclosing(_lines(request, answer)) as lines:
                yield lines
        finally:
            # Reading on to the end of a watch would never end; nor is the server asked to say goodbye.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
            answer.close()

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, request: Request, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:  # noqa: ASYNC109 - aiohttp's own bounds
        if self._session is None:
            self._session = self._endpoint.open_session()
        headers = {"Accept": "application/json"} | dict(await self._endpoint.headers())
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        return await self._session.request(
            request.method,
            self._endpoint.url + request.path,
            params=dict(request.query),
            data=request.body,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            **self._endpoint.options,
        )


async def _read_refusal(request: Request, answer: aiohttp.ClientResponse) -> bytes:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            return await answer.read()
    except _FAILURES as e:
        raise _unreachable(request, e) from e


async def _lines(request: Request, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the answer's lines; one may be longer than what aiohttp's own reader allows."""
    rest = b""
    try:
        async for piece in answer.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    except _FAILURES as e:
        raise _unreachable(request, e) from e
    if rest:
        yield rest


def _unreachable(request: Request, error: Exception) -> UnreachableError:
    what = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return UnreachableError(f"{request.method} {request.path}: {what}")
