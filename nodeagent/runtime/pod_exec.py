"""A process that is executed in a container of a pod, and its output, of any length, as it comes.

What is not read yet is not received either, so the process waits: memory stays bounded at both ends. How a WebSocket is
opened is in `nodeagent.runtime.http`.
Source: Kubernetes v1.34, staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go: protocols and channels;
the first byte of a message is its channel.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from core.errors import AgentError
from core.kube.errors import ForbiddenError

__all__ = ["ERRORS", "OUTPUT", "ExecError", "ExecProcess", "PodExec", "WebSockets", "forbidden_exec"]

_PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")

OUTPUT: Final = 1
"""The channel of standard output."""

ERRORS: Final = 2
"""The channel of standard error."""

_STATUS: Final = 3


class ExecError(AgentError):
    """The process could not be executed, or its output ended before it did."""


class WebSockets(Protocol):
    """Opens WebSockets to the API server."""

    def messages(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open one, and yield its messages; see `nodeagent.runtime.http`."""
        ...


@dataclass(frozen=True)
class ExecProcess:
    """What is executed: `command`, in a container of a pod."""

    namespace: str
    pod: str
    container: str
    command: Sequence[str]


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct):
    status: str = ""
    reason: str = ""
    message: str = ""
    details: _Details | None = None


class PodExec:
    """Executes processes in pods."""

    def __init__(self, sockets: WebSockets) -> None:
        """Execute them through this transport."""
        self._sockets = sockets

    async def run(self, process: ExecProcess) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield each piece of what the process writes, with its channel, until it has ended, however it ends.

        Raises:
            ForbiddenError: the user may not do that; the message says what is missing.
            KubeError: the API server rejected it.
            ExecError: it could not be executed, or the connection broke.
        """
        path = f"/api/v1/namespaces/{process.namespace}/pods/{process.pod}/exec"
        query = [("container", process.container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in process.command]
        shown = f"Pod {process.namespace}/{process.pod}: execute {' '.join(process.command)}"
        try:
            async with self._sockets.messages(path, query, _PROTOCOLS) as messages:
                async for message in messages:
                    channel, content = message[0] if message else 0, message[1:]
                    if channel in {OUTPUT, ERRORS} and content:
                        yield channel, content
                    elif channel == _STATUS:
                        _check(content, shown)
                        return
        except ForbiddenError as e:
            raise forbidden_exec(shown, process.namespace) from e
        raise ExecError(f"{shown}: the connection ended before the process did")


def forbidden_exec(attempted: str, namespace: str) -> ForbiddenError:
    """Return the error of a user who may not execute processes in pods of the namespace."""
    text = f"{attempted}: missing permission: create and get pods/exec in namespace {namespace}"
    return ForbiddenError(text, status=403, reason="Forbidden")


def _check(content: bytes, shown: str) -> None:
    """Check how the process ended; one that ended with an exit code was executed.

    Raises:
        ExecError: it was not executed.
    """
    try:
        status = msgspec.json.decode(content, type=_Status)
    except msgspec.DecodeError as e:
        raise ExecError(f"{shown}: what the API server says about its end is invalid") from e
    if status.status != "Success" and status.reason != "NonZeroExitCode":
        raise ExecError(f"{shown}: {status.message or status.reason or 'failed'}")
