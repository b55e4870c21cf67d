"""Client of the API server for objects and lists; watches are in `core.kube.watch`.

Turns verbs into requests, with preconditions, paging and retries. Objects are JSON dicts.
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from core.kube.errors import ConflictError, NotFoundError, raise_for_status
from core.kube.resources import Resource
from core.kube.retry import Retry
from core.kube.transport import MERGE_PATCH, Request, Response, Transport
from core.models.base import JsonDict

__all__ = ["Deletion", "KubeClient", "ListPage", "Selection", "drop_managed_fields", "select_labels"]

_PAGE_SIZE = 500
"""Number of objects per page of a list, as in client-go."""


_SHORT_LINE_BYTES: Final = 50
"""Average lines of a log are rarely shorter than this."""

_SEGMENT: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]+")
"""Superset of the valid names of objects and namespaces; excludes every special path segment.

Source: Kubernetes v1.34, apimachinery, pkg/api/validation/path and pkg/util/validation.
"""


@dataclass(frozen=True)
class Selection:
    """The objects of a list or watch; an empty namespace selects all namespaces."""

    resource: Resource
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    @property
    def query(self) -> dict[str, str]:
        """The selectors as query parameters."""
        pairs = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in pairs.items() if value}


def drop_managed_fields(obj: JsonDict) -> None:
    """Remove the field managers from `obj`: they are never read, and most of an object's size.

    Source: Kubernetes v1.34, API concepts, "Field management" (`metadata.managedFields`).
    """
    (obj.get("metadata") or {}).pop("managedFields", None)


def select_labels(labels: Mapping[str, str]) -> str:
    """Return the label selector for objects with all of `labels`."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


class Deletion(Enum):
    """Result of a delete request."""

    NOT_FOUND = auto()
    CONFLICT = auto()
    """An object with another UID has the name, or this one was just changed; nothing was deleted."""
    STARTED = auto()
    """The object still exists: it has a finalizer, or is a pod within its grace period."""
    DONE = auto()


@dataclass(frozen=True)
class ListPage:
    """One page of a list: its objects, and the list's resourceVersion."""

    items: list[JsonDict]
    resource_version: str


def _attempted(verb: str, resource: Resource, namespace: str, name: str = "") -> str:
    place = f"{namespace}/{name}" if namespace and name else name or namespace or "all namespaces"
    return f"{verb} {resource.kind} {place}"


def _path(resource: Resource, namespace: str, name: str, *, attempted: str) -> str:
    """Return the URL path of one object.

    A name from a custom resource may be any string: empty it would address the whole collection,
    with a slash a different object.

    Raises:
        NotFoundError: the name is invalid, so no such object can exist.
    """
    parts = (namespace, name) if resource.namespaced else (name,)
    if not all(_SEGMENT.fullmatch(part) for part in parts):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid name", status=404, reason="NotFound")
    return resource.path(namespace, name)


