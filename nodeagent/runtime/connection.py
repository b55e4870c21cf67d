"""A connection to the cluster with the permissions of the user who runs a command; also into the containers of pods.

Output of a process in a container that is not read yet is not received either, so the process waits: memory stays
bounded at both ends.
Source: Kubernetes v1.34, staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go: protocols and channels;
the first byte of a message is its channel.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from core.clock import Clock, SystemClock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, Status
from core.kube.transport import Request, Response, Retry, Transport
from nodeagent.runtime.http import HttpTransport
from nodeagent.runtime.server_clock import ServerClock
from nodeagent.runtime.settings import DEFAULT_NAMESPACE
from nodeagent.runtime.transport import load_transport

_PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")

OUTPUT: Final = 1
"""The channel of standard output."""

ERRORS: Final = 2
"""The channel of standard error."""

_STATUS: Final = 3


class ExecError(AgentError):
    """The process could not be executed, or its output ended before it did."""


@dataclass(frozen=True)
class ExecProcess:
    """What is executed: `command`, in a container of a pod."""

    namespace: str
    pod: str
    container: str
    command: Sequence[str]


class PodExec:
    """Executes processes in pods."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport

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
            async with self._transport.messages(path, query, _PROTOCOLS) as messages:
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
    """Raise ExecError unless the process was executed, whatever its exit code."""
    try:
        status = Status.parse(content)
    except (ValueError, RecursionError) as e:
        raise ExecError(f"{shown}: what the API server says about its end is invalid") from e
    if status.status != "Success" and status.reason != "NonZeroExitCode":
        raise ExecError(f"{shown}: {status.message or status.reason or 'failed'}")


_ATTEMPTS: Final = 2
"""A user is waiting, and can run the command again."""


@dataclass(frozen=True)
class ClusterAccess:
    """How the cluster is reached; a `namespace` of "": the kubeconfig's, then `DEFAULT_NAMESPACE`."""

    kubeconfig: str | None = None
    kubecontext: str | None = None
    namespace: str = ""


class ServerTime:
    """A transport that learns the API server's time from the Date headers of its answers.

    A person's machine may be minutes off, and ages and leases are compared with stamps of the API server. `date` is the
    Date of the last answer that has one, None before: no clock of this machine is part of it.
    """

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self._inner = inner
        self._server = ServerClock(clock)
        self.date: datetime | None = None

    def now(self) -> datetime:
        """Return the API server's time, give or take a second; this machine's before the first answer."""
        return self._server.now()

    async def request(self, request: Request) -> Response:
        """Send the request; see `Transport`."""
        response = await self._inner.request(request)
        if response.date is not None:
            self.date = self._server.take(response.date) or self.date
        return response

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a stream; see `Transport`."""
        return self._inner.stream(request)

    async def close(self) -> None:
        """Close the transport."""
        await self._inner.close()


@dataclass(frozen=True)
class Connection:
    """A client, the namespace that it is used for, the time of the API server, and processes in pods."""

    client: KubeClient
    namespace: str
    time: ServerTime
    pod_exec: PodExec


@asynccontextmanager
async def connect(access: ClusterAccess) -> AsyncIterator[Connection]:
    """Yield a connection, which is closed afterward; raise ConfigError, with what was tried, if there is none."""
    transport, context_namespace = await load_transport(access.kubeconfig, access.kubecontext)
    try:
        clock = SystemClock()
        timed = ServerTime(transport, clock)
        client = KubeClient(timed, Retry(clock, attempts=_ATTEMPTS))
        yield Connection(client, access.namespace or context_namespace or DEFAULT_NAMESPACE, timed, PodExec(transport))
    finally:
        await transport.close()
