"""Client of the API server for objects and lists; watches are in `core.kube.watch`.

Each request raises a KubeError if it is rejected: NotFoundError if the object does not exist, ConflictError if a
precondition did not hold, MalformedObjectError if what was read does not have the form of its kind, and GoneError if
the continue token of a list has expired: list again. Objects are the dictionaries of `core.kube.types`.
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from core.kube import errors
from core.kube.resources import PODS, Resource, Selection, check_form, collection_path, object_path
from core.kube.transport import (
    APPLY_PATCH,
    MERGE_PATCH,
    Deletion,
    ListBody,
    Request,
    Response,
    Retry,
    Transport,
    is_unserved,
    parse_body,
    parse_deletion,
    parse_list,
    parse_object,
    parse_raw_list,
)
from core.kube.types import Manifest, ObjectT
from core.models.base import JsonDict, ObjectMeta

__all__ = ["Deletion", "KubeClient", "Selection"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAGE_SIZE = 500
"""Number of objects per page of a list, as in client-go."""

_RAW_PAGE_SIZE: Final = 2000
"""Of objects that are not decoded here: a page of transfers has 5 MiB."""

_WRITE_SECONDS: Final = 65.0
"""Webhooks take up to 30 seconds each, also those whose failure is ignored; the API server ends a write after 60.

Source: Kubernetes v1.34, RequestTimeout in staging/src/k8s.io/apiserver/pkg/server/config.go.
"""

_PAGE_SECONDS: Final = 10.0
"""A pod behind a network policy does not answer at all, and a user is waiting."""

_SHORT_LINE_BYTES: Final = 50
"""Average lines of a log are rarely shorter than this."""


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


def is_patched(stored: Mapping[str, Any], patch: Manifest) -> bool:
    """Return whether the merge patch would change nothing in `stored`."""
    return all(
        is_patched(stored.get(key) or {}, value) if isinstance(value, dict) else stored.get(key) == value
        for key, value in patch.items()
    )


@dataclass(frozen=True)
class ListPage(Generic[ObjectT]):
    """One page of a list: its objects, those that are malformed, and the list's resourceVersion."""

    items: list[ObjectT]
    malformed: list[JsonDict]
    resource_version: str


