"""Who of all node agents leads: the Lease `node-agent-dispatcher`.

Knows how the Lease is taken, renewed, lost and given back. Does not know what the leader
does; safety does not rest on the Lease alone (`nodeagent.leader.admission.ledger`).
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

_RENEWALS_A_LEASE: Final = 3
"""Renewals in one duration: one may fail before the holder has to stop at two thirds."""

_TRIES_A_LEASE: Final = 15
"""After a failed renewal the next try comes after this fraction of the duration."""

_SAFE_SHARE: Final = 2 / 3
"""A holder that has not renewed for this share of the duration writes nothing."""

_SPREAD_SECONDS: Final = 1.2
"""Stand-bys try at different moments: the first one's success reaches the others by watch."""

_SPREAD_POWER: Final = 4
"""Few try early and most late, so that the first of many is well ahead of the second: of fifty
a tenth of a second on average, where with an even spread it would be a fiftieth."""

_LAST_LOOK_SECONDS: Final = 0.02
"""Before a try: what has arrived already but was not read yet, on a busy machine, is read now."""

_REFUSED_PAUSE_SECONDS: Final = 5.0
"""Between tries while the API server refuses."""

_RELEASE_SECONDS: Final = 2.0
"""A clean stop waits this long for its release; then the Lease simply runs out."""


class NotLeaderError(AgentError):
    """This agent may not write as the leader now."""

    retry = True


@dataclass
class _Held:
    """A Lease in our hands: its version, and when the renewal that counts was begun."""

    uid: str
    resource_version: str
    renewed_at_seconds: float


