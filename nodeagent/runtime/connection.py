"""A connection to the cluster with the permissions of the user who runs a command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from nodeagent.runtime.settings import DEFAULT_NAMESPACE
from nodeagent.runtime.transport import load_transport

__all__ = ["ClusterAccess", "Connection", "connect"]

_ATTEMPTS: Final = 2
"""A user is waiting, and can run the command again."""


@dataclass(frozen=True)
class ClusterAccess:
    """How the cluster is reached; `namespace` is empty for the kubeconfig's, then `DEFAULT_NAMESPACE`."""

    kubeconfig: str | None = None
    kubecontext: str = ""
    namespace: str = ""


@dataclass(frozen=True)
class Connection:
    """A client, and the namespace that it is used for."""

    client: KubeClient
    namespace: str


@asynccontextmanager
async def connect(access: ClusterAccess) -> AsyncIterator[Connection]:
    """Yield a connection, which is closed afterward.

    Raises:
        ConfigError: no usable configuration; the message names what was tried.
    """
    transport, context_namespace = await load_transport(access.kubeconfig, access.kubecontext)
    try:
        client = KubeClient(transport, Retry(SystemClock(), attempts=_ATTEMPTS))
        yield Connection(client, access.namespace or context_namespace or DEFAULT_NAMESPACE)
    finally:
        await transport.close()