def _attempted(verb: str, resource: Resource, namespace: str, name: str = "") -> str:
    place = f"{namespace}/{name}" if namespace and name else name or namespace or "all namespaces"
    return f"{verb} {resource.kind} {place}"


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
        self.transport = transport
        self._retry = retry
        self._urgent = urgent
        self._on_skipped = on_skipped

    def urgently(self) -> "KubeClient":
        """Return a client whose requests bypass the rate limit."""
        return KubeClient(self.transport, self._retry, urgent=True, on_skipped=self._on_skipped)

    def patiently(self) -> "KubeClient":
        """Return a client that waits for minutes until the API server answers again: for loops that wait anyway."""
        return KubeClient(self.transport, self._retry.patient, urgent=self._urgent, on_skipped=self._on_skipped)

    def skip(self, resource: Resource, error: errors.MalformedObjectError) -> None:
        """Log and count an object that a list or watch skips."""
        _log.warning("object skipped: %s", error)
        self.count_skipped(resource)

    def _checked(self, resource: Resource[ObjectT], obj: JsonDict) -> ObjectT:
        """Return `obj`, which was read or written alone; MalformedObjectError: it has not the form of its kind."""
        drop_managed_fields(obj)
        try:
            check_form(resource, obj)
        except errors.MalformedObjectError:
            self.count_skipped(resource)
            raise
        return cast("ObjectT", obj)

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
        seconds = request.timeout_seconds if request.method == "GET" else _WRITE_SECONDS
        request = replace(request, urgent=self._urgent, timeout_seconds=seconds)

        async def once() -> _T:
            response = await self.transport.request(request)
            try:
                errors.raise_for_status(
                    response.status, response.body, attempted=attempted, retry_after=response.retry_after
                )
            except errors.UnknownPathError as e:
                if await is_unserved(self.transport, resource):
                    message = f"{attempted}: {resource.full_name}/{resource.version} is not served"
                    raise errors.NotServedError(message, status=e.status) from e
                raise
            return parse(response, attempted)

        return await self._retry.run(once, after_lost_response=again)

    async def _ask(self, verb: str, request: Request, resource: Resource, namespace: str, name: str) -> JsonDict:
        """Return the answer to a request, which has no path yet, about one object."""
        attempted = _attempted(verb, resource, namespace, name)
        request = replace(request, path=object_path(resource, namespace, name, attempted=attempted))
        return await self._send(resource, request, attempted, parse_object, again=True)

    async def get(self, resource: Resource[ObjectT], namespace: str, name: str) -> ObjectT:
        """Return the object by a quorum read."""
        return self._checked(resource, await self._ask("get", Request("GET"), resource, namespace, name))

    async def read_stamped(
        self, resource: Resource[ObjectT], namespace: str, name: str
    ) -> tuple[ObjectT | None, str | None]:
        """Return the object, or None, with the time of its last change by the API server's clock; None: not known.

        Source: Kubernetes v1.34, API concepts, "Field management": the time of a manager's entry in
        `metadata.managedFields` is of its last change of a value.
        """
        try:
            obj = await self._ask("get", Request("GET"), resource, namespace, name)
        except errors.NotFoundError:
            return None, None
        managers = (obj.get("metadata") or {}).get("managedFields") or []
        stamps = [str(one.get("time") or "") for one in managers if isinstance(one, dict)]
        return self._checked(resource, obj), max(stamps, default="") or None

    async def read(self, resource: Resource[ObjectT], namespace: str, name: str) -> ObjectT | None:
        """Return the object, or None where it does not exist."""
        try:
            return await self.get(resource, namespace, name)
        except errors.NotFoundError:
            return None

    async def pages(self, selection: Selection[ObjectT]) -> AsyncGenerator[ListPage[ObjectT], None]:
        """Yield the selected objects page by page, by a quorum read; malformed ones are logged and set apart."""
        async with aclosing(self._bodies(selection, _PAGE_SIZE, parse_list)) as bodies:
            async for body in bodies:
                yield self._sort(selection.resource, body)

    async def raw_pages(self, selection: Selection) -> AsyncGenerator[list[msgspec.Raw], None]:
        """Yield the selected objects page by page as JSON texts, for readers of few fields of many objects.

        Their form is not checked: the reader decodes each with a model of its own.
        """
        async with aclosing(self._bodies(selection, _RAW_PAGE_SIZE, parse_raw_list)) as bodies:
            async for body in bodies:
                yield body.items

    async def _bodies(
        self, selection: Selection, page_size: int, parse: Callable[[Response, str], ListBody[_T]]
    ) -> AsyncGenerator[ListBody[_T], None]:
        resource, query = selection.resource, selection.query | {"limit": str(page_size)}
        attempted = _attempted("list", resource, selection.namespace)
        path = collection_path(resource, selection.namespace, attempted=attempted)
        while True:
            body = await self._send(resource, Request("GET", path, query, many=True), attempted, parse, again=True)
            yield body
            if not body.metadata.token:
                return
            query = query | {"continue": body.metadata.token}

    def _sort(self, resource: Resource[ObjectT], body: ListBody[Any]) -> ListPage[ObjectT]:
        """Return a page with its malformed objects apart."""
        page = ListPage[ObjectT]([], [], body.metadata.version)
        for item in body.items:
            # Items of a list lack these fields; readers of objects expect them.
            obj = {"apiVersion": resource.api_version, "kind": resource.kind} | (item if isinstance(item, dict) else {})
            try:
                page.items.append(self._checked(resource, obj))
            except errors.MalformedObjectError as e:
                _log.warning("object skipped: %s", e)
                page.malformed.append(obj)
        return page

    async def list(self, selection: Selection[ObjectT]) -> list[ObjectT]:
        """Return all selected objects but those that are malformed."""
        return [item async for page in self.pages(selection) for item in page.items]

    async def create(self, resource: Resource[ObjectT], manifest: Manifest) -> ObjectT:
        """Create the object and return it as stored.

        Raises:
            AlreadyExistsError: one of that name exists, possibly created by an attempt whose response was lost.
        """
        return self._checked(resource, await self._create("create", resource, manifest, {}))

    async def try_create(self, resource: Resource, manifest: Manifest) -> None:
        """Return if the API server would create the object now: it is validated and admitted, and not stored."""
        # What is not stored has no resourceVersion.
        await self._create("create (dry run)", resource, manifest, {"dryRun": "All"})

    async def _create(self, verb: str, resource: Resource, manifest: Manifest, query: Mapping[str, str]) -> JsonDict:
        meta = manifest["metadata"]
        namespace, name = meta.get("namespace", ""), meta.get("name") or meta.get("generateName", "")
        request = Request("POST", resource.path(namespace), query, json.dumps(manifest).encode())
        attempted = _attempted(verb, resource, namespace, name)
        # With a fixed name, a retry cannot create a second object.
        return await self._send(resource, request, attempted, parse_object, again="name" in meta)

    async def patch(
        self,
        resource: Resource[ObjectT],
        namespace: str,
        name: str,
        patch: Manifest,
        *,
        again: bool = True,
        subresource: str = "",
    ) -> ObjectT:
        """Apply a JSON merge patch to an object or its subresource, and return the object as stored.

        `metadata.uid` and `metadata.resourceVersion` in `patch` are preconditions. `again=False` never repeats a patch
        whose response was lost.
        """
        attempted = _attempted("patch", resource, namespace, name)
        path = object_path(resource, namespace, name, attempted=attempted, subresource=subresource)
        request = Request("PATCH", path, body=json.dumps(patch).encode(), content_type=MERGE_PATCH)
        return self._checked(resource, await self._send(resource, request, attempted, parse_object, again=again))

    async def patch_if_unchanged(
        self, resource: Resource[ObjectT], seen: ObjectT | ObjectMeta, change: Manifest
    ) -> ObjectT:
        """Apply a JSON merge patch to the object `seen`, or with these metadata; return it as stored.

        A ConflictError means that it was changed or replaced since.
        """
        if isinstance(seen, ObjectMeta):
            namespace, name, uid, version = seen.namespace, seen.name, seen.uid, seen.resource_version
        else:
            meta = seen["metadata"]
            namespace, name = meta.get("namespace", ""), meta["name"]
            uid, version = meta["uid"], meta["resourceVersion"]
        metadata = change.get("metadata", {}) | {"uid": uid, "resourceVersion": version}
        return await self.patch(resource, namespace, name, change | {"metadata": metadata})

    async def apply(
        self,
        resource: Resource[ObjectT],
        manifest: Manifest,
        *,
        manager: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> ObjectT:
        """Create or update the object by server-side apply, and return it as stored.

        `force` takes over fields that other managers set; with `dry_run` nothing is stored. An object that already is
        as applied stays unchanged. What the manager applied before and `manifest` lacks is removed.

        Raises:
            ApplyConflictError: another manager has set some of its fields to other values.
            InvalidError: the manifest is invalid, or has a field that the API server does not know.

        Source: Kubernetes v1.34, "Server-Side Apply".
        """
        meta, verb = manifest["metadata"], "apply (dry run)" if dry_run else "apply"
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        request = Request("PATCH", query=query, body=json.dumps(manifest).encode(), content_type=APPLY_PATCH)
        applied = await self._ask(verb, request, resource, meta.get("namespace", ""), meta["name"])
        # What was not created has no resourceVersion.
        return cast("ObjectT", applied) if dry_run else self._checked(resource, applied)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", resource_version: str = ""
    ) -> Deletion:
        """Request the object's deletion; `uid` and `resource_version` are preconditions.

        With a `uid`, an object recreated under the name stays; with both, one that was changed stays too.
        """
        preconditions = {"uid": uid, "resourceVersion": resource_version if uid else ""}
        given = {key: value for key, value in preconditions.items() if value}
        return await self._delete(resource, namespace, name, {"preconditions": given} if given else {})

    async def force_delete(self, resource: Resource, namespace: str, name: str, *, uid: str) -> Deletion:
        """Remove the object with that UID at once: a pod although it may still run on a node that is unreachable."""
        return await self._delete(resource, namespace, name, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})

    async def _delete(self, resource: Resource, namespace: str, name: str, options: JsonDict) -> Deletion:
        request = Request("DELETE", body=json.dumps({"propagationPolicy": "Background", **options}).encode())
        try:
            response = await self._ask("delete", request, resource, namespace, name)
        except errors.NotFoundError:
            return Deletion.NOT_FOUND
        except errors.ConflictError:
            if not options.get("preconditions"):
                raise
            return Deletion.CONFLICT
        if response.get("kind") == "Status":
            return Deletion.DONE
        return parse_deletion(response)

    async def pod_log(self, namespace: str, name: str, *, container: str, limit_bytes: int) -> str:
        """Return the end of the log of a container: whole lines, at most `limit_bytes`.

        `container` may be empty for a pod that has only one. The server counts `limitBytes` from the first requested
        line and cuts the end off: then fewer lines are requested.
        Source: Kubernetes v1.34, pkg/kubelet/kuberuntime/logs/logs.go.
        """
        path, lines = f"/api/v1/namespaces/{namespace}/pods/{name}/log", max(1, limit_bytes // _SHORT_LINE_BYTES)
        while True:
            query = {"tailLines": str(lines), "limitBytes": str(limit_bytes)}
            request = Request("GET", path, query | ({"container": container} if container else {}))
            body = await self._send(PODS, request, f"log of Pod {namespace}/{name}", parse_body, again=True)
            if len(body) < limit_bytes or lines == 1:
                return body.decode(errors="replace")
            lines = max(1, body.count(b"\n") * 3 // 4)

    async def pod_page(self, namespace: str, name: str, *, port: int, path: str) -> JsonDict:
        """Return the JSON object that a pod serves over HTTP on `port` at `path`, through the API server's proxy.

        Source: Kubernetes v1.34, API reference, connect GET requests to proxy of Pod.
        """
        return await self._send(*_page_request(namespace, name, port, path), parse_object, again=True)

    async def pod_text(self, namespace: str, name: str, *, port: int, path: str) -> str:
        """Return the text that a pod serves, like `pod_page`."""
        body = await self._send(*_page_request(namespace, name, port, path), parse_body, again=True)
        return body.decode(errors="replace")


def _page_request(namespace: str, name: str, port: int, path: str) -> tuple[Resource, Request, str]:
    url = PODS.path(namespace, f"{name}:{port}", subresource="proxy") + path
    request = Request("GET", url, timeout_seconds=_PAGE_SECONDS)
    return PODS, request, f"get {path} of Pod {namespace}/{name} on port {port}"
