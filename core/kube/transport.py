"""The interface to the API server: one request, one stream.

Authentication and retries are elsewhere; node agent, data mover and tests each have an
implementation.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["MERGE_PATCH", "Request", "Response", "Transport"]

MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True)
class Request:
    """One HTTP request: `path` is absolute and unescaped, `body` is JSON text or None.

    `urgent`: it bypasses the client's rate limit (`nodeagent.runtime.rate_limit`).
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = "application/json"
    timeout_seconds: float = 30.0
    urgent: bool = False


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
            UnreachableError: no response within the request's timeout.
        """
        ...

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a streamed response and yield it line by line, without line ends.

        The iterator ends when the server ends the response. `timeout_seconds` bounds the
        time between two chunks, not the total. Leaving the context closes the connection.

        Raises:
            KubeError: the server rejected the request (raised on entering).
            UnreachableError: the connection failed, broke, or was idle for too long.
        """
        ...

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""
        ...
