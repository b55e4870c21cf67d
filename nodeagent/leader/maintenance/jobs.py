"""The Jobs of a repository, from a pod that the API server accepts to their place in the history.

The pod is tried by a dry run first: a Job whose pod is rejected never ends.

Every step starts from what the API server has, and may run twice. A Job gets the label by which a Velero server sees it
only once its pod runs, and no Job with that label is deleted before its end. Its result is stored before it is deleted:
in the repository's status, in Velero's form.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from msgspec import structs

from core.clock import Clock
from core.contract import MaintenanceMode, MaintenanceResult
from core.errors import ExposeError, RepositoryError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, InvalidError, KubeError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, JOBS, PODS
from core.kube.types import Manifest, Pod
from core.kube.velero_server import ServerAbsence
from core.logs import fields
from core.models import names
from core.models.base import JsonDict, format_time
from core.models.storage import (
    CACHE_LIMIT_KEY,
    DEFAULT_CACHE_LIMIT_MIB,
    BackupRepository,
    BackupStorageLocation,
    MaintenanceEntry,
    MaintenanceOutcome,
    RepositoryKey,
)
from core.models.units import parse_count
from core.redact import redact
from core.snapshot_contract import SnapshotReport
from exposer.causes import CauseFinder
from exposer.model import Owner
from exposer.ownership import NO_PRIORITY_CLASS
from exposer.pods import JobSettings, MaintenanceRun
from exposer.settings import StorageAccess
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.leader.context import Cluster
from nodeagent.maintenance.jobs import (
    SUSPENDED,
    JobEnd,
    MaintenanceJob,
    RepositoryJobs,
    has_started,
    list_jobs,
    may_write,
    read_pod,
)
from nodeagent.maintenance.record import MaintenanceRecord, RunningJob, after_failure, after_success
from nodeagent.maintenance.restore_tests import without_future
from nodeagent.maintenance.rules import CLOCKS, Decision, Memory, merge_history, record_of
from nodeagent.metrics import MAINTENANCE_DURATION, MAINTENANCE_FAILURE, MAINTENANCE_FOREIGN, MAINTENANCE_SUCCESS
from nodeagent.runtime.workqueue import Requeue, Timers

_MESSAGE_LIMIT: Final = 1000
"""Characters of a failure: 25 of them are in each BackupRepository."""


class HistoryWriter:
    """The only writer of maintenance results."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def note_running(self, repository: BackupRepository, running: RunningJob | None) -> None:
        """Store that a Job was created, so that its loss is noticed, also by another leader.

        None: no Job runs. A Velero server has stored the end of the last one, or it never began.
        """
        await self._patch(repository, structs.replace(record_of(repository), running=running))

    async def write(self, repository: BackupRepository, ends: Sequence[tuple[MaintenanceJob, JobEnd]]) -> None:
        """Store the ends of Jobs, oldest first, that the history lacks; ConflictError: the repository has changed."""
        record = record_of(repository)
        for job, end in ends:
            record = self._take(record, job, end)
        entries = [_shorten(end.entry) for _, end in ends if end.entry is not None]
        ids = [end.result.repository_id for _, end in ends if end.result is not None and end.result.repository_id]
        stored = await self._patch(repository, record, entries, repository_id=ids[-1] if ids else None)
        for job, end in ends:
            await self._report(stored, job, end)

    def _take(self, record: MaintenanceRecord, job: MaintenanceJob, end: JobEnd) -> MaintenanceRecord:
        now = self._cluster.now()
        if not job.ours:
            # It says nothing but whether it succeeded; kopia's own schedule has the rest.
            return record
        running = record.running if record.running is not None and record.running.uid == job.uid else None
        record = structs.replace(record, running=None)
        if end.entry is not None and end.entry.result is MaintenanceOutcome.FAILED:
            inputs = running.inputs if running is not None else None
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
        repository_id: str | None = None,
    ) -> BackupRepository:
        """Write to a repository that has not changed; return it as stored."""
        meta, status = repository.metadata, repository.status
        annotations = {names.MAINTENANCE_ANNOTATION: record.to_json()}
        if repository_id and names.REPOSITORY_ID_ANNOTATION not in meta.annotations:
            # A Velero server made it Ready.
            annotations[names.REPOSITORY_ID_ANNOTATION] = repository_id
        change: JsonDict = {"metadata": {"annotations": annotations}}
        if entries:
            merged = merge_history(status.recent_maintenance, entries)
            change["status"] = {"recentMaintenance": [entry.to_wire() for entry in merged]}
            ended = [entry.complete_timestamp for entry in entries if entry.result is MaintenanceOutcome.SUCCEEDED]
            known = without_future(status.last_maintenance_time, self._cluster.now() + CLOCKS)
            if last := max(filter(None, (*ended, known)), default=None):
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
                await cluster.events.record(repository, "MaintenanceHeld", result.reason or "", warning=True)
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


def had_end(repository: BackupRepository, created: datetime, now: datetime) -> bool:
    """Return whether the history has, or had, the end of the Job that was created then.

    A Velero server keeps 3 entries, and may keep more Jobs.
    """
    starts = starts_of(repository)
    return created in starts or created < min((start for start in starts if start <= now + CLOCKS), default=created)


