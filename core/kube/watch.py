"""Watches of a collection or of one object: a list, then every change.

Handles paging, bookmarks, and watches that end, break, become silent or too old, with backoff.
Source: Kubernetes v1.34, API concepts, "Efficient detection of changes"; every resource can be
selected by `metadata.name`.
"""

import json
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypedDict, cast

import msgspec

from core.clock import Backoff, Clock
from core.kube.client import KubeClient, Selection, drop_managed_fields
from core.kube.errors import GoneError, KubeError, MalformedObjectError, UnreachableError, build_error, parse_json
from core.kube.resources import Resource, check_form
from core.kube.transport import Request
from core.kube.types import Object_co, ObjectT
from core.models.base import JsonDict

_log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = (300.0, 420.0)
"""Range of the requested watch timeout, so that not all watches end at once."""

_SILENCE_SECONDS: Final = 30.0
"""A connection that outlives the requested timeout by this is considered broken."""

_LIVED_SECONDS: Final = 5.0
"""A watch that lasted this long does not count as a failure, however it ended."""

_FAILURES_BEFORE_LIST: Final = 3
"""Number of consecutive failures after which the collection is listed again.

A server whose storage was restored from a backup rejects a version that it has not reached yet.
"""

_PAUSE: Final = Backoff(first_seconds=0.5, limit_seconds=30.0)


