"""The interface to the API server: one request, one stream.

Authentication and retries are elsewhere; node agent, data mover and tests each have an
implementation.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from core.kube.errors import GoneError, UnreachableError

__all__ = ["APPLY_PATCH", "MERGE_PATCH", "LineSplitter", "Request", "Response", "Transport", "check_size"]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
"""Server-side apply; its body may be JSON, which is YAML too."""

_LARGEST_OBJECT_BYTES: Final = 16 << 20
"""Several times what the API server accepts: 3 MiB, while etcd stores 1.5.

Source: Kubernetes v1.34, MaxRequestBodyBytes in staging/src/k8s.io/apiserver/pkg/server/config.go.
"""


@dataclass(frozen=True)
class Request:
    """One HTTP request: `path` is absolute and unescaped, `body` is JSON text or None.

    `urgent`: it bypasses the client's rate limit (`nodeagent.runtime.api_server`). `many`: its response may
    be larger than one object.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    timeout_seconds: float = 30.0
    urgent: bool = False
    many: bool = False


@dataclass(frozen=True)
class Response:
    """A response of any status; `retry_after` and `date` are the headers of these names."""

    status: int
    body: bytes
    retry_after: str | None = None
    date: str | None = None


class Transport(Protocol):
    """Sends requests to the API server."""

    async def request(self, request: Request) -> Response:
        """Return the response, of any status.

        Raises:
            UnreachableError: no response within the request's timeout, or a larger one than any object.
        """
        ...

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a streamed response and yield it line by line, without line ends.

        The iterator ends when the server ends the response. `timeout_seconds` bounds the
        time between two chunks, not the total. Leaving the context closes the connection.

        Raises:
            KubeError: the server rejected the request (raised on entering).
            UnreachableError: the connection failed, broke, or was idle for too long.
            GoneError: a line is longer than any object; list again.
        """
        ...

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""
        ...


def check_size(request: Request, size_bytes: int) -> None:
    """Check how much of a response has been read.

    Raises:
        UnreachableError: more than any object has; something else than an API server sends it.
    """
    if size_bytes > _LARGEST_OBJECT_BYTES and not request.many:
        raise UnreachableError(
            f"{request.method} {request.path}: the response exceeds {_LARGEST_OBJECT_BYTES >> 20} MiB"
        )


class LineSplitter:
    """Splits a streamed response into its lines."""

    def __init__(self, request: Request) -> None:
        """Start before the response to `request`."""
        self._request = request
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    @property
    def rest(self) -> bytes:
        """The line that has not ended yet."""
        return b"".join(self._pieces)

    def split(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in `piece`, without line ends.

        Raises:
            GoneError: the next one is longer than any object.
        """
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = self.rest + lines[0]
            self._pieces, self._size_bytes = [], 0
        self._pieces.append(rest)
        self._size_bytes += len(rest)
        if self._size_bytes > _LARGEST_OBJECT_BYTES:
            request, limit = self._request, _LARGEST_OBJECT_BYTES >> 20
            raise GoneError(f"{request.method} {request.path}: a line exceeds {limit} MiB")
        return lines
