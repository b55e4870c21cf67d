"""The steps of one repository's maintenance: attend a Job, store how it ended, or start the next one.

Every step starts from what the API server has, and may run twice. A Job gets the label by which a Velero server sees it
only once its pod runs, and no Job with that label is deleted before its end.
"""

import hashlib
import logging
from asyncio import Lock
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from core.clock import Clock
from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, JOBS
from core.models.base import JsonDict
from core.models.names import REPO_NAME_LABEL, REPOSITORY_ID_ANNOTATION, repo_name_label
from core.models.storage import (
    BackupRepository,
    BackupStorageLocation,
    RepositoryKey,
    RepositoryPhase,
)
from core.models.units import parse_duration
from core.redact import redact
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings
from nodeagent.config.maintenance import MaintenanceSettings
from nodeagent.leader.maintenance.absence import ServerAbsence
from nodeagent.leader.maintenance.history import HistoryWriter, record_of
from nodeagent.leader.maintenance.jobs import JobEnd, MaintenanceJob, describe_end, jobs_of, read_pod
from nodeagent.leader.maintenance.launch import JobRequest, PodRejectedError, create_job
from nodeagent.leader.maintenance.record import RunningJob
from nodeagent.leader.maintenance.rules import (
    Decision,
    Hold,
    MaintenanceView,
    count_failures,
    decide_maintenance,
    job_name,
    location_state,
    slot_of,
)
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.settings import MaintenanceSwitch
from nodeagent.runtime.timers import Timers
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import EventLog

__all__ = ["MaintenanceSteps", "MaintenanceTools"]

_log = logging.getLogger(__name__)

_DEFAULT_FREQUENCY: Final = timedelta(hours=1)

_STEP_SECONDS: Final = 5.0
_LOOK_AGAIN_SECONDS: Final = 60.0
"""Between two decisions about a repository, whatever the last one said: what it depends on is not all watched."""

_HELD_SECONDS: Final = 300.0
"""Between two looks at what holds a maintenance that is due: each costs half a dozen requests."""

_START_SECONDS: Final = 600.0
"""How long the pod of a Job may take to run; the Job, which no server sees, is deleted then."""

_WATCHED: Final = frozenset({Hold.JOB_UNFINISHED, Hold.CONCURRENCY, Hold.NOT_OBSERVED})
"""Holds whose end is observed without further reads."""

_ABANDONED_SECONDS: Final = 3600.0
"""How long a Job of a Velero server that is gone may have no pod."""


@dataclass(frozen=True)
class MaintenanceTools:
    """What maintenance works with.

    `now` is the wall clock, corrected by the API server's. `backups` returns the UIDs of a repository's finished
    backups, None before they are known, and `inputs` the hash of what decides whether the repositories of a location
    can be opened. `settings` returns what applies to a repository's Jobs. `check_leading` raises unless it may write
    now.
    """

    client: KubeClient
    clock: Clock
    events: EventLog
    metrics: Metrics
    causes: CauseFinder
    expose_settings: Callable[[], ExposeSettings]
    settings: Callable[[RepositoryKey], Awaitable[MaintenanceSettings]]
    inputs: Callable[[str], Awaitable[str]]
    backups: Callable[[RepositoryKey], Iterable[str] | None]
    now: Callable[[], datetime]
    check_leading: Callable[[], None]


