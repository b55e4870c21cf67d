"""Follows a collection: a list first, then every change, for as long as the caller likes.

Knows paging, bookmarks, what to do when a watch ends, breaks, falls silent or becomes too
old. Does not know what the objects mean, and keeps no cache (`nodeagent.informer` does).
Source: Kubernetes v1.34, API concepts, "Efficient detection of changes".
"""

import json
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import GoneError, KubeError, raise_for_status
from core.kube.transport import Request
from core.models.base import JsonDict

__all__ = ["ChangeKind", "WatchChange", "watch_objects"]

_log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 300
"""How long the server is asked to keep one watch open, at least; client-go: 5 to 10 minutes."""

_SILENCE_SECONDS: Final = 60.0
"""Added to that: silence beyond it means a dead connection."""

_FIRST_PAUSE_SECONDS: Final = 0.5
_PAUSE_LIMIT_SECONDS: Final = 30.0


class ChangeKind(StrEnum):
    """What happened."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    LISTING = "LISTING"
    """A list begins."""
    LISTED = "LISTED"
    """A list is complete: the objects ADDED since LISTING are all there are."""


@dataclass(frozen=True)
class WatchChange:
    """One change; `obj` is empty for LISTING and LISTED."""

    kind: ChangeKind
    obj: JsonDict = field(default_factory=dict)


class _TooOldError(Exception):
    """The resourceVersion cannot be watched from any more."""


async def watch_objects(client: KubeClient, selection: Selection, *, clock: Clock) -> AsyncIterator[WatchChange]:
    """Yield LISTING, every selected object as ADDED, LISTED, then the changes, without end.

    After a drop the watch goes on from where it was. Where that is too old (410) a new list
    begins; what it does not hold is gone.

    Raises:
        KubeError: the first list was refused. Later refusals are waited out, with a warning.
    """
    pause = _FIRST_PAUSE_SECONDS
    version = ""
    began = False
    while True:
        try:
            if not version:
                async for change, seen in _list(client, selection):
                    version = seen
                    yield change
                began = True
            async for news, seen in _watch(client, selection, version):
                version, pause = seen, _FIRST_PAUSE_SECONDS
                if news is not None:
                    yield news
            # The server ends a watch after a while; that is no failure, but never a hot loop.
            await clock.sleep(random.uniform(0.0, 1.0))  # noqa: S311 - spreads clients, no secret
            continue
        except (_TooOldError, GoneError):
            _log.debug("watch of %s is too old and begins anew", selection.resource.plural)
            version = ""
        except KubeError as e:
            if not began:
                raise
            _log.warning("watch of %s is interrupted: %s", selection.resource.plural, e)
        await clock.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - as above
        pause = min(pause * 2, _PAUSE_LIMIT_SECONDS)


async def _list(client: KubeClient, selection: Selection) -> AsyncIterator[tuple[WatchChange, str]]:
    """Yield LISTING, each object as ADDED, and LISTED with the version to go on from."""
    yield WatchChange(ChangeKind.LISTING), ""
    version = ""
    async for page in client.pages(selection):
        version = page.resource_version
        for item in page.items:
            # Until the last page is in there is no version to go on from.
            yield WatchChange(ChangeKind.ADDED, item), ""
    yield WatchChange(ChangeKind.LISTED), version


async def _watch(
    client: KubeClient, selection: Selection, version: str
) -> AsyncIterator[tuple[WatchChange | None, str]]:
    """Yield the changes after `version`, each with the version to go on from.

    Raises:
        _TooOldError: the server no longer knows `version`.
        KubeError: the connection failed, or the server said so.
    """
    seconds = int(_WATCH_SECONDS * random.uniform(1.0, 2.0))  # noqa: S311 - spreads reconnects
    query = selection.query | {
        "watch": "true",
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(seconds),
    }
    resource = selection.resource
    request = Request("GET", resource.path(selection.namespace), query, timeout_seconds=seconds + _SILENCE_SECONDS)
    async with client.transport.stream(request) as lines:
        async for line in lines:
            event = json.loads(line)
            obj = event["object"]
            if event["type"] == "ERROR":
                if obj.get("code") == HTTPStatus.GONE:
                    raise _TooOldError
                attempted = f"watch {resource.kind} {selection.namespace or 'all namespaces'}"
                raise_for_status(int(obj.get("code") or 500), line, attempted=attempted)
            version = obj["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                yield None, version
            else:
                yield WatchChange(ChangeKind(event["type"]), obj), version
