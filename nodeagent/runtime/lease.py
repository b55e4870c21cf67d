"""A Lease of the API server that one process holds at a time: acquiring, renewing and releasing it.

Whether its last holder still lives, its user decides: by watching it, or by reading it for as long as it was promised.
Source: Kubernetes v1.34, coordination.k8s.io/v1 Lease; the meaning of its fields as in client-go's leader election.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Clock, Deadline
from core.kube.client import KubeClient
from core.kube.errors import ConflictError, KubeError
from core.kube.resources import LEASES
from core.kube.types import LeaseObject, Manifest

_log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 3
"""Renewals per lease duration: one may fail before the holder has to stop at two thirds."""

_RETRIES_PER_LEASE: Final = 15
"""After a failed renewal, retries per lease duration."""

_SAFE_SHARE: Final = 2 / 3
"""A holder that has not renewed for this share of the duration must not write."""

_RELEASE_SECONDS: Final = 2.0
"""Timeout of the release; without it the Lease expires."""


@dataclass
class _Held:
    """The Lease as it was last written; it counts from the start of that request."""

    lease: LeaseObject
    renewed_at_seconds: float


def _format_micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Lease:
    """A Lease, for the holder `identity`, which is unique to this process."""

    def __init__(
        self, client: KubeClient, clock: Clock, place: tuple[str, str], *, identity: str, duration: timedelta
    ) -> None:
        """Write the Lease of `place`, namespace and name; another takes it over after `duration` without renewal."""
        # A renewal delayed behind other requests could come too late.
        self._client = client.urgently()
        self._clock = clock
        self._namespace, self._name = place
        self._identity = identity
        self._duration_seconds = duration.total_seconds()
        self._held: _Held | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds it, as far as it knows."""
        return self._held is not None

    @property
    def may_write(self) -> bool:
        """Whether this process holds it, and has renewed it recently enough to write."""
        return self._seconds_left > 0

    @property
    def _seconds_left(self) -> float:
        if self._held is None:
            return 0.0
        until = self._held.renewed_at_seconds + self._duration_seconds * _SAFE_SHARE
        return max(0.0, until - self._clock.monotonic())

    async def acquire(self, observed: LeaseObject | None) -> None:
        """Take the Lease in the version that was observed; None: there is none.

        Raises:
            ConflictError: another one has taken it since.
            TimeoutError: no response in time.
        """
        began = self._clock.monotonic()
        now = _format_micro_time(self._clock.now())
        spec: Manifest = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration_seconds),
            "acquireTime": now,
            "renewTime": now,
        }
        async with asyncio.timeout(self._duration_seconds / RENEWALS_PER_LEASE):
            if observed is None:
                meta = {"name": self._name, "namespace": self._namespace}
                manifest = LEASES.build(meta, spec=spec | {"leaseTransitions": 0})
                stored = await self._client.create(LEASES, manifest)
            else:
                spec["leaseTransitions"] = int((observed.get("spec") or {}).get("leaseTransitions") or 0) + 1
                stored = await self._patch(observed, spec)
        self._held = _Held(stored, began)

    async def renew_until_lost(self) -> None:
        """Renew the Lease periodically; return when it is lost."""
        pause_seconds = self._duration_seconds / RENEWALS_PER_LEASE
        while True:
            await self._clock.sleep(min(pause_seconds, self._seconds_left))
            try:
                renewed = await self.renew()
            except (KubeError, TimeoutError) as e:
                _log.warning("cannot renew Lease %s: %s", self._name, str(e) or "timed out")
                if not self.may_write:
                    return
                pause_seconds = self._duration_seconds / _RETRIES_PER_LEASE
                continue
            if not renewed:
                _log.warning("another process acquired Lease %s", self._name)
                self._held = None
                return
            pause_seconds = self._duration_seconds / RENEWALS_PER_LEASE

    async def renew(self) -> bool:
        """Renew the Lease once; return False if another process has acquired it. TimeoutError: no response in time."""
        if self._held is None:
            return False
        began = self._clock.monotonic()
        spec = {"renewTime": _format_micro_time(self._clock.now())}
        # A process that was paused for long still gets one attempt: there may be no other candidate.
        least_seconds = self._duration_seconds / _RETRIES_PER_LEASE
        limit_seconds = min(self._duration_seconds / RENEWALS_PER_LEASE, max(self._seconds_left, least_seconds))
        async with asyncio.timeout(limit_seconds):
            stored = await self._patch_own(self._held, spec)
        if stored is None:
            return False
        self._held = _Held(stored, began)
        return True

    async def release(self) -> None:
        """Release the Lease if this process holds it, so that another one need not wait."""
        held, self._held = self._held, None
        if held is None:
            return
        spec = {"holderIdentity": "", "renewTime": _format_micro_time(self._clock.now())}
        deadline = Deadline.after(self._clock, timedelta(seconds=_RELEASE_SECONDS))
        try:
            await run_shielded(lambda: self._patch_own(held, spec), name="lease release", deadline=deadline)
        except (KubeError, TimeoutError) as e:
            _log.warning("cannot release Lease %s, it will expire: %s", self._name, str(e) or "timed out")

    async def _patch_own(self, held: _Held, spec: Manifest) -> LeaseObject | None:
        """Write a Lease that this process holds, and return it; None if it no longer does.

        The response to its last renewal may not have arrived.
        """
        try:
            return await self._patch(held.lease, spec)
        except ConflictError:
            lease = await self._client.read(LEASES, self._namespace, self._name)
            if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
                return None
            return await self._patch(lease, spec)

    async def _patch(self, lease: LeaseObject, spec: Manifest) -> LeaseObject:
        return await self._client.patch_if_unchanged(LEASES, lease, {"spec": spec})
