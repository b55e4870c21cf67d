"""Leader election among all node agents, by the Lease `node-agent-dispatcher`.

Safety does not rest on the Lease alone: see `nodeagent.leader.admission.quota`.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ConflictError, KubeError
from core.kube.resources import LEASES
from core.kube.types import LeaseObject
from core.logs import fields
from core.models.names import DISPATCHER_LEASE
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.lease import RENEWALS_PER_LEASE, Lease

_log = logging.getLogger(__name__)

_SPREAD_SECONDS: Final = 2.4
"""Candidates try at different times, so that the others observe the success of the first by watch. Where the API server
takes half a second for that, 13 of 500 try; within half of this time it would be 71."""

_RELEASED_SHARE: Final = 1 / 2
"""Of that time where the holder released the Lease: then the API server was fast enough for it."""

_SPREAD_POWER: Final = 4
"""Few candidates try early and most late, so that the first of fifty is a fifth of a second ahead
of the second on average, instead of a twentieth with a uniform spread."""

_SETTLE_SECONDS: Final = 0.02
"""Before an attempt: lets a busy machine process watch events that have arrived."""

_REJECTED_PAUSE_SECONDS: Final = 5.0
"""Between attempts while the API server rejects them."""


class NotLeaderError(AgentError):
    """This agent must not write as the leader now."""

    retry = True


class LeaderElection:
    """One candidate for leadership."""

    def __init__(self, client: KubeClient, clock: Clock, *, namespace: str, identity: str, duration: timedelta) -> None:
        """Compete for the Lease in `namespace` as `identity`, which is unique to this process."""
        self._lease = Lease(client, clock, (namespace, DISPATCHER_LEASE), identity=identity, duration=duration)
        # The watch must not wait behind other requests either.
        self._client = client.urgently()
        self._clock = clock
        self._namespace = namespace
        self._identity = identity
        self._duration_seconds = duration.total_seconds()
        self._holder: str | None = None
        self._changed = asyncio.Event()
        self._changed_at_seconds = clock.monotonic()

    @property
    def holder(self) -> str | None:
        """The identity of the leader as last observed; None if there is none."""
        return self._identity if self._lease.held else self._holder

    @property
    def may_write(self) -> bool:
        """Whether this process is the leader and has renewed recently enough to write."""
        return self._lease.may_write

    def check(self) -> None:
        """Raise NotLeaderError unless this process may write as the leader."""
        if not self.may_write:
            raise NotLeaderError(f"{self._identity} no longer holds Lease {self._namespace}/{DISPATCHER_LEASE}")

    async def run(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `lead` whenever this process is the leader, until canceled.

        If the Lease is lost, `lead` is canceled and awaited. Canceling this method first cancels
        `lead`, then releases the Lease.

        Raises:
            ExceptionGroup: what `lead` raised; the Lease is released.
        """
        selection = Selection(LEASES, self._namespace, field_selector=f"metadata.name={DISPATCHER_LEASE}")
        watch = Informer(
            self._client, selection, clock=self._clock, trim=lambda lease: lease, on_change=self._on_change
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(), name="lease watch")
            await watch.synced.wait()
            while True:
                # Any change from here on ends the wait.
                self._changed.clear()
                lease = watch.get(self._namespace, DISPATCHER_LEASE)
                if await self._wait_for_chance(lease) and await self._try_acquire(lease):
                    await self._hold(lead)

    def _on_change(self, lease: LeaseObject) -> None:
        self._holder = (lease.get("spec") or {}).get("holderIdentity") or None
        self._changed_at_seconds = self._clock.monotonic()
        self._changed.set()

    async def _wait_for_chance(self, lease: LeaseObject | None) -> bool:
        """Wait until the Lease may be acquired; return False if it changed meanwhile."""
        spec = (lease.get("spec") or {}) if lease else {}
        wait_seconds, spread_seconds = 0.0, _SPREAD_SECONDS * _RELEASED_SHARE
        # Its own is from an attempt or a release whose response was lost: nothing leads here.
        if spec.get("holderIdentity") not in {None, "", self._identity}:
            # The holder's own duration counts, on this clock, from its last observed renewal.
            promised = float(spec.get("leaseDurationSeconds") or self._duration_seconds)
            wait_seconds = max(0.0, self._changed_at_seconds + promised - self._clock.monotonic())
            spread_seconds = _SPREAD_SECONDS
        spread_seconds = min(spread_seconds, self._duration_seconds / RENEWALS_PER_LEASE)
        wait_seconds += spread_seconds * random.random() ** (1 / _SPREAD_POWER)  # noqa: S311 - not for cryptography
        if await wait_for_event(self._changed, wait_seconds):
            return False
        return not await wait_for_event(self._changed, _SETTLE_SECONDS)

    async def _try_acquire(self, lease: LeaseObject | None) -> bool:
        try:
            await self._lease.acquire(lease)
        except (KubeError, TimeoutError) as e:
            lost = isinstance(e, ConflictError)
            level = logging.DEBUG if lost else logging.WARNING
            _log.log(level, "cannot acquire the leader Lease, will retry: %s", str(e) or "timed out")
            # Another agent has it, as the watch is about to show. While the watch is dead, more attempts
            # would only conflict again, for every agent of the cluster.
            pause_seconds = self._duration_seconds if lost else _REJECTED_PAUSE_SECONDS
            await wait_for_event(self._changed, pause_seconds)
            return False
        return True

    async def _hold(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        _log.info("acquired the leader Lease", extra=fields(name=self._identity))
        try:
            async with asyncio.TaskGroup() as group:
                leading = group.create_task(lead(), name="leader")
                renewing = group.create_task(self._lease.renew_until_lost(), name="lease renewal")
                await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
                leading.cancel()
                renewing.cancel()
        finally:
            await self._lease.release()
            _log.info("lost the leader Lease", extra=fields(name=self._identity))
