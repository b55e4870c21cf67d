"""Leader election among all node agents, by the Lease `node-agent-dispatcher`.

Safety does not rest on the Lease alone: see `nodeagent.leader.admission.ledger`.
Source: Kubernetes v1.34, coordination.k8s.io/v1 Lease; the meaning of its fields as in
client-go's leader election.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from core.aio import run_shielded, wait_for_event
from core.clock import Clock, Deadline
from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ConflictError, KubeError
from core.kube.resources import LEASES
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import DISPATCHER_LEASE
from nodeagent.runtime.informer import Informer

__all__ = ["DEFAULT_LEASE_DURATION", "LeaderElection", "NotLeaderError"]

_log = logging.getLogger(__name__)

DEFAULT_LEASE_DURATION: Final = timedelta(seconds=15)
"""Source: Kubernetes v1.34, the default of its own components."""

_RENEWALS_PER_LEASE: Final = 3
"""Renewals per lease duration: one may fail before the leader has to stop at two thirds."""

_RETRIES_PER_LEASE: Final = 15
"""After a failed renewal, retries per lease duration."""

_SAFE_SHARE: Final = 2 / 3
"""A leader that has not renewed for this share of the duration must not write."""

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

_RELEASE_SECONDS: Final = 2.0
"""Timeout of the release on shutdown; without it the Lease expires."""


class NotLeaderError(AgentError):
    """This agent must not write as the leader now."""

    retry = True


@dataclass
class _Held:
    """The Lease as this process holds it: its version, and when its last renewal started."""

    uid: str
    resource_version: str
    renewed_at_seconds: float


def _format_micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaderElection:
    """One candidate for leadership."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        identity: str,
        duration: timedelta = DEFAULT_LEASE_DURATION,
    ) -> None:
        """Compete for the Lease in `namespace` as `identity`, which is unique to this process."""
        # A renewal delayed behind other requests could come too late.
        self._client = client.urgently()
        self._clock = clock
        self._namespace = namespace
        self._identity = identity
        self._duration_seconds = duration.total_seconds()
        self._held: _Held | None = None
        self._holder = ""
        self._changed = asyncio.Event()
        self._changed_at_seconds = clock.monotonic()

    @property
    def holder(self) -> str:
        """The identity of the leader as last observed; empty if there is none."""
        return self._identity if self._held is not None else self._holder

    @property
    def may_write(self) -> bool:
        """Whether this process is the leader and has renewed recently enough to write."""
        return self._seconds_left > 0

    @property
    def _seconds_left(self) -> float:
        """How long this process may write without another renewal."""
        if self._held is None:
            return 0.0
        until = self._held.renewed_at_seconds + self._duration_seconds * _SAFE_SHARE
        return max(0.0, until - self._clock.monotonic())

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

    def _on_change(self, lease: JsonDict) -> None:
        self._holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        self._changed_at_seconds = self._clock.monotonic()
        self._changed.set()

    async def _wait_for_chance(self, lease: JsonDict | None) -> bool:
        """Wait until the Lease may be acquired; return False if it changed meanwhile."""
        spec = (lease or {}).get("spec") or {}
        wait_seconds, spread_seconds = 0.0, _SPREAD_SECONDS * _RELEASED_SHARE
        # Its own is that of an attempt or a release whose response was lost: nothing leads here.
        if spec.get("holderIdentity") not in {None, "", self._identity}:
            # The holder's own duration counts, on this clock, from its last observed renewal.
            promised = float(spec.get("leaseDurationSeconds") or self._duration_seconds)
            wait_seconds = max(0.0, self._changed_at_seconds + promised - self._clock.monotonic())
            spread_seconds = _SPREAD_SECONDS
        spread_seconds = min(spread_seconds, self._duration_seconds / _RENEWALS_PER_LEASE)
        wait_seconds += spread_seconds * random.random() ** (1 / _SPREAD_POWER)  # noqa: S311 - not for cryptography
        if await wait_for_event(self._changed, wait_seconds):
            return False
        return not await wait_for_event(self._changed, _SETTLE_SECONDS)

    async def _try_acquire(self, lease: JsonDict | None) -> bool:
        """Acquire the Lease as last observed; return whether that succeeded."""
        began = self._clock.monotonic()
        now = _format_micro_time(self._clock.now())
        spec: JsonDict = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration_seconds),
            "acquireTime": now,
            "renewTime": now,
        }
        try:
            async with asyncio.timeout(self._duration_seconds / _RENEWALS_PER_LEASE):
                if lease is None:
                    manifest = _build_lease(self._namespace, spec | {"leaseTransitions": 0})
                    stored = await self._client.create(LEASES, manifest)
                else:
                    changes = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
                    meta = lease["metadata"]
                    spec["leaseTransitions"] = changes
                    stored = await self._patch(meta["uid"], meta["resourceVersion"], spec)
        except (KubeError, TimeoutError) as e:
            lost = isinstance(e, ConflictError)
            level = logging.DEBUG if lost else logging.WARNING
            _log.log(level, "cannot acquire the leader Lease, will retry: %s", str(e) or "timed out")
            # Another agent has it, as the watch is about to show. While the watch is dead, more attempts
            # would only conflict again, for every agent of the cluster.
            pause_seconds = self._duration_seconds if lost else _REJECTED_PAUSE_SECONDS
            await wait_for_event(self._changed, pause_seconds)
            return False
        self._keep(stored, began)
        return True

    async def _hold(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `lead` until the Lease is lost or this is canceled."""
        _log.info("acquired the leader Lease", extra=fields(name=self._identity))
        try:
            async with asyncio.TaskGroup() as group:
                leading = group.create_task(lead(), name="leader")
                renewing = group.create_task(self._renew_until_lost(), name="lease renewal")
                await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
                leading.cancel()
                renewing.cancel()
        finally:
            await self._release()
            _log.info("lost the leader Lease", extra=fields(name=self._identity))

    async def _renew_until_lost(self) -> None:
        """Renew the Lease periodically; return when it is lost."""
        pause_seconds = self._duration_seconds / _RENEWALS_PER_LEASE
        while True:
            await self._clock.sleep(min(pause_seconds, self._seconds_left))
            try:
                renewed = await self._renew()
            except (KubeError, TimeoutError) as e:
                _log.warning("cannot renew the leader Lease: %s", str(e) or "timed out")
                if not self.may_write:
                    return
                pause_seconds = self._duration_seconds / _RETRIES_PER_LEASE
                continue
            if not renewed:
                _log.warning("another agent acquired the leader Lease")
                self._held = None
                return
            pause_seconds = self._duration_seconds / _RENEWALS_PER_LEASE

    async def _renew(self) -> bool:
        """Renew the Lease once; return False if another agent has acquired it.

        Raises:
            KubeError: the API server rejected the request.
            TimeoutError: no response in time.
        """
        if self._held is None:
            return False
        began = self._clock.monotonic()
        spec = {"renewTime": _format_micro_time(self._clock.now())}
        # A process that was paused for long still gets one attempt: there may be no other candidate.
        least_seconds = self._duration_seconds / _RETRIES_PER_LEASE
        limit_seconds = min(self._duration_seconds / _RENEWALS_PER_LEASE, max(self._seconds_left, least_seconds))
        async with asyncio.timeout(limit_seconds):
            stored = await self._patch_own(self._held, spec)
        if stored is None:
            return False
        self._keep(stored, began)
        return True

    async def _release(self) -> None:
        """Release the Lease if this process holds it, so that another candidate need not wait."""
        held, self._held = self._held, None
        if held is None:
            return
        spec = {"holderIdentity": "", "renewTime": _format_micro_time(self._clock.now())}
        deadline = Deadline.after(self._clock, timedelta(seconds=_RELEASE_SECONDS))
        try:
            await run_shielded(lambda: self._patch_own(held, spec), name="lease release", deadline=deadline)
        except (KubeError, TimeoutError) as e:
            _log.warning("cannot release the leader Lease, it will expire: %s", str(e) or "timed out")

    async def _patch_own(self, held: _Held, spec: JsonDict) -> JsonDict | None:
        """Write a Lease that this process holds, and return it; None if it no longer does.

        Its version may be older than that of its last renewal, of which no response arrived.
        """
        try:
            return await self._patch(held.uid, held.resource_version, spec)
        except ConflictError:
            lease = await self._client.read(LEASES, self._namespace, DISPATCHER_LEASE)
            if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
                return None
            meta = lease["metadata"]
            return await self._patch(meta["uid"], meta["resourceVersion"], spec)

    async def _patch(self, uid: str, resource_version: str, spec: JsonDict) -> JsonDict:
        patch = {"metadata": {"uid": uid, "resourceVersion": resource_version}, "spec": spec}
        return await self._client.patch(LEASES, self._namespace, DISPATCHER_LEASE, patch)

    def _keep(self, stored: JsonDict, began_seconds: float) -> None:
        """Record a successful write; the Lease counts from its start."""
        meta = stored["metadata"]
        self._held = _Held(meta["uid"], meta["resourceVersion"], began_seconds)


def _build_lease(namespace: str, spec: JsonDict) -> JsonDict:
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": DISPATCHER_LEASE, "namespace": namespace},
        "spec": spec,
    }
