"""A cache of one collection, kept current by a watch, with a callback for every change.

One object never keeps the others from being handled: a malformed one is left out, or stays as it was last read, and an
unexpected error of `trim` or of the callback is logged with its traceback.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, ServerError, ThrottledError
from core.kube.types import Object
from core.kube.watch import ChangeKind, WatchChange, WatchState, watch_objects
from core.logs import fields

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Read = TypeVar("_Read")

Key = tuple[str, str]
"""An object in a collection: namespace (empty for cluster-scoped objects) and name."""

_REJECTED_PAUSE_SECONDS: Final = 60.0
"""Pause before listing again after the API server rejected the list."""

_REJECTED_SECONDS: Final = 60.0
"""How long rejected watches may pass for an outage: an API server that starts answers 401, 403 and 404 for seconds."""

_UNANSWERED_SECONDS: Final = 300.0
"""How long the API server may not answer, as while the only one is upgraded.

No person could act on an agent that is not ready during an outage for all; and all agents would still be not ready for
the moment after it, in which their watches are opened again.
"""


@dataclass(frozen=True, slots=True)
class _Kept(Generic[_T]):
    uid: str
    version: str
    obj: _T


class Informer(Generic[_T]):
    """The last observed state of the selected objects, trimmed."""

    def __init__(
        self,
        client: KubeClient,
        selection: Selection[_Read],
        *,
        clock: Clock,
        trim: Callable[[_Read], _T],
        on_change: Callable[[_T], None],
    ) -> None:
        """Watch `selection` once `run` is called, keeping what `trim` returns of each object.

        `on_change` is called with the trimmed object after every change, and with the last known one after a deletion;
        the cache already reflects the change. It must not block: it enqueues a key.
        """
        self.synced = asyncio.Event()
        self._state = WatchState(clock)
        self._client = client
        self._selection: Selection[Any] = selection
        self._clock = clock
        self._trim: Callable[[Any], _T] = trim
        self._on_change = on_change
        self._kept: dict[Key, _Kept[_T]] = {}
        self._listed: set[Key] | None = None
        self._malformed: set[Key] = set()

    async def run(self) -> None:
        """List and watch until canceled; KubeError: the first list was rejected, and a retry does not help."""
        watching = watch_objects(self._client, self._selection, clock=self._clock, state=self._state)
        async with aclosing(watching) as changes:
            async for change in changes:
                self._take(change)

    async def run_despite_rejections(self, on_rejected: Callable[[KubeError], None]) -> None:
        """List and watch until canceled, and start over a minute after each rejected list.

        `on_rejected` is called with each rejection that differs from the last one; the cache keeps its content.
        """
        last = ""
        while True:
            try:
                await self.run()
            except KubeError as e:
                if str(e) != last:
                    # A permission that is missing for good would fill the log.
                    last = str(e)
                    on_rejected(e)
            await self._clock.sleep(_REJECTED_PAUSE_SECONDS)

    def explain_outage(self) -> str | None:
        """Return why the cache has been outdated for long; None if it is current, or may be soon."""
        seconds, error = self._state.closed_seconds, self._state.error
        rejected = error is not None and not isinstance(error, ServerError | ThrottledError)
        if seconds < (_REJECTED_SECONDS if rejected else _UNANSWERED_SECONDS):
            return None
        answer = "no answer" if error is None or not error.status else f"{error.status} {error.reason}".strip()
        return f"no watch for {seconds:.0f} s: {answer}"

    @property
    def outdated_seconds(self) -> float:
        """For how long nothing has been observed since the watch broke; 0.0 while it is open."""
        return self._state.closed_seconds

    @property
    def malformed(self) -> list[str]:
        """The names of objects that exist and do not have the form of their kind."""
        return sorted(name for _, name in self._malformed)

    def get(self, namespace: str, name: str) -> _T | None:
        """Return the trimmed object, or None if it is not in the cache."""
        kept = self._kept.get((namespace, name))
        return None if kept is None else kept.obj

    def items(self) -> list[_T]:
        """Return all trimmed objects."""
        return [kept.obj for kept in self._kept.values()]

    def _take(self, change: WatchChange) -> None:
        match change.kind:
            case ChangeKind.LISTING:
                self._listed = set()
            case ChangeKind.LISTED:
                self._finish_list()
            case ChangeKind.DELETED:
                self._malformed.discard(_key(change.obj))
                self._drop(_key(change.obj))
            case ChangeKind.ADDED | ChangeKind.MODIFIED:
                self._malformed.discard(_key(change.obj))
                self._keep(change.obj)
            case ChangeKind.MALFORMED:
                self._retain(change.obj)

    def _keep(self, obj: Object) -> None:
        key, meta = _key(obj), obj["metadata"]
        if self._listed is not None:
            self._listed.add(key)
        before = self._kept.get(key)
        if before is not None and (before.uid, before.version) == (meta["uid"], meta["resourceVersion"]):
            # Listed again, unchanged.
            return
        try:
            kept = _Kept(meta["uid"], meta["resourceVersion"], self._trim(obj))
        except Exception as e:  # noqa: BLE001 - logged with its traceback; the other objects are handled
            self._report_fault(key, e)
            return
        self._kept[key] = kept
        if before is not None and before.uid != kept.uid:
            # Deleted and recreated between two watches.
            self._notify(key, before.obj)
        self._notify(key, kept.obj)

    def _retain(self, obj: Mapping[str, Any]) -> None:
        meta = obj.get("metadata")
        name, namespace = (meta.get("name"), meta.get("namespace", "")) if isinstance(meta, dict) else (None, "")
        if isinstance(name, str) and isinstance(namespace, str):
            self._malformed.add((namespace, name))
            if self._listed is not None:
                self._listed.add((namespace, name))

    def _drop(self, key: Key) -> None:
        gone = self._kept.pop(key, None)
        if gone is not None:
            self._notify(key, gone.obj)

    def _notify(self, key: Key, obj: _T) -> None:
        try:
            self._on_change(obj)
        except Exception as e:  # noqa: BLE001 - as above
            self._report_fault(key, e)

    def _report_fault(self, key: Key, error: Exception) -> None:
        resource = self._selection.resource
        identity = fields(kind=resource.kind, namespace=key[0], name=key[1])
        _log.error("object skipped, it could not be handled: %r", error, exc_info=error, extra=identity)
        self._client.count_skipped(resource)

    def _finish_list(self) -> None:
        listed, self._listed = self._listed or set(), None
        self._malformed &= listed
        for key in [key for key in self._kept if key not in listed]:
            self._drop(key)
        self.synced.set()


def _key(obj: Object) -> Key:
    meta = obj["metadata"]
    return sys.intern(meta.get("namespace", "")), meta["name"]