def _shorten(entry: MaintenanceEntry) -> MaintenanceEntry:
    return structs.replace(entry, message=entry.message and redact(entry.message)[:_MESSAGE_LIMIT])


ReadSettings = Callable[[RepositoryKey], Awaitable[MaintenanceSettings]]
"""Returns what applies to the Jobs of a repository."""

_log = logging.getLogger(__name__)

STEP_SECONDS: Final = 5.0
"""Between two steps of a repository that something is done about."""

LOOK_AGAIN_SECONDS: Final = 60.0
"""Between two decisions about a repository, whatever the last one said: what it depends on is not all watched."""

START_SECONDS: Final = 600.0
"""How long the pod of a Job may take to run; the Job, which no server sees, is deleted then."""

HELD_SECONDS: Final = 300.0
"""Between two looks at what holds a Job that is due: each costs half a dozen requests."""

_ABANDONED_SECONDS: Final = 3600.0
"""How long a Job of a Velero server that is gone may have no pod."""


class PodRejectedError(RepositoryError):
    """The API server rejects the pod of the Job: a quota, or an admission webhook."""


class Places:
    """The places of Jobs that run at a time, for all repositories; `taking` is held by what takes one."""

    def __init__(self, clock: Clock, settings: ReadSettings) -> None:
        self.taking = asyncio.Lock()
        self._clock = clock
        self._settings = settings
        self._read_again_seconds = -math.inf
        self._most = MaintenanceSettings.max_concurrent_jobs

    async def count(self, key: RepositoryKey) -> int:
        """Return how many there are, as last read with any repository's settings, at most every five minutes.

        Where they cannot be read, the last number counts: what takes a place reads them again.
        """
        now = self._clock.monotonic()
        if now >= self._read_again_seconds:
            self._read_again_seconds = now + HELD_SECONDS
            try:
                self._most = (await self._settings(key)).max_concurrent_jobs
            except KubeError as e:
                _log.debug("the number of Jobs that may run cannot be read, will retry: %s", e)
        return self._most


async def read_before_start(
    client: KubeClient, namespace: str, repository: BackupRepository, settings: ReadSettings
) -> tuple[RepositoryJobs, BackupStorageLocation | None, MaintenanceSettings] | None:
    """Return all Jobs, the location, and what applies to a Job that starts; None: a change is not observed yet."""
    jobs = await list_jobs(client, namespace)
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, repository.spec.backup_storage_location)
    location = BackupStorageLocation.parse(raw) if raw is not None else None
    active = await settings(repository.key)
    fresh = BackupRepository.parse(await client.get(BACKUP_REPOSITORIES, namespace, repository.name))
    if fresh.metadata.resource_version != repository.metadata.resource_version:
        return None
    return jobs, location, active


def look_again(decision: Decision, now: datetime, seconds: float = LOOK_AGAIN_SECONDS) -> Requeue:
    """Return when to decide again: in `seconds`, or once what was decided until a time has passed."""
    if decision.wait_until is not None:
        seconds = max(1.0, min(seconds, (decision.wait_until - now).total_seconds()))
    return Requeue(seconds)


async def create_tried(client: KubeClient, manifest: Manifest, check_leading: Callable[[], None]) -> MaintenanceJob:
    """Create the Job of this manifest, whose pod is tried first, and return it.

    Raises:
        AlreadyExistsError: a Job of that name exists: another leader created it.
        PodRejectedError: the API server rejects its pod.
        KubeError: the API server rejected a request for another reason.
    """
    manifest = await _try_pod(client, manifest)
    check_leading()
    return MaintenanceJob.parse(await client.create(JOBS, manifest))


def plan_run(
    name: str, repository: BackupRepository, location: BackupStorageLocation, job: JobSettings, memory: Memory
) -> MaintenanceRun:
    """Return what a Job of that `name` is built from; it gets `memory` unless the settings `job` say otherwise."""
    limit_mib = parse_count(repository.spec.repository_config.get(CACHE_LIMIT_KEY, ""))
    return MaintenanceRun(
        owner=Owner.of(repository),
        name=name,
        settings=job if job.resources is not None else replace(job, resources=memory.resources),
        storage=StorageAccess.of(location),
        cache_limit_mib=limit_mib or DEFAULT_CACHE_LIMIT_MIB,
    )


async def _try_pod(client: KubeClient, manifest: Manifest) -> Manifest:
    """Return the Job's manifest if the API server accepts its pod, without a priority class that does not exist."""
    meta, template = manifest["metadata"], manifest["spec"]["template"]
    name = {"name": meta["name"], "namespace": meta["namespace"]}
    extra = fields(kind=JOBS.kind, **name)
    try:
        await client.try_create(PODS, PODS.build(template["metadata"] | name, spec=template["spec"]))
    except (ForbiddenError, InvalidError) as e:
        priority_class = template["spec"].get("priorityClassName", "")
        if not priority_class or NO_PRIORITY_CLASS not in str(e):
            raise PodRejectedError(f"the pod of Job {meta['namespace']}/{meta['name']} is rejected: {e}") from e
        _log.warning("PriorityClass %s does not exist, creating the Job without it: %s", priority_class, e, extra=extra)
        spec = {key: value for key, value in template["spec"].items() if key != "priorityClassName"}
        manifest = manifest | {"spec": manifest["spec"] | {"template": template | {"spec": spec}}}
        return await _try_pod(client, manifest)
    return manifest


