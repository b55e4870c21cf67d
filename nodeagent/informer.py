"""A cache of one collection that tells of every change.

Knows how a watch becomes a cache, and which objects a new list shows to be gone. Does not
know what anybody does about a change. It holds trimmed objects only.
"""

import asyncio
from collections.abc import Callable

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.models.base import JsonDict

__all__ = ["Informer", "Key"]

Key = tuple[str, str]
"""An object in a collection: namespace (empty for cluster-scoped ones) and name."""


class Informer:
    """Keeps the selected objects as last seen."""

    def __init__(
        self,
        client: KubeClient,
        selection: Selection,
        *,
        clock: Clock,
        trim: Callable[[JsonDict], JsonDict],
        on_change: Callable[[JsonDict], None],
    ) -> None:
        """Watch `selection`; keep what `trim` leaves of each object.

        `on_change` gets the trimmed object after every change, and the last known one after a
        deletion. It must not block: it enqueues a key.
        """
        self.synced = asyncio.Event()
        self._client = client
        self._selection = selection
        self._clock = clock
        self._trim = trim
        self._on_change = on_change
        self._objects: dict[Key, JsonDict] = {}
        self._listed: set[Key] = set()

    async def run(self) -> None:
        """Follow the collection until canceled.

        Raises:
            KubeError: the first list was refused.
        """
        async for change in watch_objects(self._client, self._selection, clock=self._clock):
            self._take(change)

    def get(self, namespace: str, name: str) -> JsonDict | None:
        """Return the trimmed object, or None where it was not seen."""
        return self._objects.get((namespace, name))

    def items(self) -> list[JsonDict]:
        """Return all trimmed objects."""
        return list(self._objects.values())

    def __len__(self) -> int:
        """How many objects there are."""
        return len(self._objects)

    def _take(self, change: WatchChange) -> None:
        if change.kind is ChangeKind.LISTING:
            self._listed.clear()
            return
        if change.kind is ChangeKind.LISTED:
            for key in [key for key in self._objects if key not in self._listed]:
                self._on_change(self._objects.pop(key))
            self.synced.set()
            return
        meta = change.obj["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        if change.kind is ChangeKind.DELETED:
            self._objects.pop(key, None)
            self._on_change(self._trim(change.obj))
            return
        if change.kind is ChangeKind.ADDED:
            self._listed.add(key)
        known = self._objects.get(key)
        if known is not None and known["metadata"].get("resourceVersion") == meta.get("resourceVersion"):
            # A new list shows again what is known already.
            return
        trimmed = self._trim(change.obj)
        self._objects[key] = trimmed
        self._on_change(trimmed)
