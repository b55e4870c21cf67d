"""Follows a collection: a list first, then every change, for as long as the caller likes.

Knows paging, bookmarks, what to do when a watch ends, breaks, falls silent or becomes too
old, and how long to wait then. Does not know what the objects mean, and keeps no cache
(`nodeagent.runtime.informer` does).
Source: Kubernetes v1.34, API concepts, "Efficient detection of changes".

Follows one object by its name.

Knows how a watch narrowed to a name tells that the object is, changed, or is not there. Does
not know what the object means.
Source: Kubernetes v1.34, API concepts: every resource can be selected by `metadata.name`.
"""

import json
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from core.clock import Backoff, Clock
from core.kube.client import KubeClient, Selection, drop_bookkeeping
from core.kube.errors import GoneError, KubeError, UnreachableError, build_error
from core.kube.resources import Resource
from core.kube.transport import Request
from core.models.base import JsonDict

__all__ = ["ChangeKind", "WatchChange", "watch_objects", "watch_one"]


_log = logging.getLogger(__name__)


_WATCH_SECONDS: Final = (300.0, 420.0)
"""Between these the server is asked to end a watch, so that not all end together."""


_SILENCE_SECONDS: Final = 30.0
"""A connection that lives this much longer than the server was asked for is dead."""


_LIVED_SECONDS: Final = 5.0
"""A watch that lasted so long was no failure, however it ended."""


_FAILURES_BEFORE_LIST: Final = 3
"""After each so many failures in a row the resourceVersion itself is doubted.

A server whose storage was restored from a backup refuses a version that it did not reach yet.
"""


_PAUSE: Final = Backoff(first_seconds=0.5, limit_seconds=30.0)


