"""The narrow door to the API server: one request, one stream.

Knows the form of a request and an answer. Does not know authentication, retries or kinds;
the node agent, the data mover and the tests each bring an implementation.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["MERGE_PATCH", "Request", "Response", "Transport"]

MERGE_PATCH = "application/merge-patch+json"


@dataclass(frozen=True)
class Request:
    """One HTTP request: `path` is absolute and unescaped, `body` is JSON text or nothing.

    `urgent`: it may pass by what a client holds back of its own accord (`nodeagent.runtime.rate_limit`).
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
    """An answer, whatever its status."""

    status: int
    body: bytes
    retry_after: str | None = None


class Transport(Protocol):
    """How requests reach the API server."""

    async def request(self, request: Request) -> Response:
        """Return the answer, of any status.

        Raises:
            UnreachableError: no answer arrived within the request's timeout.
        """
        ...

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a long answer and yield it line by line, without line ends.

        The iterator ends when the server ends the answer. `timeout_seconds` bounds the
        silence between two pieces, not the whole. Leaving the context closes the connection.

        Raises:
            KubeError: the server refused (raised on entering).
            UnreachableError: the connection failed, broke, or was silent for too long.
        """
        ...

    async def close(self) -> None:
        """Release all connections; calling it twice is allowed."""
        ...
