"""A connection to the cluster with the permissions of the user who runs a command."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from core.clock import Clock, SystemClock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.kube.transport import Request, Response, Transport
from nodeagent.runtime.pod_exec import PodExec
from nodeagent.runtime.settings import DEFAULT_NAMESPACE
from nodeagent.runtime.transport import load_transport

__all__ = ["ClusterAccess", "Connection", "ServerTime", "connect"]

_ATTEMPTS: Final = 2
"""A user is waiting, and can run the command again."""


@dataclass(frozen=True)
class ClusterAccess:
    """How the cluster is reached; `namespace` is empty for the kubeconfig's, then `DEFAULT_NAMESPACE`."""

    kubeconfig: str | None = None
    kubecontext: str = ""
    namespace: str = ""


class ServerTime:
    """A transport that learns the API server's time from the Date headers of its answers.

    A person's machine may be minutes off, and ages and leases are compared with stamps of the API server.
    """

    def __init__(self, inner: Transport, clock: Clock) -> None:
        """Send through `inner`; `clock` is this machine's."""
        self._inner = inner
        self._clock = clock
        self._ahead = timedelta()
        self._date: datetime | None = None

    def now(self) -> datetime:
        """Return the API server's time, give or take a second; this machine's before the first answer."""
        return self._clock.now() - self._ahead

    @property
    def date(self) -> datetime | None:
        """The Date of the last answer that has one: no clock of this machine is part of it. None before."""
        return self._date

    async def request(self, request: Request) -> Response:
        """Send the request; see `Transport`."""
        response = await self._inner.request(request)
        if response.date is not None:
            # What HTTP does not allow is ignored, such as a date without a time zone (RFC 9110, 6.6.1).
            with suppress(ValueError, TypeError, OverflowError):
                date = parsedate_to_datetime(response.date)
                self._ahead = self._clock.now() - date
                self._date = date
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
    """Yield a connection, which is closed afterward.

    Raises:
        ConfigError: no usable configuration; the message names what was tried.
    """
    transport, context_namespace = await load_transport(access.kubeconfig, access.kubecontext)
    try:
        clock = SystemClock()
        timed = ServerTime(transport, clock)
        client = KubeClient(timed, Retry(clock, attempts=_ATTEMPTS))
        yield Connection(client, access.namespace or context_namespace or DEFAULT_NAMESPACE, timed, PodExec(transport))
    finally:
        await transport.close()
