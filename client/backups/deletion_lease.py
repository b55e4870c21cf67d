"""One deletion of backups at a time in an installation: the Lease that the command holds which deletes.

Without it, two commands would each take what the other one deletes for the copy that stays.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from client.backups.retention import DeletionError
from client.mover_jobs import JobTimeoutError, JobTools, end_jobs
from core.clock import Clock, Deadline
from core.errors import AgentError
from core.kube.client import Selection
from core.kube.errors import ConflictError, ForbiddenError
from core.kube.resources import JOBS, LEASES
from core.kube.types import Job, LeaseSpec
from core.models.names import DELETIONS_LEASE, SNAPSHOT_DELETION_LABEL
from core.models.units import format_duration
from nodeagent.runtime.lease import Lease

__all__ = ["DeletionGuard", "hold_deletions"]

_DURATION: Final = timedelta(seconds=60)
"""What a command that was killed keeps others waiting."""

_LONGEST_SLEEP: Final = timedelta(seconds=15)
"""Of a machine that holds the Lease: less than is left once it must have been renewed."""

_LONGEST_WAIT: Final = timedelta(hours=2)
"""For another command: longer than a Job of its may take."""

_ENDED_WITHIN: Final = timedelta(minutes=5)
_POLL_SECONDS: Final = 2.0


@dataclass
class DeletionGuard:
    """The Lease while it is held."""

    lease: Lease
    clock: Clock

    def __post_init__(self) -> None:
        self._ahead_seconds = self._read_ahead()

    def _read_ahead(self) -> float:
        """Return how far the wall clock is ahead of the monotonic one, which stands still while the machine sleeps."""
        return self.clock.now().timestamp() - self.clock.monotonic()

    def check(self) -> None:
        """Check that the Lease was renewed lately; called before each request that deletes.

        Raises:
            DeletionError: another command may delete now.
        """
        # A clock that was set hides how long it slept.
        slept_seconds = abs(self._read_ahead() - self._ahead_seconds)
        if not self.lease.may_write or slept_seconds > _LONGEST_SLEEP.total_seconds():
            raise DeletionError(f"Lease {DELETIONS_LEASE} was lost, another command may delete: repeat the command")

    async def confirm(self) -> None:
        """Renew the Lease; called before each part.

        Raises:
            DeletionError: another command may delete now.
        """
        ahead_seconds = self._read_ahead()
        try:
            renewed = await self.lease.renew()
        except (AgentError, TimeoutError) as e:
            raise DeletionError(f"Lease {DELETIONS_LEASE} cannot be renewed: {str(e) or 'timed out'}") from e
        if not renewed:
            raise DeletionError(f"Lease {DELETIONS_LEASE} was lost, another command deletes: repeat the command")
        self._ahead_seconds = ahead_seconds


@asynccontextmanager
async def hold_deletions(jobs: JobTools) -> AsyncIterator[DeletionGuard]:
    """Wait for the Lease, end what is left of its last holder, and hold it in the block.

    Raises:
        DeletionError: the user may not hold it, or another command did not end in time.
        KubeError: the API server rejected a request.
    """
    identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    lease = Lease(jobs.client, jobs.clock, (jobs.namespace, DELETIONS_LEASE), identity=identity, duration=_DURATION)
    await _acquire(jobs, lease)
    renewing = asyncio.create_task(lease.renew_until_lost(), name="renewal of the Lease of deletions")
    try:
        await _end_jobs(jobs)
        yield DeletionGuard(lease, jobs.clock)
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await lease.release()


async def _acquire(jobs: JobTools, lease: Lease) -> None:
    clock, deadline, client = jobs.clock, Deadline.after(jobs.clock, _LONGEST_WAIT), jobs.client.patiently()
    last_holder, seen, since_seconds = "", "", clock.monotonic()
    while True:
        try:
            observed = await client.read(LEASES, jobs.namespace, DELETIONS_LEASE)
            spec: LeaseSpec = (observed.get("spec") or {}) if observed else {}
            holder = spec.get("holderIdentity", "")
            version = observed["metadata"]["resourceVersion"] if observed else ""
            if not holder or (version == seen and clock.monotonic() >= since_seconds + _promised_seconds(spec)):
                await lease.acquire(observed)
                return
        except ForbiddenError as e:
            raise DeletionError(
                f"nothing is deleted, since one command may delete at a time, and knows it by a Lease: {e}; nodeagent "
                "schedule renew, or applying its files again, gives a schedule this permission"
            ) from e
        except ConflictError:
            continue
        except TimeoutError as e:
            raise DeletionError(f"nothing is deleted: Lease {DELETIONS_LEASE} cannot be acquired in time") from e
        if version != seen:
            seen, since_seconds = version, clock.monotonic()
        if holder != last_holder:
            last_holder, deadline = holder, Deadline.after(clock, _LONGEST_WAIT)
            jobs.on_progress(f"waiting for another command that deletes backups: {holder}")
        if deadline.expired:
            raise DeletionError(
                f"nothing is deleted: {holder} has deleted backups for {format_duration(_LONGEST_WAIT)}"
            )
        await clock.sleep(_POLL_SECONDS)


def _promised_seconds(spec: LeaseSpec) -> float:
    return min(float(spec.get("leaseDurationSeconds") or 0), _DURATION.total_seconds())


async def _end_jobs(jobs: JobTools) -> None:
    """End the Jobs that delete snapshots: their commands do not hold the Lease any more.

    Raises:
        DeletionError: the pod of one does not end.
    """
    found = await jobs.client.list(Selection(JOBS, jobs.namespace, label_selector=SNAPSHOT_DELETION_LABEL))
    try:
        await end_jobs(jobs, [one for one in found if not _only_checks(one)], _ENDED_WITHIN)
    except JobTimeoutError as e:
        raise DeletionError(f"nothing is deleted: {e}") from e


def _only_checks(job: Job) -> bool:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return "--dry-run" in (container.get("args") or [])
