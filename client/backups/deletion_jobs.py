"""What a deletion reads of the cluster, and the Jobs that check or delete snapshots in one location."""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from client.backups.copies import Copy, build_copy, build_unreadable_copy
from client.backups.deletion_record import Located
from client.backups.retention import DeletionError
from client.mover_jobs import JobAnswer, JobSubject, JobTools, plan_job, read_location, run_job
from core.contract import parse_result
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    Resource,
)
from core.kube.types import Object
from core.models.storage import BackupStorageLocation, RepositoryKey
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from core.mover_specs import DeleteSnapshots
from core.snapshot_contract import CHECKED_LINE, DELETED_LINE, CopyToCheck, DeletedSnapshot, SnapshotDeletion
from exposer.model import Owner

__all__ = ["LocationJobs", "read_copies", "read_locations", "read_restoring"]


_TIMEOUT: Final = timedelta(hours=1)

_AT_ONCE: Final = 1000
"""Transfers of one Job: some 100 KiB of its command line."""


@dataclass
class LocationJobs:
    """The Jobs of one location, and what they found. `cluster` is the cluster in the tags of its snapshots.

    `unread` has why some snapshots were not looked for, by the namespace of their repository; empty: of any. `faults`
    are of the copies that were checked, `ended` is the time by the clock of the last pod.
    """

    jobs: JobTools
    location: str
    cluster: str
    found: list[DeletedSnapshot] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    faults: dict[CopyToCheck, str] = field(default_factory=dict)
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
            key = missed.volume_namespace if totals.unread_count == len(totals.unread) else ""
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


async def read_locations(client: KubeClient, namespace: str) -> dict[str, str]:
    """Return why nothing may be deleted in each location that exists, by its name; empty: something may.

    Raises:
        KubeError: the API server rejected a request.
    """
    found = {}
    for raw in await client.list(Selection(BACKUP_STORAGE_LOCATIONS, namespace)):
        name = raw["metadata"]["name"]
        try:
            location = BackupStorageLocation.parse(raw)
        except ContractError as e:
            why = f"cannot be read: {e}"
        else:
            why = f"is {location.status.phase}" if not location.available else "is read-only"
            why = "" if location.available and not location.read_only else why
        found[name] = f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{name} {why}" if why else ""
    return found


async def _read_all(client: KubeClient, resource: Resource, namespace: str) -> AsyncIterator[Object]:
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise DeletionError(f"a {resource.kind} in namespace {namespace} is malformed: nothing is deleted")
        for raw in page.items:
            yield raw
