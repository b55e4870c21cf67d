"""A cache of one collection that tells of every change.

Knows how a watch becomes a cache, and which objects a new list shows to be gone. Does not
know what anybody does about a change. It holds what its owner leaves of each object only.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.models.base import JsonDict

__all__ = ["Informer", "Key"]

_T = TypeVar("_T")

Key = tuple[str, str]
"""An object in a collection: namespace (empty for cluster-scoped ones) and name."""

_REFUSED_PAUSE_SECONDS: Final = 60.0
"""Before a collection is followed again that the API server refused to list."""


@dataclass(frozen=True, slots=True)
class _Kept(Generic[_T]):
    uid: str
    version: str
    obj: _T


class Informer(Generic[_T]):
    """Keeps what `trim` leaves of the selected objects as last seen."""

    def __init__(
        self,
        client: KubeClient,
        selection: Selection,
        *,
        clock: Clock,
        trim: Callable[[JsonDict], _T],
        on_change: Callable[[_T], None],
    ) -> None:
        """Watch `selection`; keep what `trim` leaves of each object.

        `on_change` gets the trimmed object after every change, and the last known one after a
        deletion; the cache shows the change already. It must not block: it enqueues a key.
        """
        self.synced = asyncio.Event()
        self._client = client
        self._selection = selection
        self._clock = clock
        self._trim = trim
        self._on_change = on_change
        self._kept: dict[Key, _Kept[_T]] = {}
        self._listed: set[Key] | None = None

    async def run(self) -> None:
        """Follow the collection until canceled.

        Raises:
            KubeError: the first list was refused for good.
        """
        async with aclosing(watch_objects(self._client, self._selection, clock=self._clock)) as changes:
            async for change in changes:
                self._take(change)

    async def run_despite_refusals(self, on_refused: Callable[[KubeError], None]) -> None:
        """Follow the collection until canceled, and begin again a while after each refusal.

        `on_refused` gets each of them: the cache stays as it was, or empty.
        """
        while True:
            try:
                await self.run()
            except KubeError as e:
                on_refused(e)
            await self._clock.sleep(_REFUSED_PAUSE_SECONDS)

    def get(self, namespace: str, name: str) -> _T | None:
        """Return the trimmed object, or None where it was not seen."""
        kept = self._kept.get((namespace, name))
        return None if kept is None else kept.obj

    def items(self) -> list[_T]:
        """Return all trimmed objects."""
        return [kept.obj for kept in self._kept.values()]

    def __len__(self) -> int:
        """How many objects there are."""
        return len(self._kept)

    def _take(self, change: WatchChange) -> None:
        match change.kind:
            case ChangeKind.LISTING:
                self._listed = set()
            case ChangeKind.LISTED:
                self._finish_list()
            case ChangeKind.DELETED:
                self._drop(_key(change.obj))
            case ChangeKind.ADDED | ChangeKind.MODIFIED:
                self._keep(change.obj)

    def _keep(self, obj: JsonDict) -> None:
        key, meta = _key(obj), obj["metadata"]
        if self._listed is not None:
            self._listed.add(key)
        before = self._kept.get(key)
        if before is not None and (before.uid, before.version) == (meta["uid"], meta["resourceVersion"]):
            # A new list shows again what is known already.
            return
        kept = _Kept(meta["uid"], meta["resourceVersion"], self._trim(obj))
        self._kept[key] = kept
        if before is not None and before.uid != kept.uid:
            # It went and another one came while nobody watched.
            self._on_change(before.obj)
        self._on_change(kept.obj)

    def _drop(self, key: Key) -> None:
        gone = self._kept.pop(key, None)
        if gone is not None:
            self._on_change(gone.obj)

    def _finish_list(self) -> None:
        listed, self._listed = self._listed or set(), None
        for key in [key for key in self._kept if key not in listed]:
            self._drop(key)
        self.synced.set()


def _key(obj: JsonDict) -> Key:
    meta = obj["metadata"]
    return sys.intern(meta.get("namespace", "")), meta["name"]
