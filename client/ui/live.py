"""What the pages show: the last state of the cluster, by one watch for each kind, also while it does not answer."""

import asyncio
import dataclasses
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Final

from msgspec.structs import replace

from client.status.follow import ProgressRates, StatusFollower
from client.status.health import Finding, Health, Rule, worst
from client.status.read import StatusReader
from client.status.records import ClusterSnapshot
from client.status.view import RateOf, StatusView, build_view
from core.aio import wait_for_event
from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient

__all__ = ["Live", "State"]

_UPDATE_SECONDS: Final = 0.5
"""Between two views, whatever changes."""

_QUIET_SECONDS: Final = 5.0
"""Rates and ages change although nothing is observed."""

_RETRY_SECONDS: Final = 3.0

_OLD_SECONDS: Final = 5.0
"""What was observed is old after that: a watch that ends is usually open again within a second."""


@dataclass(frozen=True)
class State:
    """The last snapshot; `rate_of` are the rates then. `error` is why the cluster is not followed; empty: it is.

    `since` is the last moment at which all of it was current, by the API server's clock.
    """

    snapshot: ClusterSnapshot
    rate_of: RateOf
    since: datetime
    error: str = ""

    @property
    def lost(self) -> str:
        """Why it is not current; empty: it is."""
        seconds = (self.snapshot.at - self.since).total_seconds()
        return self.error or (f"no watch for {seconds:.0f} s" if seconds >= _OLD_SECONDS else "")

    @cached_property
    def view(self) -> StatusView:
        """What it shows, built on demand; how a cluster is that does not answer is not known."""
        view = build_view(self.snapshot, self.rate_of)
        if not self.lost:
            return view
        message = f"the cluster does not answer: {self.lost}"
        findings = [*view.findings, Finding(health=Health.UNKNOWN, rule=Rule.NOT_READ, message=message)]
        return replace(view, findings=findings, health=worst(findings))


class Live:
    """Follows the cluster while `run` is running; `state` is None until it was read once."""

    def __init__(self, client: KubeClient, namespace: str, reader: StatusReader, clock: Clock) -> None:
        """Read through `client` with the permissions of the person."""
        self._client = client
        self._namespace = namespace
        self._reader = reader
        self._clock = clock
        self._rates = ProgressRates()
        self._changed = asyncio.Condition()
        self.state: State | None = None
        self.error = ""
        self.number = 0

    async def run(self) -> None:
        """Follow until canceled; a cluster that does not answer is asked again."""
        while True:
            follower = StatusFollower(self._client, self._namespace, self._reader, self._clock)
            try:
                await follower.run(partial(self._keep, follower))
            except AgentError as e:
                self.error = str(e)
                if self.state is not None:
                    self.state = dataclasses.replace(self.state, error=self.error)
                await self._announce()
                await self._clock.sleep(_RETRY_SECONDS)

    async def wait(self, number: int, seconds: float) -> int:
        """Return the number of the state once it is another one than `number`, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.number != number)
        except TimeoutError:
            pass
        return self.number

    async def _keep(self, follower: StatusFollower) -> None:
        while True:
            follower.changed.clear()
            snapshot = follower.snapshot()
            self._rates.observe(snapshot.transfers, snapshot.at)
            since = snapshot.at - timedelta(seconds=follower.outdated_seconds)
            self.state, self.error = State(snapshot, self._rates.rate_of, since), ""
            await self._announce()
            await self._clock.sleep(_UPDATE_SECONDS)
            await wait_for_event(follower.changed, _QUIET_SECONDS)

    async def _announce(self) -> None:
        async with self._changed:
            self.number += 1
            self._changed.notify_all()