async def explain_start(causes: CauseFinder, job: MaintenanceJob, pod: Pod | None) -> str:
    """Return that the pod of the Job did not start in time, and why; None: it has none."""
    cause = SUSPENDED if job.suspended else "the Job controller did not create it"
    if pod is not None:
        try:
            pending = await causes.explain(pod)
            cause = pending.message if pending is not None else "it is pending"
        except ExposeError as e:
            cause = str(e)
    return f"the pod of the Job did not start within {timedelta(seconds=START_SECONDS)}: {cause}"


class JobAttendant:
    """Attends the Jobs of all repositories of a namespace during one term of this leader."""

    def __init__(
        self, cluster: Cluster, causes: CauseFinder, *, history: HistoryWriter, absence: ServerAbsence, namespace: str
    ) -> None:
        self._cluster = cluster
        self._causes = causes
        self._history = history
        self._absence = absence
        self._namespace = namespace
        self._ages = Timers(cluster.clock)

    def forget(self, name: str) -> None:
        """Drop what is remembered about a repository that was deleted."""
        self._ages.forget(name)

    async def attend(self, repository: BackupRepository, job: MaintenanceJob) -> Requeue:
        """Label the Job once its pod runs; delete one whose pod never comes."""
        cluster = self._cluster
        seconds = self._ages.seconds(repository.name, f"{job.uid} {job.suspended}")
        running = record_of(repository).running
        if job.ours and (running is None or running.uid != job.uid) and job.created not in starts_of(repository):
            # An earlier leader created it, and could not store that.
            await self._history.note_running(repository, RunningJob(name=job.name, uid=job.uid, created=job.created))
            return Requeue(STEP_SECONDS)
        if job.labeled and job.ours and not job.suspended:
            # It ends by itself: its pod has a deadline, and so has the Job.
            return Requeue(LOOK_AGAIN_SECONDS)
        pod = await read_pod(cluster.client, self._namespace, job.name)
        if not job.ours:
            if pod is None and seconds >= _ABANDONED_SECONDS and not await self._absence.look():
                await self.delete(job)
            return Requeue(LOOK_AGAIN_SECONDS)
        if job.created in starts_of(repository):
            # It was given up.
            await self.delete(job)
            return Requeue(STEP_SECONDS)
        if not has_started(pod):
            if seconds < START_SECONDS:
                return Requeue(STEP_SECONDS)
            message = await explain_start(self._causes, job, pod)
            await self._history.write(repository, [(job, JobEnd(job.failure(message)))])
            await self.delete(job)
            return Requeue(STEP_SECONDS)
        if job.labeled:
            return Requeue(STEP_SECONDS)
        jobs = await list_jobs(cluster.client, self._namespace)
        others = [one for one in jobs.of(repository) if not one.ended and one.uid != job.uid]
        if any(one.labeled for one in others) or await self._absence.look():
            # Its pod ends by itself without the label.
            return Requeue(STEP_SECONDS)
        cluster.check_leading()
        meta = {"uid": job.uid, "labels": {names.REPO_NAME_LABEL: names.repo_name_label(repository.name)}}
        await cluster.client.patch(JOBS, self._namespace, job.name, {"metadata": meta})
        return Requeue(LOOK_AGAIN_SECONDS)

    async def look_for(self, repository: BackupRepository, running: RunningJob) -> Requeue:
        """Store the loss of a Job that was deleted before it ended, once its pod is gone."""
        if had_end(repository, running.created, self._cluster.now()):
            # A Velero server has stored its end.
            await self._history.note_running(repository, None)
            return Requeue(STEP_SECONDS)
        raw = await self._cluster.client.read(JOBS, self._namespace, running.name)
        if raw is not None and raw["metadata"]["uid"] == running.uid:
            # Not observed yet.
            return Requeue(STEP_SECONDS)
        if may_write(await read_pod(self._cluster.client, self._namespace, running.name)):
            return Requeue(STEP_SECONDS)
        job = MaintenanceJob(running.name, running.uid, running.created, owner_uid=repository.uid, ended=True)
        await self._history.write(repository, [(job, JobEnd(job.failure("it was deleted before it ended")))])
        return Requeue(STEP_SECONDS)

    async def delete(self, job: MaintenanceJob) -> None:
        """Delete the Job as it was observed; one that a Velero server sees is left to the server."""
        if job.labeled and await self._absence.look():
            return
        self._cluster.check_leading()
        client = self._cluster.client
        await client.delete(JOBS, self._namespace, job.name, uid=job.uid, resource_version=job.version)
        _log.debug("deleted Job %s", job.name)
