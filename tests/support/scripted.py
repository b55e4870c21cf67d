"""An API server that is one function, for tests with a few requests and no storage."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.kube.transport import Request, Response

__all__ = ["ScriptedTransport", "answer", "rejection", "scripted_client"]


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


def rejection(status: int, message: str, reason: str = "") -> Response:
    return answer({"kind": "Status", "message": message, "reason": reason}, status)
