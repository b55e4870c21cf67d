"""A deletion in the cluster: the Lease that allows one at a time, what it reads, and the Jobs for one location.

Without it, two commands would each take what the other one deletes for the copy that stays.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from client.backups.copies import Copy, build_copy, build_unreadable_copy
from client.backups.deletion_record import Located
from client.backups.retention import DeletionError
from client.mover_jobs import (
    JobAnswer,
    JobSubject,
    JobTimeoutError,
    JobTools,
    end_jobs,
    plan_job,
    read_location,
    run_job,
)
from core.clock import Clock, Deadline
from core.contract import parse_result
from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ConflictError, ForbiddenError
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    JOBS,
    LEASES,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    Resource,
)
from core.kube.types import Job, LeaseSpec, Object
from core.models.names import DELETIONS_LEASE, SNAPSHOT_DELETION_LABEL
from core.models.storage import BackupStorageLocation, RepositoryKey
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from core.models.units import format_duration
from core.mover_specs import DeleteSnapshots
from core.snapshot_contract import CHECKED_LINE, DELETED_LINE, CopyToCheck, DeletedSnapshot, SnapshotDeletion
from exposer.model import Owner
from nodeagent.runtime.lease import Lease

__all__ = ["DeletionGuard", "LocationJobs", "hold_deletions", "read_copies", "read_locations", "read_restoring"]

_TIMEOUT: Final = timedelta(hours=1)

_AT_ONCE: Final = 1000
"""Transfers of one Job: some 100 KiB of its command line."""


@dataclass
class LocationJobs:
    """The Jobs of one location, and what they found. `cluster` is the cluster in the tags of its snapshots.

    `unread` has why some snapshots were not looked for, by the namespace of their repository; None: of any. `faults`
    are of the copies that were checked, `ended` is the time by the clock of the last pod.
    """

    jobs: JobTools
    location: str
    cluster: str
    found: list[DeletedSnapshot] = field(default_factory=list)
    unread: dict[str | None, str] = field(default_factory=dict)
    faults: dict[CopyToCheck, str | None] = field(default_factory=dict)
    ended: datetime | None = None

    async def run(self, transfers: Iterable[Located], checks: Mapping[str, CopyToCheck] | None) -> None:
        """Run them for the transfers that are in the location.

        Args:
            transfers: those whose snapshots are to be found.
            checks: only to check, also these copies, by the UIDs of the transfers that need them; None: to delete.

        Raises:
            AgentError: a Job cannot run, failed, or has not all results in its log.
        """
        jobs = self.jobs
        location = await read_location(jobs.client, jobs.namespace, self.location)
        subject = JobSubject(Owner.of(location), "delete", RepositoryKey("", self.location), location)
        here = sorted(one for where, one in transfers if where == self.location)
        for first in range(0, len(here), _AT_ONCE):
            some = here[first : first + _AT_ONCE]
            needed = {checks[one.uid] for one in some if one.uid in checks} if checks is not None else set()
            spec = DeleteSnapshots(
                transfer=tuple(map(str, some)),
                check=tuple(map(str, sorted(needed))),
                cluster=self.cluster,
                dry_run=checks is not None,
            )
            manifest = await plan_job(jobs, subject, spec)
            self._read(await run_job(jobs, manifest, "deletion", _TIMEOUT))

    def _read(self, answer: JobAnswer) -> None:
        totals = parse_result(SnapshotDeletion, answer.message)
        for missed in totals.unread:
            key = missed.volume_namespace if totals.unread_count == len(totals.unread) else None
            self.unread[key] = f"the repository of namespace {missed.volume_namespace}: {missed.message}"
        self.found += answer.find(DELETED_LINE)
        checked = answer.find(CHECKED_LINE)
        self.faults |= {CopyToCheck(one.volume_namespace, one.snapshot_id): one.fault for one in checked}
        self.ended = totals.now


async def read_copies(client: KubeClient, namespace: str) -> AsyncIterator[Copy]:
    """Yield the volumes of all backups of ours; one that cannot be read holds its backup, and is no copy of a volume.

    Raises:
        DeletionError: a transfer is no object at all: it may be of any backup.
        KubeError: the API server rejected a request.
    """
    for resource, model in ((DATA_UPLOADS, DataUpload), (POD_VOLUME_BACKUPS, PodVolumeBackup)):
        async for raw in _read_all(client, resource, namespace):
            try:
                copy = build_copy(model.parse(raw))
            except ContractError as e:
                copy = build_unreadable_copy(resource.kind, raw, str(e))
            if copy is not None:
                yield copy


async def read_restoring(client: KubeClient, namespace: str) -> AsyncIterator[tuple[str, str]]:
    """Yield the snapshots that restores name which have not ended, and the restores.

    Raises:
        DeletionError: a restore is no object at all.
        ContractError: one is invalid: it may name any snapshot.
        KubeError: the API server rejected a request.
    """
    async for raw in _read_all(client, DATA_DOWNLOADS, namespace):
        download = DataDownload.parse(raw)
        if not download.phase.final:
            yield download.spec.snapshot_id, f"DataDownload {download.name}"
    async for raw in _read_all(client, POD_VOLUME_RESTORES, namespace):
        restore = PodVolumeRestore.parse(raw)
        if not restore.phase.final:
            yield restore.spec.snapshot_id, f"PodVolumeRestore {restore.name}"


async def read_locations(client: KubeClient, namespace: str) -> dict[str, str | None]:
    """Return why nothing may be deleted in each location that exists, by its name; None: something may.

    Raises:
        KubeError: the API server rejected a request.
    """
    found: dict[str, str | None] = {}
    for raw in await client.list(Selection(BACKUP_STORAGE_LOCATIONS, namespace)):
        name = raw["metadata"]["name"]
        try:
            location = BackupStorageLocation.parse(raw)
        except ContractError as e:
            why: str | None = f"cannot be read: {e}"
        else:
            closed = "is read-only" if location.read_only else None
            why = closed if location.available else f"is {location.status.phase}"
        found[name] = f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{name} {why}" if why else None
    return found


async def _read_all(client: KubeClient, resource: Resource, namespace: str) -> AsyncIterator[Object]:
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise DeletionError(f"a {resource.kind} in namespace {namespace} is malformed: nothing is deleted")
        for raw in page.items:
            yield raw


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