def _format_micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaderElection:
    """One candidate for the Lease."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        identity: str,
        duration: timedelta = DEFAULT_LEASE_DURATION,
    ) -> None:
        """Run for the Lease in `namespace` as `identity`, which no other process may have."""
        # A renewal that stood in line behind other requests could come too late.
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
        """Who leads, as last seen; empty where nobody does."""
        return self._identity if self._held is not None else self._holder

    @property
    def may_write(self) -> bool:
        """Whether this process leads and has renewed recently enough to write."""
        return self._seconds_left > 0

    @property
    def _seconds_left(self) -> float:
        """For how long this process may still write without renewing."""
        if self._held is None:
            return 0.0
        until = self._held.renewed_at_seconds + self._duration_seconds * _SAFE_SHARE
        return max(0.0, until - self._clock.monotonic())

    def check(self) -> None:
        """Raise NotLeaderError unless this process may write as the leader."""
        if not self.may_write:
            raise NotLeaderError(f"{self._identity} does not hold Lease {self._namespace}/{DISPATCHER_LEASE} any more")

    async def run(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `lead` whenever the Lease is held, until canceled.

        Losing the Lease cancels `lead` and waits for its end. A cancellation of this
        method ends `lead` first and gives the Lease back then.

        Raises:
            ExceptionGroup: what `lead` raised; the Lease was given back.
        """
        selection = Selection(LEASES, self._namespace, field_selector=f"metadata.name={DISPATCHER_LEASE}")
        watch = Informer(
            self._client, selection, clock=self._clock, trim=lambda lease: lease, on_change=self._on_change
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(), name="lease watch")
            await watch.synced.wait()
            while True:
                # Whatever changes from here on ends the wait.
                self._changed.clear()
                lease = watch.get(self._namespace, DISPATCHER_LEASE)
                if await self._wait_for_chance(lease) and await self._try_acquire(lease):
                    await self._hold(lead)

    def _on_change(self, lease: JsonDict) -> None:
        self._holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        self._changed_at_seconds = self._clock.monotonic()
        self._changed.set()

    async def _wait_for_chance(self, lease: JsonDict | None) -> bool:
        """Return whether now is the time to try; False where the Lease changed meanwhile."""
        spec = (lease or {}).get("spec") or {}
        wait_seconds = 0.0
        if spec.get("holderIdentity"):
            # The holder's own promise counts, on our clock, since its last sign of life.
            promised = float(spec.get("leaseDurationSeconds") or self._duration_seconds)
            wait_seconds = max(0.0, self._changed_at_seconds + promised - self._clock.monotonic())
        spread_seconds = min(_SPREAD_SECONDS, self._duration_seconds / _RENEWALS_A_LEASE)
        wait_seconds += spread_seconds * random.random() ** (1 / _SPREAD_POWER)  # noqa: S311 - guards no secret
        if await wait_for_event(self._changed, wait_seconds):
            return False
        return not await wait_for_event(self._changed, _LAST_LOOK_SECONDS)

    async def _try_acquire(self, lease: JsonDict | None) -> bool:
        """Take the Lease as it was seen last; return whether it is ours now."""
        began = self._clock.monotonic()
        now = _format_micro_time(self._clock.now())
        spec: JsonDict = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._duration_seconds),
            "acquireTime": now,
            "renewTime": now,
        }
        try:
            async with asyncio.timeout(self._duration_seconds / _RENEWALS_A_LEASE):
                if lease is None:
                    manifest = _build_lease(self._namespace, spec | {"leaseTransitions": 0})
                    stored = await self._client.create(LEASES, manifest)
                else:
                    changes = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
                    meta = lease["metadata"]
                    spec["leaseTransitions"] = changes
                    stored = await self._patch(meta["uid"], meta["resourceVersion"], spec)
        except (KubeError, TimeoutError) as e:
            level = logging.DEBUG if isinstance(e, ConflictError) else logging.WARNING
            _log.log(level, "the Lease %s cannot be taken: %s", DISPATCHER_LEASE, str(e) or "no answer in time")
            await wait_for_event(self._changed, _REFUSED_PAUSE_SECONDS)
            return False
        self._keep(stored, began)
        return True

    async def _hold(self, lead: Callable[[], Coroutine[None, None, None]]) -> None:
        """Lead until the Lease is lost or this is canceled."""
        _log.info("leads from now on", extra=fields(name=self._identity))
        try:
            async with asyncio.TaskGroup() as group:
                leading = group.create_task(lead(), name="leader")
                renewing = group.create_task(self._renew_until_lost(), name="lease renewal")
                await asyncio.wait({leading, renewing}, return_when=asyncio.FIRST_COMPLETED)
                leading.cancel()
                renewing.cancel()
        finally:
            await self._release()
            _log.info("leads no longer", extra=fields(name=self._identity))

    async def _renew_until_lost(self) -> None:
        """Renew the Lease in time; return once it is lost."""
        pause_seconds = self._duration_seconds / _RENEWALS_A_LEASE
        while True:
            await self._clock.sleep(min(pause_seconds, self._seconds_left))
            try:
                renewed = await self._renew()
            except (KubeError, TimeoutError) as e:
                _log.warning("the Lease %s cannot be renewed: %s", DISPATCHER_LEASE, str(e) or "no answer in time")
                if not self.may_write:
                    return
                pause_seconds = self._duration_seconds / _TRIES_A_LEASE
                continue
            if not renewed:
                _log.warning("another agent took the Lease %s", DISPATCHER_LEASE)
                self._held = None
                return
            pause_seconds = self._duration_seconds / _RENEWALS_A_LEASE

    async def _renew(self) -> bool:
        """Renew the Lease once; return False where it is another's by now.

        Raises:
            KubeError: the API server refused.
            TimeoutError: no answer came while renewing still makes sense.
        """
        if self._held is None:
            return False
        began = self._clock.monotonic()
        spec = {"renewTime": _format_micro_time(self._clock.now())}
        # A process that was stopped for long still gets one try: nobody else may want to lead.
        least_seconds = self._duration_seconds / _TRIES_A_LEASE
        limit_seconds = min(self._duration_seconds / _RENEWALS_A_LEASE, max(self._seconds_left, least_seconds))
        async with asyncio.timeout(limit_seconds):
            try:
                stored = await self._patch(self._held.uid, self._held.resource_version, spec)
            except ConflictError:
                # Perhaps by a renewal of our own whose answer was lost.
                lease = await self._client.read(LEASES, self._namespace, DISPATCHER_LEASE)
                if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self._identity:
                    return False
                meta = lease["metadata"]
                stored = await self._patch(meta["uid"], meta["resourceVersion"], spec)
        self._keep(stored, began)
        return True

    async def _release(self) -> None:
        """Give the Lease back if it is still ours, so that a stand-by need not wait."""
        held, self._held = self._held, None
        if held is None:
            return
        spec = {"holderIdentity": "", "renewTime": _format_micro_time(self._clock.now())}
        deadline = Deadline.after(self._clock, timedelta(seconds=_RELEASE_SECONDS))
        try:
            await run_shielded(
                lambda: self._patch(held.uid, held.resource_version, spec), name="lease release", deadline=deadline
            )
        except (KubeError, TimeoutError) as e:
            _log.warning("the Lease %s runs out by itself: %s", DISPATCHER_LEASE, str(e) or "no answer in time")

    async def _patch(self, uid: str, resource_version: str, spec: JsonDict) -> JsonDict:
        patch = {"metadata": {"uid": uid, "resourceVersion": resource_version}, "spec": spec}
        return await self._client.patch(LEASES, self._namespace, DISPATCHER_LEASE, patch)

    def _keep(self, stored: JsonDict, began_seconds: float) -> None:
        """Note a write of ours that succeeded; it counts from when it was begun."""
        meta = stored["metadata"]
        self._held = _Held(meta["uid"], meta["resourceVersion"], began_seconds)


def _build_lease(namespace: str, spec: JsonDict) -> JsonDict:
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": DISPATCHER_LEASE, "namespace": namespace},
        "spec": spec,
    }
