"""What the API server holds of some kinds of objects, kept up to date by one watch a kind."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from typing import TYPE_CHECKING

from tests.testbed.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.testbed.api import Api, Json, Resource

__all__ = ["Cache"]

_RETRY_SECONDS = 0.5

_PASSING = (OSError, ApiError, http.client.HTTPException, ValueError)
"""The errors of an API server that ends during an answer, or does not run."""

_log = logging.getLogger(__name__)


class Cache:
    """Objects of several kinds in all namespaces, as far as the watches have reported."""

    def __init__(self, api: Api, resources: Iterable[Resource]) -> None:
        """Start the watches; they run until the process ends. Waits for an API server that does not answer."""
        self._api = api
        self._changed = threading.Event()
        self._objects: dict[Resource, dict[tuple[str, str], Json]] = {}
        for resource in resources:
            while resource not in self._objects:
                try:
                    self._replace(resource)
                except _PASSING as error:
                    _log.info("list of %s begins again: %s", resource.plural, error)
                    time.sleep(_RETRY_SECONDS)
        for resource in self._objects:
            threading.Thread(target=self._follow, args=(resource,), daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Return after the next change, or when the time is over."""
        self._changed.wait(seconds)
        self._changed.clear()

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """One object; it is shared, so do not change it."""
        return self._objects[resource].get((namespace, name))

    def all(self, resource: Resource) -> list[Json]:
        """All objects of a kind."""
        return list(self._objects[resource].values())

    def wake(self) -> None:
        """Let `wait` return, as if something had changed."""
        self._changed.set()

    def _follow(self, resource: Resource) -> None:
        while True:
            try:
                for event in self._api.watch(resource, self._replace(resource)):
                    self._take(resource, event)
            except _PASSING as error:
                _log.info("watch of %s begins again: %s", resource.plural, error)
                time.sleep(_RETRY_SECONDS)

    def _replace(self, resource: Resource) -> str:
        items, version = self._api.snapshot(resource)
        self._objects[resource] = {_key(item): item for item in items}
        self._changed.set()
        return version

    def _take(self, resource: Resource, event: Json) -> None:
        if event["type"] == "ERROR":
            raise ApiError(int(event["object"].get("code", 0)), str(event["object"]))
        key = _key(event["object"])
        objects = dict(self._objects[resource])
        if event["type"] == "DELETED":
            objects.pop(key, None)
        else:
            objects[key] = event["object"]
        self._objects[resource] = objects
        self._changed.set()


def _key(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