class KubeClient:
    """Verbs over a transport, with bounded retries."""

    def __init__(self, transport: Transport, retry: Retry, *, urgent: bool = False) -> None:
        """Send through `transport` with retries by `retry`; `urgent` is set on every request."""
        self._transport = transport
        self._retry = retry
        self._urgent = urgent

    @property
    def transport(self) -> Transport:
        """The transport of the requests."""
        return self._transport

    def urgently(self) -> "KubeClient":
        """Return a client whose requests bypass the rate limit."""
        return KubeClient(self._transport, self._retry, urgent=True)

    async def _send(self, request: Request, attempted: str, *, again: bool) -> Response:
        """Send a request; `again` allows a retry after a lost response."""
        request = replace(request, urgent=self._urgent)

        async def once() -> Response:
            response = await self._transport.request(request)
            raise_for_status(
                response.status,
                response.body,
                attempted=attempted,
                retry_after=response.retry_after,
            )
            return response

        return await self._retry.run(once, after_lost_response=again)

    async def get(self, resource: Resource, namespace: str, name: str) -> JsonDict:
        """Return the object by a quorum read.

        Raises:
            NotFoundError: it does not exist.
            KubeError: any other error.
        """
        attempted = _attempted("get", resource, namespace, name)
        request = Request("GET", _path(resource, namespace, name, attempted=attempted))
        return _loads(await self._send(request, attempted, again=True))

    async def read(self, resource: Resource, namespace: str, name: str) -> JsonDict | None:
        """Return the object, or None where it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except NotFoundError:
            return None

    async def pages(self, selection: Selection) -> AsyncGenerator[ListPage, None]:
        """Yield the selected objects page by page, by a quorum read.

        Raises:
            GoneError: the continue token has expired; list again.
        """
        resource = selection.resource
        token = ""
        while True:
            query = selection.query | {"limit": str(_PAGE_SIZE)}
            if token:
                query["continue"] = token
            response = await self._send(
                Request("GET", resource.path(selection.namespace), query),
                _attempted("list", resource, selection.namespace),
                again=True,
            )
            body = _loads(response)
            items = body.get("items") or []
            for item in items:
                # Items of a list lack these fields; readers of objects expect them.
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
                drop_managed_fields(item)
            yield ListPage(items, body["metadata"].get("resourceVersion", ""))
            token = body["metadata"].get("continue", "")
            if not token:
                return

    async def list(self, selection: Selection) -> list[JsonDict]:
        """Return all selected objects."""
        return [item async for page in self.pages(selection) for item in page.items]

    async def create(self, resource: Resource, manifest: JsonDict) -> JsonDict:
        """Create the object and return it as stored.

        Raises:
            AlreadyExistsError: an object of that name exists, possibly created by an attempt
                whose response was lost.
        """
        meta = manifest["metadata"]
        namespace = meta.get("namespace", "")
        name = meta.get("name") or meta.get("generateName", "")
        response = await self._send(
            Request("POST", resource.path(namespace), body=json.dumps(manifest).encode()),
            _attempted("create", resource, namespace, name),
            # With a fixed name, a retry cannot create a second object.
            again="name" in meta,
        )
        return _loads(response)

    async def patch(
        self, resource: Resource, namespace: str, name: str, patch: JsonDict, *, again: bool = True
    ) -> JsonDict:
        """Apply a JSON merge patch and return the object as stored.

        Put `metadata.uid` and `metadata.resourceVersion` into `patch` to make them
        preconditions. `again=False` never repeats a patch whose response was lost.

        Raises:
            ConflictError: a precondition did not hold.
            NotFoundError: the object does not exist.
        """
        attempted = _attempted("patch", resource, namespace, name)
        path = _path(resource, namespace, name, attempted=attempted)
        request = Request("PATCH", path, body=json.dumps(patch).encode(), content_type=MERGE_PATCH)
        return _loads(await self._send(request, attempted, again=again))

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str = "") -> Deletion:
        """Request the object's deletion; a `uid` is a precondition, so an object recreated under the name stays."""
        options: JsonDict = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        attempted = _attempted("delete", resource, namespace, name)
        try:
            path = _path(resource, namespace, name, attempted=attempted)
            request = Request("DELETE", path, body=json.dumps(options).encode())
            response = _loads(await self._send(request, attempted, again=True))
        except NotFoundError:
            return Deletion.NOT_FOUND
        except ConflictError:
            if not uid:
                raise
            return Deletion.CONFLICT
        return _parse_deletion(response)

    async def pod_log(self, namespace: str, name: str, *, limit_bytes: int) -> str:
        """Return the end of the log of a pod's only container: whole lines, at most `limit_bytes`.

        The server counts `limitBytes` from the first of the requested lines and truncates the end:
        then fewer lines are requested.
        Source: Kubernetes v1.34, pkg/kubelet/kuberuntime/logs/logs.go.
        """
        path, lines = f"/api/v1/namespaces/{namespace}/pods/{name}/log", max(1, limit_bytes // _SHORT_LINE_BYTES)
        while True:
            request = Request("GET", path, {"tailLines": str(lines), "limitBytes": str(limit_bytes)})
            body = (await self._send(request, f"log of Pod {namespace}/{name}", again=True)).body
            if len(body) < limit_bytes or lines == 1:
                return body.decode(errors="replace")
            lines = max(1, body.count(b"\n") * 3 // 4)


def _parse_deletion(response: JsonDict) -> Deletion:
    """Return the result of a DELETE: the response is a Status, the remaining object or, for pods, the old one.

    Source: Kubernetes v1.34, apiserver/pkg/registry/generic/registry/store.go (Delete, finalizeDelete) and
    pkg/registry/core/pod (ReturnDeletedObject, CheckGracefulDelete).
    """
    meta = response.get("metadata") or {}
    remains = response.get("kind") != "Status" and (meta.get("finalizers") or meta.get("deletionGracePeriodSeconds"))
    return Deletion.STARTED if remains else Deletion.DONE


def _loads(response: Response) -> JsonDict:
    body: JsonDict = json.loads(response.body)
    drop_managed_fields(body)
    return body
