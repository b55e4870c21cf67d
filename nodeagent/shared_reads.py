"""Reads that many loads' checks have in common, asked once for all of them.

Knows which objects many loads share, and for how long an answer holds. Does not know what is
checked. Everything else goes through unchanged, and so does whatever was not found: nothing is
held to be missing for longer than it is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final

from core.clock import Clock
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PERSISTENT_VOLUME_CLAIMS, SECRETS, STORAGE_CLASSES
from core.kube.transport import Request, Response, Transport

__all__ = ["SharedReads"]

_HOLDS_SECONDS: Final = 1.0
"""For how long an answer holds: loads are accepted seconds after they were checked anyway."""

_SHARED: Final = frozenset(
    resource.plural for resource in (BACKUP_STORAGE_LOCATIONS, SECRETS, STORAGE_CLASSES, PERSISTENT_VOLUME_CLAIMS)
)
"""What thousands of loads name alike; of a claim one check asks twice. No pods: a load whose pod has
changed is looked at because of it, and must see the change."""

_NAMED: Final = 2
"""Segments at the end of one object's path: the resource, the name."""


class SharedReads:
    """A transport whose checks share answers."""

    def __init__(self, inner: Transport, clock: Clock) -> None:
        """Ask through `inner`."""
        self._inner = inner
        self._clock = clock
        self._answers: dict[str, Response] = {}
        self._held: deque[tuple[float, str]] = deque()
        self._asking: dict[str, asyncio.Event] = {}

    async def request(self, request: Request) -> Response:
        """Return the answer: one of a second ago at most, where the object is one that many loads name.

        Raises:
            UnreachableError: no answer arrived within the request's timeout.
        """
        if request.method != "GET" or request.query or not _is_shared(request.path):
            return await self._inner.request(request)
        while (answer := self._find(request.path)) is None and request.path in self._asking:
            await self._asking[request.path].wait()
        return answer or await self._ask(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a long answer, which nobody shares."""
        return self._inner.stream(request)

    async def close(self) -> None:
        """Release all connections."""
        await self._inner.close()

    def _find(self, path: str) -> Response | None:
        """Return what was answered lately, if anything."""
        oldest = self._clock.monotonic() - _HOLDS_SECONDS
        while self._held and self._held[0][0] <= oldest:
            del self._answers[self._held.popleft()[1]]
        return self._answers.get(path)

    async def _ask(self, request: Request) -> Response:
        """Ask; whoever asks for the same meanwhile waits for this answer."""
        answered = self._asking[request.path] = asyncio.Event()
        try:
            answer = await self._inner.request(request)
            if answer.status == HTTPStatus.OK:
                self._answers[request.path] = answer
                self._held.append((self._clock.monotonic(), request.path))
            return answer
        finally:
            del self._asking[request.path]
            answered.set()


def _is_shared(path: str) -> bool:
    segments = path.rsplit("/", _NAMED)
    return len(segments) > _NAMED and segments[1] in _SHARED