class MaintenanceSteps:
    """Takes the steps of all repositories of a namespace during one term of this leader."""

    def __init__(
        self,
        tools: MaintenanceTools,
        history: HistoryWriter,
        absence: ServerAbsence,
        *,
        namespace: str,
        switch: MaintenanceSwitch,
    ) -> None:
        """Maintain the repositories of `namespace` as `switch` says."""
        self._tools = tools
        self._history = history
        self._absence = absence
        self._namespace = namespace
        self._switch = switch
        self._ages = Timers(tools.clock)
        self._held: dict[str, tuple[float, Decision]] = {}
        self._reported: dict[str, str] = {}
        self._kept: dict[str, int] = {}
        self._inputs: dict[str, tuple[float, str]] = {}
        # Two repositories must not both take the last place of maxConcurrentJobs.
        self._launching = Lock()
        self._most = MaintenanceSettings().max_concurrent_jobs

    def forget(self, name: str) -> None:
        """Drop what is remembered about a repository that was deleted."""
        self._ages.forget(name)
        self._held.pop(name, None)
        self._kept.pop(name, None)
        self._reported.pop(name, None)

    async def step(self, repository: BackupRepository, jobs: list[JsonDict]) -> tuple[Requeue, Decision]:
        """Take one step for the repository; return when to look again, and what was decided.

        Args:
            repository: as last observed; each write fails if it has changed since.
            jobs: all Jobs of the namespace, as last observed.
        """
        own = jobs_of(repository, jobs)
        if self._absence.server:
            return await self._leave_to_server(repository, own), Decision(Hold.SERVER)
        ended = [job for job in own if job.ended]
        if requeue := await self._store_ends(repository, ended):
            return requeue, Decision(Hold.JOB_UNFINISHED)
        # One that has its label runs already; the others must not.
        unfinished = sorted((job for job in own if not job.ended), key=lambda job: not job.labeled)
        if unfinished:
            return await self._attend(repository, unfinished[0]), Decision(Hold.JOB_UNFINISHED)
        running = record_of(repository).running
        if running is not None:
            return await self._look_for(repository, running), Decision(Hold.JOB_UNFINISHED)
        return await self._decide(repository, jobs)

    async def _leave_to_server(self, repository: BackupRepository, jobs: list[MaintenanceJob]) -> Requeue:
        """Delete a Job that the server does not see and whose pod waits for the label; everything else is its own."""
        for job in jobs:
            if job.ours and not job.labeled and not job.ended:
                await self._delete(job)
        if self._switch is MaintenanceSwitch.ON:
            text = "a Velero server is in the namespace: it maintains the repository, in spite of --repo-maintenance=on"
            await self._report_once(repository, "MaintenanceHeld", text)
        return Requeue(_LOOK_AGAIN_SECONDS)

    async def _store_ends(self, repository: BackupRepository, ended: list[MaintenanceJob]) -> Requeue | None:
        """Store the ends that the history lacks, then delete the Jobs that are no longer kept; None: all is done."""
        starts = _starts_of(repository)
        # A Velero server keeps 3 entries, and may keep more Jobs.
        new = [job for job in ended if job.created not in starts and job.created >= min(starts, default=job.created)]
        if new:
            ends = [
                (job, describe_end(job, await read_pod(self._tools.client, self._namespace, job.name))) for job in new
            ]
            await self._history.write(repository, ends, inputs=await self._read_inputs(repository))
            self._kept.pop(repository.name, None)
            for job, end in ends:
                if end.entry is None:
                    # A server that comes later would take it for a maintenance that succeeded.
                    await self._delete(job)
            return Requeue(_STEP_SECONDS)
        if len(ended) > self._kept.get(repository.name, -1):
            settings = await self._tools.settings(_key_of(repository))
            for job in ended[: max(0, len(ended) - settings.keep_jobs)]:
                await self._delete(job)
            self._kept[repository.name] = settings.keep_jobs
        return None

    async def _attend(self, repository: BackupRepository, job: MaintenanceJob) -> Requeue:
        """Label the Job once its pod runs; delete one whose pod never comes."""
        tools = self._tools
        seconds = self._ages.seconds(repository.name, job.uid)
        running = record_of(repository).running
        if job.ours and (running is None or running.uid != job.uid) and job.created not in _starts_of(repository):
            # An earlier leader created it, and could not store that.
            found = RunningJob(name=job.name, uid=job.uid, created=job.created, fingerprint="")
            await self._history.note_started(repository, found)
            return Requeue(_STEP_SECONDS)
        if job.labeled and job.ours:
            # It ends by itself: its pod has a deadline, and so has the Job.
            return Requeue(_LOOK_AGAIN_SECONDS)
        pod = await read_pod(tools.client, self._namespace, job.name)
        if not job.ours:
            if pod is None and seconds >= _ABANDONED_SECONDS and not await self._absence.look():
                await self._delete(job)
            return Requeue(_LOOK_AGAIN_SECONDS)
        if job.created in _starts_of(repository):
            # It was given up.
            await self._delete(job)
            return Requeue(_STEP_SECONDS)
        phase = ((pod or {}).get("status") or {}).get("phase", "Pending")
        if phase == "Pending" and seconds < _START_SECONDS:
            return Requeue(_STEP_SECONDS)
        if phase == "Pending":
            await self._give_up(repository, job, pod)
            return Requeue(_STEP_SECONDS)
        jobs = await tools.client.list(Selection(JOBS, self._namespace))
        others = [one for one in jobs_of(repository, jobs) if not one.ended and one.uid != job.uid]
        if any(one.labeled for one in others) or await self._absence.look():
            # Its pod ends by itself without the label.
            return Requeue(_STEP_SECONDS)
        tools.check_leading()
        meta = {"uid": job.uid, "labels": {REPO_NAME_LABEL: repo_name_label(repository.name)}}
        await tools.client.patch(JOBS, self._namespace, job.name, {"metadata": meta})
        return Requeue(_LOOK_AGAIN_SECONDS)

    async def _give_up(self, repository: BackupRepository, job: MaintenanceJob, pod: JsonDict | None) -> None:
        """Store that the Job's pod did not start, and why; then delete the Job."""
        cause = "the Job controller did not create it"
        if pod is not None:
            try:
                pending = await self._tools.causes.explain(pod)
                cause = pending.message if pending is not None else "it is pending"
            except ExposeError as e:
                cause = str(e)
        message = f"the pod of the Job did not start within {timedelta(seconds=_START_SECONDS)}: {cause}"
        inputs = await self._read_inputs(repository)
        await self._history.write(repository, [(job, JobEnd(job.failure(message)))], inputs=inputs)
        await self._delete(job)

    async def _look_for(self, repository: BackupRepository, running: RunningJob) -> Requeue:
        """Store the loss of a Job that was deleted before it ended, once its pod is gone."""
        if running.created in _starts_of(repository):
            # A Velero server has stored its end.
            await self._history.note_ended(repository)
            return Requeue(_STEP_SECONDS)
        raw = await self._tools.client.read(JOBS, self._namespace, running.name)
        if raw is not None and raw["metadata"]["uid"] == running.uid:
            # Not observed yet.
            return Requeue(_STEP_SECONDS)
        pod = await read_pod(self._tools.client, self._namespace, running.name)
        if pod is not None and (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
            # It may still write.
            return Requeue(_STEP_SECONDS)
        inputs = await self._read_inputs(repository)
        await self._history.write_lost(repository, running, inputs=inputs)
        return Requeue(_STEP_SECONDS)

    async def _decide(self, repository: BackupRepository, jobs: list[JsonDict]) -> tuple[Requeue, Decision]:
        """Start a Job if a maintenance is due and nothing holds it."""
        backups = self._tools.backups(_key_of(repository))
        if backups is None:
            return Requeue(_STEP_SECONDS), Decision(Hold.NOT_OBSERVED)
        view = await self._view(repository, _fingerprint(backups))
        decision = decide_maintenance(replace(view, running_jobs=_count_running(jobs), max_concurrent_jobs=self._most))
        if decision.hold is None:
            decision = self._recall_hold(repository.name, view.now) or await self._start_alone(repository, view)
        await self._report_hold(repository, decision)
        seconds = _STEP_SECONDS if decision.hold is Hold.NOT_OBSERVED else _LOOK_AGAIN_SECONDS
        if decision.wait_until is not None:
            seconds = max(1.0, min(seconds, (decision.wait_until - self._tools.now()).total_seconds()))
        return Requeue(seconds), decision

    async def _view(self, repository: BackupRepository, fingerprint: str) -> MaintenanceView:
        """Return what is known without further reads; `_start` completes it."""
        record, status, now = record_of(repository), repository.status, self._tools.now()
        inputs = await self._read_inputs(repository) if record.blocked_inputs else ""
        ready_once = status.last_maintenance_time is not None or status.phase is RepositoryPhase.READY
        return MaintenanceView(
            now=now,
            created_at=repository.metadata.creation_timestamp or now,
            frequency=_frequency_of(repository),
            last_maintenance=status.last_maintenance_time,
            entries=tuple(status.recent_maintenance),
            record=record,
            fingerprint=fingerprint,
            inputs=inputs,
            switch=self._switch,
            server=self._absence.server,
            no_server_for=self._absence.lasts,
            ready_once=ready_once or REPOSITORY_ID_ANNOTATION in repository.metadata.annotations,
        )

    def _recall_hold(self, name: str, now: datetime) -> Decision | None:
        """Return what held the maintenance a few minutes ago; None: nothing did, or it may be over."""
        at_seconds, decision = self._held.get(name, (-_HELD_SECONDS, None))
        if decision is None or self._tools.clock.monotonic() - at_seconds >= _HELD_SECONDS:
            return None
        return decision if decision.wait_until is None or now < decision.wait_until else None

    async def _start_alone(self, repository: BackupRepository, view: MaintenanceView) -> Decision:
        """Start a Job while no other repository's is being started; remember what holds it."""
        async with self._launching:
            decision = await self._start(repository, view)
        if decision.hold in _WATCHED:
            self._held.pop(repository.name, None)
        else:
            self._held[repository.name] = (self._tools.clock.monotonic(), decision)
        return decision

    async def _start(self, repository: BackupRepository, view: MaintenanceView) -> Decision:
        """Create a Job, unless reads that are made now show a reason not to."""
        tools, name = self._tools, repository.spec.backup_storage_location
        server = await self._absence.look()
        jobs = await tools.client.list(Selection(JOBS, self._namespace))
        raw = await tools.client.read(BACKUP_STORAGE_LOCATIONS, self._namespace, name)
        location = BackupStorageLocation.parse(raw) if raw is not None else None
        settings = await tools.settings(_key_of(repository))
        fresh = BackupRepository.parse(await tools.client.get(BACKUP_REPOSITORIES, self._namespace, repository.name))
        if fresh.metadata.resource_version != repository.metadata.resource_version:
            # Not observed yet.
            return Decision(Hold.NOT_OBSERVED)
        self._most = settings.max_concurrent_jobs
        view = replace(
            view,
            server=server,
            no_server_for=self._absence.lasts,
            location=location_state(location),
            job_unfinished=any(not job.ended for job in jobs_of(repository, jobs)),
            running_jobs=_count_running(jobs),
            max_concurrent_jobs=settings.max_concurrent_jobs,
            windows=settings.windows,
        )
        decision = decide_maintenance(view)
        if decision.hold is not None or location is None:
            return decision
        request = JobRequest(
            name=job_name(
                repository.name,
                slot_of(view.now, view.frequency, repository.uid),
                count_failures(view.entries),
            ),
            repository=repository,
            location=location,
            settings=settings,
            record=view.record,
            ignore_foreign=self._switch is MaintenanceSwitch.ON,
            may_be_full=decision.may_be_full,
        )
        try:
            job = await create_job(tools.client, request, tools.expose_settings(), tools.check_leading)
        except PodRejectedError as e:
            await self._report_once(repository, "MaintenanceRejected", str(e))
            return Decision(Hold.REJECTED, due_at=decision.due_at)
        self._reported.pop(repository.name, None)
        running = RunningJob(name=job.name, uid=job.uid, created=job.created, fingerprint=view.fingerprint)
        await self._history.note_started(repository, running)
        return Decision(Hold.JOB_UNFINISHED)

    async def _report_hold(self, repository: BackupRepository, decision: Decision) -> None:
        """Record an Event for a hold that a person may have to end; the others are on the status page."""
        if decision.hold is None:
            return
        self._tools.metrics.maintenance_held(str(decision.hold))
        if decision.overdue:
            text = f"maintenance has been due since {decision.due_at}, and may not start: {decision.hold}"
            await self._report_once(repository, "MaintenanceOverdue", text)

    async def _report_once(self, repository: BackupRepository, reason: str, message: str) -> None:
        if self._reported.get(repository.name) != message:
            self._reported[repository.name] = message
            await self._tools.events.record(repository, reason, redact(message), warning=True)

    async def _read_inputs(self, repository: BackupRepository) -> str:
        """Return a hash of what decides whether the repository can be maintained; up to a minute old."""
        location, now = repository.spec.backup_storage_location, self._tools.clock.monotonic()
        at_seconds, inputs = self._inputs.get(location, (-_LOOK_AGAIN_SECONDS, ""))
        if now - at_seconds >= _LOOK_AGAIN_SECONDS:
            inputs = await self._tools.inputs(location)
            self._inputs[location] = (now, inputs)
        return f"{inputs}-{repository.metadata.annotations.get(REPOSITORY_ID_ANNOTATION, '')}"

    async def delete_left(self, job: MaintenanceJob) -> None:
        """Delete the Job of a BackupRepository that no longer exists, unless it runs."""
        if job.ended or not job.labeled:
            await self._delete(job)

    async def _delete(self, job: MaintenanceJob) -> None:
        """Delete the Job as it was observed; one that a Velero server sees is left to the server."""
        if job.labeled and await self._absence.look():
            return
        self._tools.check_leading()
        client = self._tools.client
        await client.delete(JOBS, self._namespace, job.name, uid=job.uid, resource_version=job.version)
        _log.debug("deleted Job %s", job.name)


def _count_running(jobs: Iterable[JsonDict]) -> int:
    parsed = (MaintenanceJob.parse(raw) for raw in jobs)
    return sum(job.ours and not job.ended for job in parsed)


def _starts_of(repository: BackupRepository) -> set[datetime]:
    """Return when the Jobs of the history were created."""
    return {entry.start_timestamp for entry in repository.status.recent_maintenance if entry.start_timestamp}


def _frequency_of(repository: BackupRepository) -> timedelta:
    """Return how often maintenance may run; an hour if that is invalid or not positive."""
    try:
        frequency = parse_duration(repository.spec.maintenance_frequency)
    except ValueError:
        return _DEFAULT_FREQUENCY
    return frequency if frequency > timedelta() else _DEFAULT_FREQUENCY


def _key_of(repository: BackupRepository) -> RepositoryKey:
    return RepositoryKey(repository.spec.volume_namespace, repository.spec.backup_storage_location)


def _fingerprint(uids: Iterable[str]) -> str:
    """Return a hash of the finished backups: a new one changes it, and so does one that was deleted."""
    return hashlib.sha256(",".join(sorted(uids)).encode()).hexdigest()[:16]