class ChangeKind(StrEnum):
    """What happened."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    LISTING = "LISTING"
    """A list begins."""
    LISTED = "LISTED"
    """A list is complete: the objects ADDED since the last LISTING are all there are."""


_OF_OBJECTS: Final = {str(kind): kind for kind in (ChangeKind.ADDED, ChangeKind.MODIFIED, ChangeKind.DELETED)}


@dataclass(frozen=True)
class WatchChange:
    """One change; `obj` is empty for LISTING and LISTED."""

    kind: ChangeKind
    obj: JsonDict = field(default_factory=dict)


async def watch_objects(client: KubeClient, selection: Selection, *, clock: Clock) -> AsyncGenerator[WatchChange, None]:
    """Yield LISTING, every selected object as ADDED, LISTED, then the changes, without end.

    After a drop the watch goes on from where it was. Where that is too old (410) a new list
    begins; what it does not hold is gone. A list that breaks off has no LISTED. Close the
    generator (`contextlib.aclosing`) to end the watch at once.

    Raises:
        KubeError: the first list was refused for good, for lack of rights or of the kind
            itself. Later refusals, and a server that cannot be reached, are waited out.
    """
    follower = _Follower(client, selection, clock)
    while True:
        async with aclosing(follower.attempt()) as changes:
            async for change in changes:
                yield change
        await clock.sleep(follower.pause_seconds)


class _Follower:
    """One selection's place in history."""

    def __init__(self, client: KubeClient, selection: Selection, clock: Clock) -> None:
        self._client = client
        self._selection = selection
        self._clock = clock
        self._version = ""
        self._listed_once = False
        self._opened_at: float | None = None
        self._failures = 0
        self._shown = f"{selection.resource.plural} in {selection.namespace or 'all namespaces'}"

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next attempt."""
        return _PAUSE.seconds_after(self._failures) if self._failures else 0.0

    async def attempt(self) -> AsyncGenerator[WatchChange, None]:
        """List where that is due, watch until the watch ends; a failure is noted."""
        self._opened_at = None
        try:
            if not self._version:
                async with aclosing(self._list()) as changes:
                    async for change in changes:
                        yield change
            async with aclosing(self._watch()) as changes:
                async for change in changes:
                    yield change
            self._note_end(None)
        except KubeError as e:
            if not self._listed_once and not e.retry:
                raise
            self._note_end(e)

    def _note_end(self, error: KubeError | None) -> None:
        """Count an end that came too early, and doubt the version where that may help."""
        opened_at = self._opened_at
        lived = opened_at is not None and self._clock.monotonic() - opened_at >= _LIVED_SECONDS
        self._failures = 0 if lived else self._failures + 1
        if error is not None:
            # A connection that breaks now and then, or a compacted history, is everyday.
            everyday = self._failures <= 1 and error.retry
            level = logging.DEBUG if everyday else logging.WARNING
            _log.log(level, "the watch of %s was interrupted: %s", self._shown, error)
        if isinstance(error, GoneError) or (self._failures and self._failures % _FAILURES_BEFORE_LIST == 0):
            self._version = ""

    async def _list(self) -> AsyncGenerator[WatchChange, None]:
        """Yield LISTING, each object as ADDED, and LISTED once the version is known."""
        yield WatchChange(ChangeKind.LISTING)
        version = ""
        async with aclosing(self._client.pages(self._selection)) as pages:
            async for page in pages:
                version = version or page.resource_version
                for obj in page.items:
                    yield WatchChange(ChangeKind.ADDED, obj)
        self._version = version
        self._listed_once = True
        yield WatchChange(ChangeKind.LISTED)

    async def _watch(self) -> AsyncGenerator[WatchChange, None]:
        """Yield the changes after the known version, moving it along."""
        seconds = round(random.uniform(*_WATCH_SECONDS))  # noqa: S311 - spreads reconnects, no secret
        selection = self._selection
        query = selection.query | {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        path = selection.resource.path(selection.namespace)
        request = Request("GET", path, query, timeout_seconds=seconds + _SILENCE_SECONDS)
        async with self._client.transport.stream(request) as lines:
            self._opened_at = self._clock.monotonic()
            async for line in lines:
                event = _parse_event(line, self._shown)
                self._version = event.version
                # The others are bookmarks, which move the version only.
                if event.kind in _OF_OBJECTS:
                    yield WatchChange(_OF_OBJECTS[event.kind], event.obj)


class _Event(NamedTuple):
    kind: str
    version: str
    obj: JsonDict


def _parse_event(line: bytes, shown: str) -> _Event:
    """Return what a line of a watch says.

    Raises:
        KubeError: it is an ERROR, as the class for its code says.
        UnreachableError: it cannot be read; the connection broke within it.
    """
    try:
        event: JsonDict = json.loads(line)
        kind, obj = str(event["type"]), event["object"]
        code = int(obj.get("code") or 500) if kind == "ERROR" else 0
        version = "" if code else obj["metadata"]["resourceVersion"]
        drop_bookkeeping(obj)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UnreachableError(f"watch of {shown}: a line cannot be read: {line[:100]!r}") from e
    if code:
        raise build_error(code, json.dumps(obj).encode(), attempted=f"watch of {shown}")
    return _Event(kind, version, obj)


async def watch_one(
    client: KubeClient, resource: Resource, namespace: str, *, name: str, clock: Clock
) -> AsyncGenerator[JsonDict | None, None]:
    """Yield the object as it is now, then after every change; None: it does not exist.

    The same state may come twice, after a watch had to begin anew. Close the generator
    (`contextlib.aclosing`) to end the watch at once.

    Raises:
        KubeError: the first list was refused for good. Later refusals, and a server that
            cannot be reached, are waited out.
    """
    selection = Selection(resource, namespace, field_selector=f"metadata.name={name}")
    listing, latest = False, None
    async with aclosing(watch_objects(client, selection, clock=clock)) as changes:
        async for change in changes:
            match change.kind:
                case ChangeKind.LISTING:
                    listing, latest = True, None
                case ChangeKind.LISTED:
                    listing = False
                case ChangeKind.DELETED:
                    latest = None
                case ChangeKind.ADDED | ChangeKind.MODIFIED:
                    latest = change.obj
            if not listing:
                yield latest
