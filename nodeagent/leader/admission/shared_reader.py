"""Reads that the admission checks of many transfers have in common.

Only resources that many transfers name alike are shared, for a short time. Every other
read goes to the client. An object that was not found is read again by the next check.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Final, cast

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    SECRETS,
    STORAGE_CLASSES,
    VOLUME_ATTACHMENTS,
    Resource,
)
from core.kube.types import Object, ObjectT

__all__ = ["SharedReader"]


_SHARED_SECONDS: Final = 1.0
"""How long an answer is shared; a transfer is admitted seconds after its check anyway."""


_SHARED: Final = frozenset({BACKUP_STORAGE_LOCATIONS, SECRETS, STORAGE_CLASSES, PERSISTENT_VOLUME_CLAIMS})
"""What thousands of transfers name alike; one check reads a PVC twice. No pods: a change of a workload
pod makes its transfer due, and that check must observe the change."""


_LISTED_SECONDS: Final = 5.0
"""How long a list of the whole cluster is shared; the agent lists again before it takes a volume."""


_LISTED: Final[Mapping[Resource, tuple[str, ...]]] = {
    PERSISTENT_VOLUMES: ("csi", "nfs", "claimRef"),
    VOLUME_ATTACHMENTS: ("source", "nodeName"),
}
"""Lists that are shared, and the fields of `spec` that are kept beside the names: there may be thousands."""


_Key = tuple[Resource, str, str]


class SharedReader:
    """Reads objects for admission checks, and shares each answer among them for a second."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        """Read through `client`."""
        self._client = client
        self._clock = clock
        self._found: dict[_Key, Object] = {}
        self._ages: deque[tuple[float, _Key]] = deque()
        self._in_flight: dict[_Key, asyncio.Event] = {}
        self._lists: dict[Resource, tuple[float, list[Any]]] = {}
        self._locks: defaultdict[Resource, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, resource: Resource[ObjectT], namespace: str, name: str) -> ObjectT | None:
        """Return the object, at most a second old; None where it does not exist.

        A read that fails or is canceled is repeated by the next waiting caller.

        Raises:
            KubeError: the API server rejected the read, or could not be reached.
        """
        if resource not in _SHARED:
            return await self._client.read(resource, namespace, name)
        key = (resource, namespace, name)
        while (found := self._find(key)) is None and key in self._in_flight:
            await self._in_flight[key].wait()
        return cast("ObjectT | None", found or await self._read(key))

    async def list(self, selection: Selection[ObjectT]) -> list[ObjectT]:
        """Return the selected objects; a list of the whole cluster is at most some seconds old, and reduced.

        Raises:
            KubeError: the API server rejected the list, or could not be reached.
        """
        resource = selection.resource
        if selection != Selection(resource) or (kept := _LISTED.get(resource)) is None:
            return await self._client.list(selection)
        async with self._locks[resource]:
            listed_at, found = self._lists.get(resource, (None, []))
            if listed_at is None or self._clock.monotonic() - listed_at >= _LISTED_SECONDS:
                found = [_reduce(one, kept) async for page in self._client.pages(selection) for one in page.items]
                self._lists[resource] = (self._clock.monotonic(), found)
            return found

    def _find(self, key: _Key) -> Object | None:
        """Return a recent answer, if there is one."""
        oldest = self._clock.monotonic() - _SHARED_SECONDS
        while self._ages and self._ages[0][0] <= oldest:
            del self._found[self._ages.popleft()[1]]
        return self._found.get(key)

    async def _read(self, key: _Key) -> Object | None:
        """Read the object; concurrent callers with the same key wait for this answer."""
        answered = self._in_flight[key] = asyncio.Event()
        try:
            found = await self._client.read(*key)
            if found is not None:
                self._found[key] = found
                self._ages.append((self._clock.monotonic(), key))
            return found
        finally:
            del self._in_flight[key]
            answered.set()


def _reduce(obj: Any, kept: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401 - of several kinds
    spec = {name: obj["spec"][name] for name in kept if name in obj["spec"]}
    return {"metadata": {"name": obj["metadata"]["name"]}, "spec": spec}
