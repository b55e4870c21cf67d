"""Client of the API server for objects and lists; watches are in `core.kube.watch`.

Turns verbs into requests, with preconditions, paging and retries. Objects are JSON dicts.
"""

import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Required, TypedDict, TypeVar

import msgspec

from core.kube.decode import parse_json
from core.kube.discovery import is_unserved
from core.kube.errors import (
    ConflictError,
    MalformedObjectError,
    NotFoundError,
    NotServedError,
    UnknownPathError,
    UnreachableError,
    raise_for_status,
)
from core.kube.forms import check_form
from core.kube.resources import PODS, Resource
from core.kube.retry import Retry
from core.kube.transport import MERGE_PATCH, Request, Response, Transport
from core.models.base import JsonDict, explain_invalid

__all__ = ["Deletion", "KubeClient", "ListPage", "Selection", "drop_managed_fields", "select_labels"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAGE_SIZE = 500
"""Number of objects per page of a list, as in client-go."""


_SHOWN_BYTES: Final = 100
"""The beginning of an answer that is shown if it is not JSON."""

_PAGE_SECONDS: Final = 10.0
"""A pod behind a network policy does not answer at all, and a user is waiting."""

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
    meta = obj.get("metadata")
    if isinstance(meta, dict):
        meta.pop("managedFields", None)


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


_ListMeta = TypedDict("_ListMeta", {"resourceVersion": str, "continue": str}, total=False)


class _List(TypedDict, total=False):
    metadata: Required[_ListMeta]
    items: list[object]


@dataclass(frozen=True)
class ListPage:
    """One page of a list: its objects, those that are malformed, and the list's resourceVersion."""

    items: list[JsonDict]
    malformed: list[JsonDict]
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


def _collection_path(selection: Selection, attempted: str) -> str:
    """Return the URL path of a collection.

    Raises:
        NotFoundError: the namespace, which may come from a custom resource, is invalid: there is none of that name.
    """
    if selection.namespace and not _SEGMENT.fullmatch(selection.namespace):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid namespace", status=404, reason="NotFound")
    return selection.resource.path(selection.namespace)


class KubeClient:
    """Verbs over a transport, with bounded retries."""

    def __init__(
        self,
        transport: Transport,
        retry: Retry,
        *,
        urgent: bool = False,
        on_skipped: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Send through `transport` with retries by `retry`; `urgent` is set on every request.

        `on_skipped` is called with the kind of each object that is skipped because it cannot be read.
        """
        self._transport = transport
        self._retry = retry
        self._urgent = urgent
        self._on_skipped = on_skipped

    @property
    def transport(self) -> Transport:
        """The transport of the requests."""
        return self._transport

    def urgently(self) -> "KubeClient":
        """Return a client whose requests bypass the rate limit."""
        return KubeClient(self._transport, self._retry, urgent=True, on_skipped=self._on_skipped)

    def skip(self, resource: Resource, error: MalformedObjectError) -> None:
        """Log and count an object that a list or watch skips."""
        _log.warning("object skipped: %s", error)
        self.count_skipped(resource)

    def _checked(self, resource: Resource, obj: JsonDict) -> JsonDict:
        """Return `obj`, which was read or written alone.

        Raises:
            MalformedObjectError: it does not have the form of its kind.
        """
        drop_managed_fields(obj)
        try:
            check_form(resource, obj)
        except MalformedObjectError:
            self.count_skipped(resource)
            raise
        return obj

    def count_skipped(self, resource: Resource) -> None:
        """Count an object that could not be handled."""
        self._on_skipped(resource.kind)

    async def _send(
        self, resource: Resource, request: Request, attempted: str, parse: Callable[[Response, str], _T], *, again: bool
    ) -> _T:
        """Send a request and return its response as `parse` reads it; `again` allows a retry after a lost response.

        Raises:
            NotServedError: the API server does not serve `resource`.
            UnknownPathError: the 404 is not the API server's own, and `resource` may be served.
        """
        request = replace(request, urgent=self._urgent)

        async def once() -> _T:
            response = await self._transport.request(request)
            try:
                raise_for_status(
                    response.status,
                    response.body,
                    attempted=attempted,
                    retry_after=response.retry_after,
                )
            except UnknownPathError as e:
                if await is_unserved(self._transport, resource):
                    message = f"{attempted}: {resource.plural}.{resource.group}/{resource.version} is not served"
                    raise NotServedError(message, status=e.status) from e
                raise
            return parse(response, attempted)

        return await self._retry.run(once, after_lost_response=again)

    async def get(self, resource: Resource, namespace: str, name: str) -> JsonDict:
        """Return the object by a quorum read.

        Raises:
            NotFoundError: it does not exist.
            MalformedObjectError: it does not have the form of its kind.
            KubeError: any other error.
        """
        attempted = _attempted("get", resource, namespace, name)
        request = Request("GET", _path(resource, namespace, name, attempted=attempted))
        return self._checked(resource, await self._send(resource, request, attempted, _parse_object, again=True))

    async def read(self, resource: Resource, namespace: str, name: str) -> JsonDict | None:
        """Return the object, or None where it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except NotFoundError:
            return None

    async def pages(self, selection: Selection) -> AsyncGenerator[ListPage, None]:
        """Yield the selected objects page by page, by a quorum read; malformed ones are logged and set apart.

        Raises:
            GoneError: the continue token has expired; list again.
        """
        resource, token = selection.resource, ""
        attempted = _attempted("list", resource, selection.namespace)
        path = _collection_path(selection, attempted)
        while True:
            query = selection.query | {"limit": str(_PAGE_SIZE)}
            if token:
                query["continue"] = token
            body = await self._send(
                resource,
                Request("GET", path, query, many=True),
                attempted,
                _parse_list,
                again=True,
            )
            yield self._sort(resource, body)
            token = body["metadata"].get("continue", "")
            if not token:
                return

    def _sort(self, resource: Resource, body: JsonDict) -> ListPage:
        """Return a page with those of its objects apart that are malformed."""
        page = ListPage([], [], body["metadata"].get("resourceVersion", ""))
        for item in body.get("items", []):
            # Items of a list lack these fields; readers of objects expect them.
            obj = {"apiVersion": resource.api_version, "kind": resource.kind} | (item if isinstance(item, dict) else {})
            drop_managed_fields(obj)
            try:
                check_form(resource, obj)
            except MalformedObjectError as e:
                self.skip(resource, e)
                page.malformed.append(obj)
            else:
                page.items.append(obj)
        return page

    async def list(self, selection: Selection) -> list[JsonDict]:
        """Return all selected objects but those that are malformed."""
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
        created = await self._send(
            resource,
            Request("POST", resource.path(namespace), body=json.dumps(manifest).encode()),
            _attempted("create", resource, namespace, name),
            _parse_object,
            # With a fixed name, a retry cannot create a second object.
            again="name" in meta,
        )
        return self._checked(resource, created)

    async def try_create(self, resource: Resource, manifest: JsonDict) -> None:
        """Return if the API server would create the object now: it is validated and admitted, and not stored.

        Raises:
            KubeError: it would be rejected, by validation, a quota or a webhook.
        """
        meta = manifest["metadata"]
        request = Request(
            "POST",
            resource.path(meta.get("namespace", "")),
            {"dryRun": "All"},
            json.dumps(manifest).encode(),
        )
        attempted = _attempted("create (dry run)", resource, meta.get("namespace", ""), meta["name"])
        # What is not stored has no resourceVersion.
        await self._send(resource, request, attempted, _parse_object, again=True)

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
        return self._checked(resource, await self._send(resource, request, attempted, _parse_object, again=again))

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", resource_version: str = ""
    ) -> Deletion:
        """Request the object's deletion; `uid` and `resource_version` are preconditions.

        With a `uid`, an object recreated under the name stays; with both, one that was changed stays too.
        """
        options: JsonDict = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
            if resource_version:
                options["preconditions"]["resourceVersion"] = resource_version
        attempted = _attempted("delete", resource, namespace, name)
        try:
            path = _path(resource, namespace, name, attempted=attempted)
            request = Request("DELETE", path, body=json.dumps(options).encode())
            response = await self._send(resource, request, attempted, _parse_object, again=True)
        except NotFoundError:
            return Deletion.NOT_FOUND
        except ConflictError:
            if not uid:
                raise
            return Deletion.CONFLICT
        if response.get("kind") == "Status":
            return Deletion.DONE
        return _parse_deletion(response)

    async def pod_log(self, namespace: str, name: str, *, container: str, limit_bytes: int) -> str:
        """Return the end of the log of a container: whole lines, at most `limit_bytes`.

        `container` may be empty for a pod that has only one.

        The server counts `limitBytes` from the first of the requested lines and truncates the end:
        then fewer lines are requested.
        Source: Kubernetes v1.34, pkg/kubelet/kuberuntime/logs/logs.go.
        """
        path, lines = f"/api/v1/namespaces/{namespace}/pods/{name}/log", max(1, limit_bytes // _SHORT_LINE_BYTES)
        while True:
            query = {"tailLines": str(lines), "limitBytes": str(limit_bytes)}
            request = Request("GET", path, query | ({"container": container} if container else {}))
            body = await self._send(PODS, request, f"log of Pod {namespace}/{name}", _body, again=True)
            if len(body) < limit_bytes or lines == 1:
                return body.decode(errors="replace")
            lines = max(1, body.count(b"\n") * 3 // 4)

    async def pod_page(self, namespace: str, name: str, *, port: int, path: str) -> JsonDict:
        """Return the JSON object that a pod serves over HTTP on `port` at `path`, through the API server's proxy.

        Source: Kubernetes v1.34, API reference, connect GET requests to proxy of Pod.
        """
        url = PODS.path(namespace, f"{name}:{port}", subresource="proxy") + path
        request = Request("GET", url, timeout_seconds=_PAGE_SECONDS)
        attempted = f"get {path} of Pod {namespace}/{name} on port {port}"
        return await self._send(PODS, request, attempted, _parse_object, again=True)


def _parse_deletion(response: JsonDict) -> Deletion:
    """Return the result of a DELETE that answered with an object: the remaining one or, for pods, the old one.

    Nothing else of that object is read, so its form is not checked: a pod that is deleted without a grace
    period may come without a resourceVersion.
    Source: Kubernetes v1.34, apiserver/pkg/registry/generic/registry/store.go (Delete, finalizeDelete) and
    pkg/registry/core/pod (ReturnDeletedObject, CheckGracefulDelete).
    """
    meta = response.get("metadata")
    if not isinstance(meta, dict):
        return Deletion.STARTED
    remains = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
    return Deletion.STARTED if remains else Deletion.DONE


def _body(response: Response, _: str) -> bytes:
    return response.body


def _parse_object(response: Response, attempted: str) -> JsonDict:
    """Return the JSON object in `response`.

    A proxy, or a server that is starting, may answer with a page of its own and status 200: that is no
    answer of the API server, and the request is retried as if there were none.

    Raises:
        UnreachableError: it holds no JSON object.
    """
    body = response.body
    try:
        parsed = parse_json(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        # What begins like an object may be part of a Secret.
        shown = f"{len(body)} bytes" if body.lstrip()[:1] == b"{" else repr(body[:_SHOWN_BYTES])
        raise UnreachableError(f"{attempted}: {response.status}: the answer is not a JSON object: {shown}")
    return parsed


def _parse_list(response: Response, attempted: str) -> JsonDict:
    """Return the list in `response`, as JSON dict.

    Raises:
        UnreachableError: it holds no list of objects.
    """
    body = _parse_object(response, attempted)
    try:
        msgspec.convert(body, _List)
    except (ValueError, RecursionError) as e:
        raise UnreachableError(f"{attempted}: the answer is not a list: {explain_invalid(e)}") from e
    return body
