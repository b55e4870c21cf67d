"""Whether a Velero server is in the namespace, which controls repositories and locations itself, or since when none is.

It is seen by its Deployment, whatever its replicas: a server that is scaled down or replaced comes back.
Source: Velero v1.18, Labels in pkg/install/resources.go, as recorded in tests/data/velero-1.18.2; buildJob in
pkg/repository/maintenance/maintenance.go (the name); Velero's chart, charts/velero/templates/deployment.yaml.
"""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.kube.resources import DEPLOYMENTS
from core.kube.types import UncheckedObject

_NAME: Final = "velero"
_LABEL: Final = ("component", "velero")

_FRESH_SECONDS: Final = 10.0
"""A server needs longer to start."""


class VeleroServerCheck:
    """Checks for a Velero server in the namespace, for code that asks all the time: an answer is used for a while."""

    def __init__(self, client: KubeClient, clock: Clock, namespace: str) -> None:
        self._client = client
        self._clock = clock
        self.namespace = namespace
        self._checking = asyncio.Lock()
        self._checked_at_seconds: float | None = None
        self._found = False

    async def finds(self, *, fresh: bool = False) -> bool:
        """Return whether there was a server at most ten seconds ago, or now."""
        async with self._checking:
            now, last = self._clock.monotonic(), self._checked_at_seconds
            if fresh or last is None or now - last >= _FRESH_SECONDS:
                self._found = await has_velero_server(self._client, self.namespace)
                self._checked_at_seconds = now
            return self._found


async def has_velero_server(client: KubeClient, namespace: str) -> bool:
    """Return whether the Deployment of a Velero server is in the namespace."""
    return await find_velero_server(client, namespace) is not None


async def find_velero_server(client: KubeClient, namespace: str) -> UncheckedObject | None:
    """Return the Deployment of the Velero server in the namespace; None: there is none."""
    for one in await client.list(Selection(DEPLOYMENTS, namespace)):
        meta = one["metadata"]
        if meta["name"] == _NAME or _LABEL in (meta.get("labels") or {}).items():
            return one
    return None


def flags_of(workload: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the flags of a Deployment or DaemonSet as JSON dict, without `--`; "" of one that has no value.

    Source: Velero v1.18, pkg/cmd/server/config/config.go.
    """
    containers = workload["spec"]["template"]["spec"]["containers"]
    words = [word for one in containers for key in ("command", "args") for word in one.get(key) or ()]
    flags = {}
    for word, following in pairwise([*words, ""]):
        key, sign, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            flags[key] = value if sign else "" if following.startswith("-") else following
    return flags


_LOOK_SECONDS: Final = 30.0


class ServerAbsence:
    """Looks for a Velero server, and remembers since when there was none; measured on the monotonic clock."""

    def __init__(self, client: KubeClient, clock: Clock, namespace: str) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._since_seconds: float | None = None
        self.server = True

    @property
    def lasts(self) -> timedelta:
        """For how long no server was seen; zero while there is one, and before the first look."""
        if self._since_seconds is None:
            return timedelta()
        return timedelta(seconds=self._clock.monotonic() - self._since_seconds)

    async def look(self) -> bool:
        """Return whether a server is there now."""
        self.server = await has_velero_server(self._client, self._namespace)
        if self.server:
            self._since_seconds = None
        elif self._since_seconds is None:
            self._since_seconds = self._clock.monotonic()
        return self.server

    async def run(self) -> None:
        """Look every half minute until canceled."""
        while True:
            try:
                await self.look()
            except AgentError:
                # Not looked is not absent: a server may have been there meanwhile.
                self._since_seconds = None
            await self._clock.sleep(_LOOK_SECONDS)
