"""For how long this leader has seen no Velero server: one that is replaced comes back."""

from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.velero_server import has_velero_server

__all__ = ["ServerAbsence"]

_LOOK_SECONDS: Final = 30.0


class ServerAbsence:
    """Looks for a Velero server, and remembers since when there was none; measured on the monotonic clock."""

    def __init__(self, client: KubeClient, clock: Clock, namespace: str) -> None:
        """Look in `namespace`; nothing is known before the first look."""
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
        """Return whether a server is there now.

        Raises:
            KubeError: the API server rejected the list.
        """
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
                self.server, self._since_seconds = True, None
            await self._clock.sleep(_LOOK_SECONDS)
