"""The store of the fake API server: objects, their versions and the history of changes.

Implements resourceVersions, deletion with finalizers, and garbage collection by owner UID. A stored
object is never modified, only replaced: a reference to one is a snapshot.
"""

import json
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.clock import Clock
from core.kube.resources import PODS, Resource
from core.models.base import format_time
from tests.support.objects import JsonDict

Key = tuple[str, str]


@dataclass(frozen=True)
class Happening:
    """One change of one object: `before` is None for a created one, `after` for a deleted one."""

    version: int
    resource: Resource
    before: JsonDict | None
    after: JsonDict | None


@dataclass
class Store:
    """All objects, and the history of their changes."""

    clock: Clock
    version: int = 1000
    oldest_version: int = 1000
    history: list[Happening] = field(default_factory=list)
    _objects: dict[Resource, dict[Key, JsonDict]] = field(default_factory=dict)

    def find(self, resource: Resource, namespace: str, name: str) -> JsonDict | None:
        """Return the stored object."""
        return self._objects.get(resource, {}).get((namespace, name))

    def all(self, resource: Resource) -> list[JsonDict]:
        """Return the stored objects in the order that a list has."""
        objects = self._objects.get(resource, {})
        return [objects[key] for key in sorted(objects)]

    def add(self, resource: Resource, obj: JsonDict) -> JsonDict:
        """Store a new object, with defaults in its metadata."""
        meta = {"uid": str(uuid.uuid4()), "creationTimestamp": format_time(self.clock.now()), **obj["metadata"]}
        return self._write(resource, None, obj | {"metadata": meta})

    def replace(self, resource: Resource, before: JsonDict, after: JsonDict) -> JsonDict:
        """Store a new version of an object, if it differs; delete it after its last finalizer is removed."""
        if _content(before) == _content(after):
            return before
        if after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers"):
            return self._drop(resource, before, after)
        return self._write(resource, before, after)

    def delete(self, resource: Resource, obj: JsonDict) -> JsonDict:
        """Delete an object, or mark it where it has finalizers; return the server's response.

        The response to an immediate deletion is a Status; for pods, the pod.
        """
        meta = obj["metadata"]
        if not meta.get("finalizers"):
            deleted = self._drop(resource, obj, obj)
            return deleted if resource == PODS else {"apiVersion": "v1", "kind": "Status", "status": "Success"}
        if meta.get("deletionTimestamp"):
            return obj
        marks = {"deletionTimestamp": format_time(self.clock.now()), "deletionGracePeriodSeconds": 0}
        return self._write(resource, obj, obj | {"metadata": meta | marks})

    def since(self, version: int) -> list[Happening]:
        """Return the changes after `version`."""
        first = bisect_right(self.history, version, key=lambda happening: happening.version)
        return self.history[first:]

    def compact(self) -> None:
        """Drop the history."""
        self.oldest_version = self.version
        self.history.clear()

    def _write(self, resource: Resource, before: JsonDict | None, after: JsonDict) -> JsonDict:
        # Through JSON, so that no caller has a reference into the store.
        stored: JsonDict = json.loads(json.dumps(self._stamped(after)))
        meta = stored["metadata"]
        self._objects.setdefault(resource, {})[(meta.get("namespace", ""), meta["name"])] = stored
        self.history.append(Happening(self.version, resource, before, stored))
        return stored

    def _drop(self, resource: Resource, before: JsonDict, last: JsonDict) -> JsonDict:
        deleted = self._stamped(last)
        meta = deleted["metadata"]
        del self._objects[resource][(meta.get("namespace", ""), meta["name"])]
        # A watch gets the last state, with the version of the deletion.
        self.history.append(Happening(self.version, resource, self._restamped(before), None))
        self._collect_garbage(meta["uid"])
        return deleted

    def _stamped(self, obj: JsonDict) -> JsonDict:
        self.version += 1
        return self._restamped(obj)

    def _restamped(self, obj: JsonDict) -> JsonDict:
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}

    def _collect_garbage(self, uid: str) -> None:
        """Delete the objects without an owner, after the one with `uid` was deleted."""
        alive = {obj["metadata"]["uid"] for _, obj in self._every()}
        for resource, obj in list(self._every()):
            meta, owners = obj["metadata"], _owners(obj)
            # It may have been deleted with another one.
            stored = self.find(resource, meta.get("namespace", ""), meta["name"])
            if uid in owners and not alive & owners and stored is obj:
                self.delete(resource, obj)

    def _every(self) -> Iterator[tuple[Resource, JsonDict]]:
        for resource, objects in self._objects.items():
            for obj in objects.values():
                yield resource, obj


def _owners(obj: JsonDict) -> set[str]:
    return {reference["uid"] for reference in obj["metadata"].get("ownerReferences") or []}


def _content(obj: JsonDict) -> JsonDict:
    return obj | {"metadata": {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}}
