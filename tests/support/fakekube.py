"""An API server in memory, behind the project's own Transport: no HTTP, no controllers.

Equal to a real one in what the project relies on (`tests/contract` tests both): resourceVersions,
preconditions, finalizers, selectors, paging, watches with bookmarks and 410, pruning of custom
resources. It also collects garbage, at once. Simpler than the real one: namespaces need not
exist, a status is written like any field, and built-in kinds are not validated.
"""

import asyncio
import json
import marshal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from core.clock import Clock
from core.kube import resources
from core.kube.client import KubeClient
from core.kube.errors import UnreachableError, build_error
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import MERGE_PATCH, Request, Response, Retry
from tests.support.clock import LoopClock
from tests.support.fakeobjects import Filter, Rejection, build_filter, merge_patch, prune
from tests.support.fakestore import Store
from tests.support.fakewatch import Watches
from tests.support.objects import JsonDict

_RESOURCES: Final = tuple(resources.BY_KIND.values())
_BY_PATH: Final = {(each.group, each.version, each.plural): each for each in _RESOURCES}
_WITH_SPEC: Final = frozenset(
    {PERSISTENT_VOLUMES, PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS}
)
_LEFT_OUT_WHEN_EMPTY: Final = ("labels", "annotations", "finalizers", "ownerReferences")
_NOT_FOUND: Final = 404
_NAME_FORM: Final = "abcdefghijklmnopqrstuvwxyz0123456789-."


@dataclass
class _Fault:
    method: str
    path_part: str
    what: int | bytes | Response | Literal["lost", "lost-applied"]
    times: int
    message: str


@dataclass(frozen=True)
class _Target:
    resource: Resource
    namespace: str
    name: str
    subresource: str


@dataclass
class _Page:
    """The state behind a continue token."""

    version: int
    rest: list[JsonDict]


