"""The watches of the fake API server.

Source: Kubernetes v1.34, "Efficient detection of changes"; the real server is compared
with this one in `tests/contract`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from core.kube.errors import UnreachableError
from core.kube.resources import Resource
from core.kube.transport import Request
from tests.support.fakeobjects import Filter
from tests.support.fakestore import Happening, Store
from tests.support.objects import JsonDict


@dataclass
class _Stream:
    request: Request
    resource: Resource
    chosen: Filter
    seen: int
    """The version up to which it has delivered every change."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cut: bool = False
    bookmarks_due: int = 0


class Watches:
    """All open watches; `silent`: they send nothing and do not end."""

    def __init__(self, store: Store) -> None:
        self.silent = False
        self._store = store
        self._announced = store.version
        self._streams: list[_Stream] = []

    def __len__(self) -> int:
        return len(self._streams)

    def wake(self) -> None:
        """Let every watch check for changes."""
        for stream in self._streams:
            stream.changed.set()

    def announce(self) -> None:
        """Let the watches of what has changed check for changes; the others stay asleep, for speed."""
        before, self._announced = self._announced, self._store.version
        if before == self._announced:
            return
        changed = {happening.resource for happening in self._store.since(before)}
        for stream in self._streams:
            if stream.resource in changed:
                stream.changed.set()
            elif stream.seen == before:
                stream.seen = self._announced

    def bookmark(self) -> None:
        """Send a bookmark on each that allows it."""
        for stream in self._streams:
            stream.bookmarks_due += stream.request.query.get("allowWatchBookmarks") == "true"
        self.wake()

    def cut(self) -> None:
        """Break the connection of each."""
        for stream in self._streams:
            stream.cut = True
        self.wake()

    @asynccontextmanager
    async def open(
        self, request: Request, resource: Resource, chosen: Filter, *, after: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch and yield the lines after a version; 0: the stored objects first."""
        stream = _Stream(request, resource, chosen, seen=after)
        self._streams.append(stream)
        try:
            async with aclosing(self._lines(stream)) as lines:
                yield lines
        finally:
            self._streams.remove(stream)

    async def _lines(self, stream: _Stream) -> AsyncGenerator[bytes, None]:
        query, now = stream.request.query, asyncio.get_running_loop().time
        if not stream.seen:
            stream.seen = self._store.version
            for obj in filter(stream.chosen, self._store.all(stream.resource)):
                yield _event("ADDED", obj)
        ends_at = now() + float(query.get("timeoutSeconds", "inf"))
        spoke_at = now()
        while True:
            stream.changed.clear()
            if stream.cut:
                raise UnreachableError(f"watch {stream.request.path}: the connection broke")
            if not self.silent:
                if stream.seen < self._store.oldest_version:
                    yield _event("ERROR", _too_old(stream.seen))
                    return
                news, stream.seen = self._news(stream), self._store.version
                for line in news:
                    yield line
                    spoke_at = now()
                if now() >= ends_at:
                    return
            silent_at = spoke_at + stream.request.timeout_seconds
            # A change while the lines above were read has set `changed`.
            await _wait(stream.changed, silent_at if self.silent else min(silent_at, ends_at))
            if now() >= silent_at and not stream.changed.is_set():
                raise UnreachableError(f"watch {stream.request.path}: silent for too long")

    def _news(self, stream: _Stream) -> list[bytes]:
        lines_or_none = (_build_line(happening, stream) for happening in self._store.since(stream.seen))
        lines = [line for line in lines_or_none if line is not None]
        if stream.bookmarks_due:
            stream.bookmarks_due = 0
            lines.append(_event("BOOKMARK", _bookmark(stream.resource, self._store.version)))
        return lines


def _build_line(happening: Happening, stream: _Stream) -> bytes | None:
    """Return the line of a watch for a change; an object that is no longer selected counts as deleted."""
    if happening.resource != stream.resource:
        return None
    before, after = happening.before, happening.after
    was = before is not None and stream.chosen(before)
    if after is not None and stream.chosen(after):
        return _event("MODIFIED" if was else "ADDED", after)
    if before is None or not was:
        return None
    version = {"resourceVersion": str(happening.version)}
    return _event("DELETED", before | {"metadata": before["metadata"] | version})


async def _wait(event: asyncio.Event, until: float) -> None:
    try:
        async with asyncio.timeout_at(None if until == float("inf") else until):
            await event.wait()
    except TimeoutError:
        return


def _event(kind: str, obj: JsonDict) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


def _bookmark(resource: Resource, version: int) -> JsonDict:
    meta = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}


def _too_old(version: int) -> JsonDict:
    message = f"too old resource version: {version}"
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "message": message,
        "reason": "Expired",
        "code": 410,
    }