class ChangeKind(StrEnum):
    """Kind of a change."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    LISTING = "LISTING"
    """A list starts."""
    LISTED = "LISTED"
    """A list is complete: the objects ADDED or MALFORMED since the last LISTING are all there are."""
    MALFORMED = "MALFORMED"
    """The object exists, and does not have the form of its kind: nothing but its name may be read."""


_OF_OBJECTS: Final = {str(kind): kind for kind in (ChangeKind.ADDED, ChangeKind.MODIFIED, ChangeKind.DELETED)}


@dataclass(frozen=True)
class WatchChange(Generic[Object_co]):
    """One change; `obj` is empty for LISTING and LISTED, and has only its metadata for some of DELETED."""

    kind: ChangeKind
    obj: Object_co = field(default_factory=cast("Any", dict))


class WatchState:
    """Whether a watch is open; if not, since when, and the last error."""

    def __init__(self, clock: Clock) -> None:
        """Begin before the first watch, which does not count as closed."""
        self._clock = clock
        self._closed_at: float | None = None
        self.error: KubeError | None = None

    @property
    def closed_seconds(self) -> float:
        """Seconds since the watch was last open; 0.0 while it is."""
        return 0.0 if self._closed_at is None else self._clock.monotonic() - self._closed_at

    def open(self) -> None:
        """Record that the API server has accepted a watch."""
        self._closed_at, self.error = None, None

    def close(self, error: KubeError | None) -> None:
        """Record that an attempt to list and watch has ended, with an error or regularly."""
        if self._closed_at is None:
            self._closed_at = self._clock.monotonic()
        self.error = error or self.error


async def watch_objects(
    client: KubeClient, selection: Selection[ObjectT], *, clock: Clock, state: WatchState | None = None
) -> AsyncGenerator[WatchChange[ObjectT], None]:
    """Yield LISTING, every selected object as ADDED, LISTED, then the changes, indefinitely.

    After an interruption the watch continues at the last version. Where that is too old (410), the objects are listed
    again; those not listed were deleted. An interrupted list has no LISTED. Close the generator (`contextlib.aclosing`)
    to end the watch at once. `state` is kept current.

    Raises:
        KubeError: the first list failed permanently, for lack of permission or because the resource
            does not exist. Later errors, and an unreachable server, are retried.
    """
    follower = _Follower(client, selection, clock, state or WatchState(clock))
    while True:
        async with aclosing(follower.attempt()) as changes:
            async for change in changes:
                yield change
        await clock.sleep(follower.pause_seconds)


class _Follower(Generic[ObjectT]):
    def __init__(self, client: KubeClient, selection: Selection[ObjectT], clock: Clock, state: WatchState) -> None:
        self._client = client
        self._selection = selection
        self._clock = clock
        self._state = state
        self._version = ""
        self._listed_once = False
        self._opened_at: float | None = None
        self._failures = 0
        self._shown = f"{selection.resource.plural} in {selection.namespace or 'all namespaces'}"

    @property
    def pause_seconds(self) -> float:
        """Delay before the next attempt."""
        return _PAUSE.seconds_after(self._failures) if self._failures else 0.0

    async def attempt(self) -> AsyncGenerator[WatchChange[ObjectT], None]:
        """List where needed, then watch until the watch ends; count a failure."""
        self._opened_at = None
        try:
            if not self._version:
                async with aclosing(self._list()) as changes:
                    async for change in changes:
                        yield change
            async with aclosing(self._watch()) as changes:
                async for change in changes:
                    yield change
            self._count_end(None)
        except KubeError as e:
            if not self._listed_once and not e.retry:
                raise
            self._count_end(e)

    def _count_end(self, error: KubeError | None) -> None:
        """Count an early end as a failure, and reset the version where a new list may help."""
        self._state.close(error)
        lived = self._opened_at is not None and self._clock.monotonic() - self._opened_at >= _LIVED_SECONDS
        self._failures = 0 if lived else self._failures + 1
        if error is not None:
            # An occasional broken connection, or a compacted history, is normal.
            level = logging.DEBUG if self._failures <= 1 and error.retry else logging.WARNING
            _log.log(level, "watch of %s interrupted, will retry: %s", self._shown, error)
        if isinstance(error, GoneError) or (self._failures and self._failures % _FAILURES_BEFORE_LIST == 0):
            self._version = ""

    async def _list(self) -> AsyncGenerator[WatchChange[ObjectT], None]:
        yield WatchChange(ChangeKind.LISTING)
        version = ""
        async with aclosing(self._client.pages(self._selection)) as pages:
            async for page in pages:
                version = version or page.resource_version
                for obj in page.items:
                    yield WatchChange(ChangeKind.ADDED, obj)
                for obj in cast("list[ObjectT]", page.malformed):
                    yield WatchChange(ChangeKind.MALFORMED, obj)
        self._version = version
        self._listed_once = True
        yield WatchChange(ChangeKind.LISTED)

    async def _watch(self) -> AsyncGenerator[WatchChange[ObjectT], None]:
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
            self._state.open()
            async for line in lines:
                kind, version, obj = _parse_event(line, self._shown)
                self._version = version or self._version
                # The others are bookmarks, which only advance the version.
                if kind in _OF_OBJECTS:
                    yield self._check(_OF_OBJECTS[kind], obj)

    def _check(self, kind: ChangeKind, obj: JsonDict) -> WatchChange[ObjectT]:
        """Return the change, as MALFORMED if its object is; of one that is deleted then, the metadata is left."""
        resource = self._selection.resource
        try:
            check_form(resource, obj)
        except MalformedObjectError as e:
            if kind is ChangeKind.DELETED:
                with suppress(MalformedObjectError):
                    check_form(resource, obj, identity=True)
                    return WatchChange(kind, cast("ObjectT", {"metadata": obj["metadata"]}))
            self._client.skip(resource, e)
            kind = ChangeKind.MALFORMED
        return WatchChange(kind, cast("ObjectT", obj))


class _Line(TypedDict):
    type: str
    object: JsonDict


_UNKNOWN_ERROR: Final = 500


def _parse_event(line: bytes, shown: str) -> tuple[str, str, JsonDict]:
    """Return the kind of the change in a line of a watch, the object's version, "" if it has none, and the object.

    Raises:
        KubeError: it is an ERROR; the class depends on its code.
        UnreachableError: it is no event: the connection broke within it, or no API server sent it.
    """
    try:
        event = msgspec.convert(parse_json(line), _Line)
        kind, obj = event["type"], event["object"]
        rejection = json.dumps(obj).encode() if kind == "ERROR" else b""
    except (ValueError, RecursionError) as e:
        raise UnreachableError(f"watch of {shown}: invalid line: {line[:100]!r}") from e
    if rejection:
        code = obj.get("code")
        status = code if isinstance(code, int) and code else _UNKNOWN_ERROR
        raise build_error(status, rejection, attempted=f"watch of {shown}")
    drop_managed_fields(obj)
    meta = obj.get("metadata")
    version = meta.get("resourceVersion") if isinstance(meta, dict) else None
    return kind, version if isinstance(version, str) else "", obj


async def watch_one(
    client: KubeClient, resource: Resource[ObjectT], namespace: str, *, name: str, clock: Clock
) -> AsyncGenerator[ObjectT | None, None]:
    """Yield the object in its current state, then after every change; None: it does not exist.

    After a watch was restarted, the same state may be yielded twice. Errors are as for `watch_objects`; close the
    generator as there.
    """
    selection = Selection(resource, namespace, field_selector=f"metadata.name={name}")
    listing = False
    latest: ObjectT | None = None
    before: ObjectT | None = None
    async with aclosing(watch_objects(client, selection, clock=clock)) as changes:
        async for change in changes:
            match change.kind:
                case ChangeKind.LISTING:
                    # An interrupted list is followed by another one.
                    before = before if listing else latest
                    listing, latest = True, None
                case ChangeKind.LISTED:
                    listing = False
                case ChangeKind.DELETED:
                    latest = None
                case ChangeKind.ADDED | ChangeKind.MODIFIED:
                    latest = change.obj
                case ChangeKind.MALFORMED:
                    # It exists: the last state that could be read stays.
                    latest = before if listing else latest
            if not listing:
                yield latest