class FakeKube:
    """The server; every test has its own.

    Attributes:
        requests: all requests in order, including watches.
        logs: the logs of pods, by namespace and name.
        pages: what pods serve, by namespace, name with port, and path.
        unserved: kinds whose definitions are not installed.
        watches: the open watches; tests can break or silence them, or request bookmarks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        """Start empty; `clock` stamps objects, by default the running loop's."""
        self.requests: list[Request] = []
        self.logs: dict[tuple[str, str], str] = {}
        self.pages: dict[tuple[str, str, str], JsonDict] = {}
        self.unserved: set[Resource] = set()
        self._store = Store(clock or LoopClock())
        self.watches = Watches(self._store)
        self._faults: list[_Fault] = []
        self._pages: dict[str, _Page] = {}
        self._tokens = count(1)
        self._names = count(1)

    # -- what tests do -------------------------------------------------------------------------

    @property
    def client(self) -> KubeClient:
        """A client that waits between its tries by the running loop's time."""
        return KubeClient(self, Retry(LoopClock()))

    def put(self, obj: JsonDict) -> JsonDict:
        """Store `obj` unchanged, replacing an object of its name; return it as stored."""
        resource = _resource_of(obj)
        # The real server rejects these without a spec.
        if resource in _WITH_SPEC:
            obj = {"spec": {}} | obj
        meta = obj["metadata"]
        if resource.namespaced:
            meta = {"namespace": "default", **meta}
        before = self._store.find(resource, meta.get("namespace", ""), meta["name"])
        if before is None:
            stored = self._store.add(resource, obj | {"metadata": meta})
        else:
            kept = {key: before["metadata"][key] for key in ("uid", "creationTimestamp")}
            stored = self._store.replace(resource, before, obj | {"metadata": kept | meta})
        self.watches.announce()
        return _copy(stored)

    def objects(self, resource: Resource) -> list[JsonDict]:
        """Return the stored objects of one resource."""
        return [_copy(obj) for obj in self._store.all(resource)]

    def stored(self, resource: Resource) -> list[JsonDict]:
        """Return the objects of one resource themselves, for who changes none."""
        return self._store.all(resource)

    def fail_next(
        self,
        method: str,
        path_part: str,
        what: int | bytes | Response | Literal["lost", "lost-applied"],
        *,
        times: int = 1,
        message: str = "injected by the test",
    ) -> None:
        """Let the next matching requests fail.

        Args:
            method: an HTTP method, or `WATCH`; `GET` means no watches.
            path_part: a substring of the request's path.
            what: an HTTP status; `lost`: the request does not arrive; `lost-applied`: its
                response does not; bytes: the body of a response with status 200, or all lines of a
                watch, without effect; a response: it is the answer, without effect.
            times: the number of requests.
            message: the text that an HTTP status comes with.
        """
        self._faults.append(_Fault(method, path_part, what, times, message))

    def fulfill(self) -> None:
        """Drop the faults that were not hit yet."""
        self._faults.clear()

    def compact(self) -> None:
        """Drop all history: older watches, and pages that were not requested yet, get a 410."""
        self._store.compact()
        self._pages.clear()

    # -- Transport -----------------------------------------------------------------------------

    async def request(self, request: Request) -> Response:
        """Respond to one request."""
        await asyncio.sleep(0)
        self.requests.append(request)
        fault, message = self._take_fault(request.method, request.path)
        if fault == "lost":
            raise UnreachableError(f"{request.method} {request.path}: the request was lost")
        if isinstance(fault, bytes):
            return Response(200, fault)
        if isinstance(fault, Response):
            return fault
        if isinstance(fault, int):
            return _reject(Rejection(fault, "NotFound" if fault == _NOT_FOUND else "Injected", message))
        try:
            response = self._answer(request)
        except Rejection as rejection:
            response = _reject(rejection)
        finally:
            self.watches.announce()
        if fault == "lost-applied":
            raise UnreachableError(f"{request.method} {request.path}: the response was lost")
        return response

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch."""
        await asyncio.sleep(0)
        self.requests.append(request)
        fault, message = self._take_fault("WATCH", request.path)
        if isinstance(fault, str):
            raise UnreachableError(f"watch {request.path}: the connection was lost")
        if isinstance(fault, bytes):
            yield _lines_of(fault)
            return
        if isinstance(fault, Response):
            raise build_error(fault.status, fault.body, attempted=f"watch {request.path}")
        if fault is not None:
            raise build_error(fault, message.encode(), attempted=f"watch {request.path}")
        try:
            target = self._parse_path(request.path)
            chosen = _chosen(target, request)
        except Rejection as rejection:
            body = _reject(rejection).body
            raise build_error(rejection.status, body, attempted=f"watch {request.path}") from rejection
        version = request.query.get("resourceVersion") or "0"
        if not version.isdecimal():
            # Source: kubernetes/kubernetes#139485.
            raise build_error(500, b"resourceVersion: Invalid value", attempted=f"watch {request.path}")
        async with self.watches.open(request, target.resource, chosen, after=int(version)) as lines:
            yield lines

    async def close(self) -> None:
        """Nothing is held."""

    # -- requests ------------------------------------------------------------------------------

    def _answer(self, request: Request) -> Response:
        if request.path.startswith("/apis") and request.path.count("/") in {1, 3}:
            return _respond(self._discover(request.path))
        target = self._parse_path(request.path)
        body = json.loads(request.body) if request.body else {}
        if target.subresource == "log":
            return self._log(target, request)
        if target.subresource == "proxy":
            page = self.pages.get((target.namespace, target.name, request.path.partition("/proxy")[2]))
            return _respond(page) if page else Response(404, b"404: Not Found")
        match request.method:
            case "GET" if target.name:
                return _respond(self._require(target))
            case "GET":
                return _respond(self._list(target, request))
            case "POST" if not target.name:
                dry_run = request.query.get("dryRun") == "All"
                return _respond(self._create(target, body, dry_run=dry_run), 201)
            case "PATCH" if target.name and request.content_type == MERGE_PATCH:
                return _respond(self._patch(target, body))
            case "DELETE" if target.name:
                return _respond(self._delete(target, body))
        raise Rejection(405, "MethodNotAllowed", f"{request.method} {request.path} is not served")

    def _parse_path(self, path: str) -> _Target:
        parts = path.strip("/").split("/")
        group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = [*rest, "", ""][:3]
        resource = _BY_PATH.get((group, version, plural))
        if resource is None or resource in self.unserved:
            raise Rejection(404, "", "404 page not found\n")
        return _Target(resource, namespace, name, subresource)

    def _served(self) -> list[Resource]:
        return [resource for resource in _RESOURCES if resource not in self.unserved]

    def _discover(self, path: str) -> JsonDict:
        """Return the groups that are served, or the resources of one version of a group."""
        if path == "/apis":
            versions = {each.api_version for each in self._served() if each.group}
            return {"kind": "APIGroupList", "groups": [{"versions": [{"groupVersion": each}]} for each in versions]}
        found = [{"name": each.plural} for each in self._served() if path == f"/apis/{each.api_version}"]
        if not found:
            raise Rejection(404, "", "404 page not found\n")
        return {"kind": "APIResourceList", "resources": found}

    def _require(self, target: _Target) -> JsonDict:
        obj = self._store.find(target.resource, target.namespace, target.name)
        if obj is None:
            raise Rejection(404, "NotFound", f'{target.resource.plural} "{target.name}" not found')
        return obj

    def _list(self, target: _Target, request: Request) -> JsonDict:
        token = request.query.get("continue", "")
        if token:
            page = self._pages.pop(token, None)
            if page is None:
                raise Rejection(410, "Expired", "The provided continue parameter is too old")
        else:
            chosen = _chosen(target, request)
            page = _Page(self._store.version, [obj for obj in self._store.all(target.resource) if chosen(obj)])
        limit = int(request.query.get("limit", "0")) or len(page.rest)
        meta = {"resourceVersion": str(page.version)}
        if len(page.rest) > limit:
            meta["continue"] = f"token-{next(self._tokens)}"
            self._pages[meta["continue"]] = _Page(page.version, page.rest[limit:])
        kind = target.resource.kind
        return {
            "apiVersion": target.resource.api_version,
            "kind": f"{kind}List",
            "metadata": meta,
            "items": page.rest[:limit],
        }

    def _create(self, target: _Target, body: JsonDict, *, dry_run: bool) -> JsonDict:
        resource, meta = target.resource, dict(body.get("metadata") or {})
        if resource.namespaced and meta.setdefault("namespace", target.namespace) != target.namespace:
            raise Rejection(
                400, "BadRequest", "the namespace of the object does not match the namespace of the request"
            )
        if meta.get("generateName") and not meta.get("name"):
            meta["name"] = f"{meta['generateName']}{next(self._names):05d}"
        name = meta.get("name", "")
        if not name or set(name) - set(_NAME_FORM):
            raise Rejection(422, "Invalid", f'{resource.kind} "{name}" is invalid: metadata.name')
        if meta.get("resourceVersion"):
            raise Rejection(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if self._store.find(resource, target.namespace, name) is not None:
            raise Rejection(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
        for key in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"):
            meta.pop(key, None)
        typed = {"apiVersion": resource.api_version, "kind": resource.kind}
        created = prune(body | typed | {"metadata": meta})
        return created if dry_run else self._store.add(resource, created)

    def _patch(self, target: _Target, patch: JsonDict) -> JsonDict:
        before = self._require(target)
        was, expected = before["metadata"], patch.get("metadata") or {}
        shown = f'{target.resource.plural} "{target.name}"'
        if expected.get("resourceVersion", was["resourceVersion"]) != was["resourceVersion"]:
            raise Rejection(409, "Conflict", f"{shown}: the object has been modified")
        if expected.get("uid", was["uid"]) != was["uid"]:
            raise Rejection(422, "Invalid", f"{shown} is invalid: field is immutable", field="metadata.uid")
        after = merge_patch(before, patch)
        # Where the patch has no metadata, it is still the object in `before`.
        meta = after["metadata"] = dict(after["metadata"])
        for key in ("name", "namespace"):
            if meta.get(key) != was.get(key):
                raise Rejection(400, "BadRequest", f"the {key} of the object does not match the request")
        meta |= {key: was[key] for key in ("uid", "resourceVersion", "creationTimestamp")}
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds"):
            meta.pop(key, None)
            meta |= {key: was[key]} if key in was else {}
        for key in [key for key in _LEFT_OUT_WHEN_EMPTY if key in meta and not meta[key]]:
            del meta[key]
        if "deletionTimestamp" in was and set(meta.get("finalizers", [])) - set(was.get("finalizers", [])):
            raise Rejection(422, "Invalid", "no new finalizers can be added if the object is being deleted")
        return self._store.replace(target.resource, before, prune(after))

    def _delete(self, target: _Target, options: JsonDict) -> JsonDict:
        obj = self._require(target)
        for key, wanted in (options.get("preconditions") or {}).items():
            if wanted != obj["metadata"][key]:
                message = f"Precondition failed: {key} in precondition: {wanted}, in object: {obj['metadata'][key]}"
                raise Rejection(409, "Conflict", message)
        return self._store.delete(target.resource, obj)

    def _log(self, target: _Target, request: Request) -> Response:
        self._require(target)
        lines = self.logs.get((target.namespace, target.name), "").encode().splitlines(keepends=True)
        tail = lines[-int(request.query.get("tailLines", len(lines) or 1)) :]
        return Response(200, b"".join(tail)[: int(request.query.get("limitBytes", -1))])

    def _take_fault(self, method: str, path: str) -> tuple[int | bytes | Response | str | None, str]:
        for fault in self._faults:
            if fault.method == method and fault.path_part in path:
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return fault.what, fault.message
        return None, ""


async def _lines_of(body: bytes) -> AsyncIterator[bytes]:
    for line in body.splitlines():
        yield line


def _chosen(target: _Target, request: Request) -> Filter:
    query, namespace = request.query, target.namespace
    chosen = build_filter(target.resource.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
    return lambda obj: namespace in {"", obj["metadata"].get("namespace", "")} and chosen(obj)


def _resource_of(obj: JsonDict) -> Resource:
    for resource in _RESOURCES:
        if (resource.api_version, resource.kind) == (obj["apiVersion"], obj["kind"]):
            return resource
    raise ValueError(f"{obj['apiVersion']} {obj['kind']} is not served")


def _respond(obj: JsonDict, status: int = 200) -> Response:
    return Response(status, json.dumps(obj).encode())


def _reject(rejection: Rejection) -> Response:
    if not rejection.reason:
        return Response(rejection.status, str(rejection).encode())
    causes = [{"field": rejection.field}] if rejection.field else []
    status = {"kind": "Status", "message": str(rejection), "reason": rejection.reason, "code": rejection.status}
    return _respond(status | {"details": {"causes": causes}}, rejection.status)


def _copy(obj: JsonDict) -> JsonDict:
    # Tests that wait look at objects all the time: this takes a third of what JSON takes.
    copy: JsonDict = marshal.loads(marshal.dumps(obj))
    return copy
