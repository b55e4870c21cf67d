"""What has become of a repository's maintenance: written to its status in Velero's form, counted and reported.

The result is stored before the Job is deleted. Everything here may run twice.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from core.contract import MaintenanceMode, MaintenanceResult
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.base import JsonDict, format_time
from core.models.names import MAINTENANCE_ANNOTATION, REPOSITORY_ID_ANNOTATION
from core.models.storage import BackupRepository, MaintenanceEntry, MaintenanceOutcome
from core.redact import redact
from core.snapshot_contract import SnapshotReport
from nodeagent.leader.context import Cluster
from nodeagent.maintenance.jobs import JobEnd, MaintenanceJob
from nodeagent.maintenance.record import MaintenanceRecord, RunningJob, after_failure, after_success
from nodeagent.maintenance.rules import merge_history, record_of
from nodeagent.metrics.table import MAINTENANCE_DURATION, MAINTENANCE_FAILURE, MAINTENANCE_FOREIGN, MAINTENANCE_SUCCESS

__all__ = ["HistoryWriter", "starts_of"]

_MESSAGE_LIMIT: Final = 1000
"""Characters of a failure: 25 of them are in each BackupRepository."""


class HistoryWriter:
    """The only writer of maintenance results."""

    def __init__(self, cluster: Cluster) -> None:
        """Write to BackupRepositories of `cluster`."""
        self._cluster = cluster

    async def note_started(self, repository: BackupRepository, running: RunningJob) -> None:
        """Store that a Job was created: so its loss is noticed, also by another leader."""
        await self._patch(repository, replace(record_of(repository), running=running))

    async def note_ended(self, repository: BackupRepository) -> None:
        """Store that no Job runs: a Velero server has stored the end of the last one, or it never began."""
        await self._patch(repository, replace(record_of(repository), running=None))

    async def write(self, repository: BackupRepository, ends: Sequence[tuple[MaintenanceJob, JobEnd]]) -> None:
        """Store the ends of Jobs, oldest first, that the history does not have; count and report them.

        Raises:
            ConflictError: the repository has changed.
            KubeError: the API server rejected the write.
        """
        record = record_of(repository)
        for job, end in ends:
            record = self._take(record, job, end)
        entries = [_shorten(end.entry) for _, end in ends if end.entry is not None]
        ids = [end.result.repository_id for _, end in ends if end.result is not None and end.result.repository_id]
        stored = await self._patch(repository, record, entries, repository_id=ids[-1] if ids else "")
        for job, end in ends:
            await self._report(stored, job, end)

    async def write_lost(self, repository: BackupRepository, running: RunningJob) -> None:
        """Store that the Job was deleted before it ended.

        Raises:
            ConflictError: the repository has changed.
            KubeError: the API server rejected the write.
        """
        job = MaintenanceJob.of_lost(running, repository.uid)
        await self.write(repository, [(job, JobEnd(job.failure("it was deleted before it ended")))])

    def _take(self, record: MaintenanceRecord, job: MaintenanceJob, end: JobEnd) -> MaintenanceRecord:
        """Return the record after the end of a Job."""
        now = self._cluster.now()
        if not job.ours:
            # It says nothing but whether it succeeded; kopia's own schedule has the rest.
            return record
        known = record.running is not None and record.running.uid == job.uid
        running = record.running if known else None
        record = replace(record, running=None)
        if end.entry is not None and end.entry.result is MaintenanceOutcome.FAILED:
            inputs = running.inputs if running is not None else ""
            return after_failure(record, end.cause, inputs=inputs, limit_bytes=end.limit_bytes, at=now)
        fingerprint = running.fingerprint if running is not None else record.fingerprint
        result = end.result or MaintenanceResult(mode=MaintenanceMode.NONE)
        return after_success(record, result, fingerprint=fingerprint, at=now)

    async def _patch(
        self,
        repository: BackupRepository,
        record: MaintenanceRecord,
        entries: Sequence[MaintenanceEntry] = (),
        *,
        repository_id: str = "",
    ) -> BackupRepository:
        """Write to a repository that has not changed; return it as stored."""
        meta, status = repository.metadata, repository.status
        annotations = {MAINTENANCE_ANNOTATION: record.to_json()}
        if repository_id and REPOSITORY_ID_ANNOTATION not in meta.annotations:
            # A Velero server made it Ready.
            annotations[REPOSITORY_ID_ANNOTATION] = repository_id
        change: JsonDict = {"metadata": {"annotations": annotations}}
        if entries:
            merged = merge_history(status.recent_maintenance, entries)
            change["status"] = {"recentMaintenance": [_to_wire(entry) for entry in merged]}
            ended = [entry.complete_timestamp for entry in entries if entry.result is MaintenanceOutcome.SUCCEEDED]
            if last := max(filter(None, (*ended, status.last_maintenance_time)), default=None):
                change["status"]["lastMaintenanceTime"] = format_time(last)
        self._cluster.check_leading()
        return BackupRepository.parse(await self._cluster.client.patch_if_unchanged(BACKUP_REPOSITORIES, meta, change))

    async def _report(self, repository: BackupRepository, job: MaintenanceJob, end: JobEnd) -> None:
        cluster, result = self._cluster, end.result
        if result is not None:
            await self._report_snapshots(repository, job, result)
        if end.entry is None:
            if result is not None and result.held:
                cluster.metrics.inc(MAINTENANCE_FOREIGN, repository.name)
                await cluster.events.record(repository, "MaintenanceHeld", result.reason, warning=True)
            return
        if end.entry.result is MaintenanceOutcome.FAILED:
            cluster.metrics.inc(MAINTENANCE_FAILURE, repository.name)
            message = redact(f"Job {job.name}: {end.entry.message}")
            await cluster.events.record(repository, "MaintenanceFailed", message, warning=True)
            return
        if job.completed is not None:
            cluster.metrics.inc(MAINTENANCE_SUCCESS, repository.name)
            seconds = (job.completed - job.created).total_seconds()
            cluster.metrics.observe(MAINTENANCE_DURATION, seconds, repository.name)
        if result is None:
            return
        text = f"{result.mode} maintenance took {result.seconds:.0f} s"
        if result.contents is not None:
            text += f": {result.index_blobs} index blobs, {result.contents} contents"
        if result.freed_bytes:
            text += f", {result.freed_bytes} bytes freed"
        await cluster.events.record(repository, "Maintained", text)
        if result.interval_differs:
            text = (
                "fullMaintenanceInterval of the BackupRepository differs from the interval of the kopia repository, "
                "which this agent did not create: not changed"
            )
            await cluster.events.record(repository, "IntervalDiffers", text, warning=True)

    async def _report_snapshots(
        self, repository: BackupRepository, job: MaintenanceJob, result: MaintenanceResult
    ) -> None:
        """Record an Event about what the snapshot report of the Job found, or why it could not judge all of them."""
        report, events = result.report or SnapshotReport(), self._cluster.events
        if doubt := result.report_error or report.unread:
            await events.record(repository, "SnapshotReportIncomplete", redact(f"Job {job.name}: {doubt}"))
        elif report.unreferenced.count:
            text = (
                f"{report.unreferenced.count} snapshots with {report.unreferenced.bytes} bytes of files belong to no "
                f"backup: the log of Job {job.name} lists them"
            )
            await events.record(repository, "SnapshotsUnreferenced", text)


def starts_of(repository: BackupRepository) -> set[datetime]:
    """Return when the Jobs of the history were created."""
    return {entry.start_timestamp for entry in repository.status.recent_maintenance if entry.start_timestamp}


def _shorten(entry: MaintenanceEntry) -> MaintenanceEntry:
    message = redact(entry.message)
    if message == entry.message and len(message) <= _MESSAGE_LIMIT:
        return entry
    return replace(entry, message=message[:_MESSAGE_LIMIT])


def _to_wire(entry: MaintenanceEntry) -> JsonDict:
    """Return the entry as Velero writes it: absent fields are left out, times are in whole seconds."""
    wire: JsonDict = {}
    if entry.result is not None:
        wire["result"] = str(entry.result)
    if entry.start_timestamp is not None:
        wire["startTimestamp"] = format_time(entry.start_timestamp)
    if entry.complete_timestamp is not None:
        wire["completeTimestamp"] = format_time(entry.complete_timestamp)
    if entry.message:
        wire["message"] = entry.message
    return wire
