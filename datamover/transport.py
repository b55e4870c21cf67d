"""The API server, reached from inside a pod with its service account.

Knows addresses, token and authority as the kubelet mounts them, and aiohttp, which nothing
else in this package imports. Does not know kinds, retries or watches.
Source: Kubernetes v1.34, "Accessing the Kubernetes API from a Pod".
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from core.errors import ConfigError
from core.kube.errors import UnreachableError, raise_for_status
from core.kube.transport import Request, Response

__all__ = ["PodTransport"]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_SECONDS: Final = 10.0


class PodTransport:
    """Sends requests with the token of the pod's service account."""

    def __init__(self, url: str, *, token_file: Path, authority: ssl.SSLContext | None) -> None:
        """Reach the API server at `url`; `token_file` is read anew for each request."""
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._authority = authority
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def in_pod(cls, environment: Mapping[str, str], account: Path = _ACCOUNT) -> "PodTransport":
        """Return the transport of the pod this process runs in.

        Raises:
            ConfigError: it does not run in one.
        """
        host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "this is no pod (KUBERNETES_SERVICE_HOST is not set); by hand, name --repository and what to move"
            )
        if ":" in host:
            host = f"[{host}]"
        try:
            authority = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as e:
            raise ConfigError(f"{account / 'ca.crt'} cannot be read: {e.strerror}") from e
        return cls(f"https://{host}:{port}", token_file=account / "token", authority=authority)

    async def request(self, request: Request) -> Response:
        """Return the answer, of any status."""
        try:
            async with self._send(request, total_seconds=request.timeout_seconds) as answer:
                return Response(answer.status, await answer.read(), answer.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise _unreachable(request, e) from e

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a long answer and yield it line by line."""
        try:
            answer = await self._send(request, silent_seconds=request.timeout_seconds)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            raise _unreachable(request, e) from e
        try:
            body = b"" if answer.ok else await answer.read()
            raise_for_status(
                answer.status,
                body,
                attempted=f"{request.method} {request.path}",
                retry_after=answer.headers.get("Retry-After"),
            )
            yield _lines(request, answer)
        finally:
            # Reading on to the end of a watch would never end.
            answer.close()

    async def close(self) -> None:
        """Release all connections."""
        if self._session is not None:
            await self._session.close()

    def _send(
        self, request: Request, *, total_seconds: float | None = None, silent_seconds: float | None = None
    ) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        headers = {"Accept": "application/json", "User-Agent": "datamover"}
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        # The kubelet replaces the file before the token in it expires.
        headers["Authorization"] = f"Bearer {self._token()}"
        return self._session.request(
            request.method,
            self._url + request.path,
            params=dict(request.query),
            data=request.body,
            headers=headers,
            ssl=self._authority if self._authority is not None else True,
            timeout=aiohttp.ClientTimeout(total=total_seconds, sock_connect=_CONNECT_SECONDS, sock_read=silent_seconds),
            allow_redirects=False,
        )

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except OSError as e:
            raise ConfigError(f"service account token {self._token_file} cannot be read: {e.strerror}") from e


async def _lines(request: Request, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the answer's lines; one may be longer than what aiohttp's own reader allows."""
    rest = b""
    try:
        async for piece in answer.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        raise _unreachable(request, e) from e
    if rest:
        yield rest


def _unreachable(request: Request, error: Exception) -> UnreachableError:
    what = "no answer in time" if isinstance(error, asyncio.TimeoutError) else str(error) or type(error).__name__
    return UnreachableError(f"{request.method} {request.path}: {what}")
