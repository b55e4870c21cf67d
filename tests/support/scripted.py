"""An API server that is one function, for tests with a few requests and no storage."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import Resource
from core.kube.transport import Request, Response, Retry
from tests.support.objects import JsonDict


class ScriptedTransport:
    """Responds to every request with the result of `script`, which may raise."""

    def __init__(self, script: Callable[[Request], Response]) -> None:
        self._script = script

    async def request(self, request: Request) -> Response:
        return self._script(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def scripted_client(script: Callable[[Request], Response]) -> KubeClient:
    """Return a client over `script` without retries."""
    return KubeClient(ScriptedTransport(script), Retry(SystemClock(), attempts=1))


def answer(body: Any, status: int = 200) -> Response:
    return Response(status, json.dumps(body).encode())


def stored(resource: Resource, **fields: object) -> JsonDict:
    """Return an object as a server stores it, with the metadata that every one has; `metadata` adds to it."""
    meta: JsonDict = {
        "name": "x",
        "uid": "uid-of-x",
        "resourceVersion": "1",
        "creationTimestamp": "2026-11-21T12:00:00Z",
    }
    if resource.namespaced:
        meta["namespace"] = "velero"
    added: Any = fields.pop("metadata", {})
    form = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta | added}
    return form | fields


def rejection(status: int, message: str, reason: str = "") -> Response:
    """Return what an API server answers; its reason of a 404 is the one for an object that does not exist."""
    reason = reason or ("NotFound" if status == HTTPStatus.NOT_FOUND else "")
    return answer({"kind": "Status", "message": message, "reason": reason}, status)
