"""The steps of one repository's maintenance: attend a Job, store how it ended, or start the next one."""

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from core.contract import FOREIGN_INTERVALS
from core.errors import ContractError
from core.kube.velero_server import ServerAbsence
from core.models.names import REPOSITORY_ID_ANNOTATION
from core.models.storage import BackupRepository, RepositoryKey
from core.mover_specs import MaintainRepository
from core.redact import redact
from exposer.causes import CauseFinder
from exposer.pods import build_maintenance_job
from exposer.settings import ExposeSettings
from nodeagent.config.windows import VerificationPlan
from nodeagent.leader.context import Cluster
from nodeagent.leader.maintenance import jobs as leader_jobs
from nodeagent.maintenance import rules
from nodeagent.maintenance.jobs import MaintenanceJob, RepositoryJobs, describe_end, may_write, read_pod
from nodeagent.maintenance.record import RunningJob
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView
from nodeagent.metrics import MAINTENANCE_SKIPPED
from nodeagent.runtime.settings import MaintenanceSwitch
from nodeagent.runtime.workqueue import Requeue

_REMEMBERED: Final = timedelta(days=FOREIGN_INTERVALS)
"""How long the run of another cluster holds maintenance, by kopia's full interval of a day."""

_WATCHED: Final = frozenset({Hold.JOB_UNFINISHED, Hold.CONCURRENCY, Hold.NOT_OBSERVED})
"""Holds whose end is observed without further reads."""

_NO_SKIPS: Final = _WATCHED - {Hold.CONCURRENCY} | {Hold.NOT_DUE}


@dataclass(frozen=True)
class MaintenanceSources:
    """What the steps depend on.

    `settings` returns what applies to the Jobs of a repository, `inputs` the hash of what decides whether the
    repositories of a location can be opened, up to a minute old, `backups` the UIDs of a repository's finished backups,
    None before they are known, and `verification` how repositories are verified, None if they are not.
    """

    expose_settings: Callable[[], ExposeSettings]
    causes: CauseFinder
    settings: leader_jobs.ReadSettings
    inputs: Callable[[str], Awaitable[str]]
    backups: Callable[[RepositoryKey], Iterable[str] | None]
    verification: Callable[[], VerificationPlan | None] = lambda: None


@dataclass
class _Known:
    """What this term of the leader remembers about a repository.

    `held` is when it was last decided, in seconds, that its maintenance is due and does not start, and why. `reported`
    has the last Warning of each reason, unless a Job has started since, `skip` slot and reason of the skip that was
    counted last. So many ended Jobs are `kept`; None: the surplus was not deleted yet.
    """

    held: tuple[float, Decision] | None = None
    reported: dict[str, str] = field(default_factory=dict)
    kept: int | None = None
    skip: tuple[int, Hold] | None = None


@dataclass(eq=False)
class MaintenanceSteps:
    """Takes the steps of all repositories of a namespace during one term of this leader."""

    cluster: Cluster
    sources: MaintenanceSources
    absence: ServerAbsence
    _: KW_ONLY
    namespace: str
    switch: MaintenanceSwitch
    places: leader_jobs.Places
    _known: dict[str, _Known] = field(default_factory=lambda: defaultdict(_Known), init=False)

    def __post_init__(self) -> None:
        self._history = leader_jobs.HistoryWriter(self.cluster)
        self._attendant = leader_jobs.JobAttendant(
            self.cluster, self.sources.causes, history=self._history, absence=self.absence, namespace=self.namespace
        )

    def forget(self, name: str) -> None:
        """Drop what is remembered about a repository that was deleted."""
        self._attendant.forget(name)
        self._known.pop(name, None)

    async def step(self, repository: BackupRepository, jobs: RepositoryJobs) -> tuple[Requeue, Decision]:
        """Take a step, given all Jobs; return the next look and the decision. ContractError: a time is out of range."""
        try:
            requeue, decision = await self._take_step(repository, jobs)
            self._count_skip(repository, decision.hold)
        except OverflowError as e:
            shown = f"BackupRepository {self.namespace}/{repository.name}"
            raise ContractError(f"{shown}: a time or duration of its maintenance is out of range") from e
        return requeue, decision

    async def _take_step(self, repository: BackupRepository, jobs: RepositoryJobs) -> tuple[Requeue, Decision]:
        own = jobs.of(repository)
        if self.absence.server:
            return await self._leave_to_server(repository, own), Decision(Hold.SERVER)
        ended = [job for job in own if job.ended]
        if stored := await self._store_ends(repository, ended):
            return stored
        # One that has its label runs already; the others must not.
        unfinished = sorted((job for job in own if not job.ended), key=lambda job: not job.labeled)
        if unfinished:
            requeue = await self._attendant.attend(repository, unfinished[0])
            return requeue, await self._hold_for(repository, unfinished[0])
        running = rules.record_of(repository).running
        if running is not None:
            requeue = await self._attendant.look_for(repository, running)
            return requeue, await self._hold_for(repository, running)
        return await self._decide(repository, jobs)

    async def _hold_for(self, repository: BackupRepository, job: MaintenanceJob | RunningJob) -> Decision:
        """Return when the maintenance after that Job is due, and report it once it is overdue."""
        view = await self._view(repository)
        if view is None:
            return Decision(Hold.JOB_UNFINISHED)
        decision = rules.decide_maintenance(replace(view, last_maintenance=job.created, job_unfinished=True))
        await self._report_hold(repository, decision, f": Job {self.namespace}/{job.name} or its pod has not ended")
        return decision

    def _count_skip(self, repository: BackupRepository, hold: Hold | None) -> None:
        """Count each reason once for each slot of the repository in which it held the maintenance."""
        if hold is None or hold in _NO_SKIPS:
            return
        skip = (rules.slot_of(self.cluster.now(), rules.frequency_of(repository), repository.uid), hold)
        if self._known[repository.name].skip != skip:
            self._known[repository.name].skip = skip
            self.cluster.metrics.inc(MAINTENANCE_SKIPPED, str(hold))

    async def _leave_to_server(self, repository: BackupRepository, jobs: list[MaintenanceJob]) -> Requeue:
        """Delete a Job that the server does not see and whose pod waits for the label; everything else is its own."""
        for job in jobs:
            if job.ours and not job.labeled:
                running = rules.record_of(repository).running
                if running is not None and running.uid == job.uid:
                    # It ran nothing, so its end is no failure.
                    await self._history.note_running(repository, None)
                    return Requeue(leader_jobs.STEP_SECONDS)
                await self._attendant.delete(job)
        if self.switch is MaintenanceSwitch.ON:
            text = "a Velero server is in the namespace: it maintains the repository, in spite of --repo-maintenance=on"
            await self._report_once(repository, "MaintenanceHeld", text)
        return Requeue(leader_jobs.LOOK_AGAIN_SECONDS)

    async def _store_ends(
        self, repository: BackupRepository, ended: list[MaintenanceJob]
    ) -> tuple[Requeue, Decision] | None:
        """Store the ends that the history lacks, then delete the Jobs that are no longer kept; None: all is done."""
        new = [job for job in ended if not leader_jobs.had_end(repository, job.created, self.cluster.now())]
        if new:
            client, namespace = self.cluster.client, self.namespace
            pods = [(job, await read_pod(client, namespace, job.name)) for job in new]
            if writing := next((job for job, pod in pods if may_write(pod)), None):
                return Requeue(leader_jobs.STEP_SECONDS), await self._hold_for(repository, writing)
            ends = [(job, describe_end(job, pod)) for job, pod in pods]
            await self._history.write(repository, ends)
            self._known[repository.name].kept = None
            for job, end in ends:
                if end.entry is None:
                    # A server that comes later would take it for a maintenance that succeeded.
                    await self._attendant.delete(job)
            return Requeue(leader_jobs.STEP_SECONDS), Decision(Hold.JOB_UNFINISHED)
        kept = self._known[repository.name].kept
        if ended and (kept is None or len(ended) > kept):
            settings = await self.sources.settings(repository.key)
            for job in ended[: max(0, len(ended) - settings.keep_jobs)]:
                await self._attendant.delete(job)
            self._known[repository.name].kept = settings.keep_jobs
        return None

    async def _decide(self, repository: BackupRepository, jobs: RepositoryJobs) -> tuple[Requeue, Decision]:
        view = await self._view(repository)
        if view is None:
            return Requeue(leader_jobs.STEP_SECONDS), Decision(Hold.NOT_OBSERVED)
        most = await self.places.count(repository.key)
        decision = rules.decide_maintenance(replace(view, running_jobs=jobs.running, max_concurrent_jobs=most))
        if decision.hold is None:
            decision = self._recall_hold(repository, view.now) or await self._start_alone(repository, view)
        await self._report_hold(repository, decision)
        seconds = leader_jobs.STEP_SECONDS if decision.hold is Hold.NOT_OBSERVED else leader_jobs.LOOK_AGAIN_SECONDS
        return leader_jobs.look_again(decision, self.cluster.now(), seconds), decision

    async def _view(self, repository: BackupRepository) -> MaintenanceView | None:
        """Return what is known without further reads, None before backups are; `_start` completes it."""
        backups = self.sources.backups(repository.key)
        if backups is None:
            return None
        view = rules.view_of(repository, self.cluster.now())
        return replace(
            view,
            # A new backup changes it, and so does one that was deleted.
            fingerprint=hashlib.sha256(",".join(sorted(backups)).encode()).hexdigest()[:16],
            inputs=await self._read_inputs(repository) if view.record.blocked_inputs else None,
            switch=self.switch,
            server=self.absence.server,
            no_server_for=self.absence.lasts,
        )

    def _recall_hold(self, repository: BackupRepository, now: datetime) -> Decision | None:
        """Return what held the maintenance a few minutes ago, or None if that may be over."""
        at_seconds, decision = self._known[repository.name].held or (0.0, None)
        if decision is None or self.cluster.clock.monotonic() - at_seconds >= leader_jobs.HELD_SECONDS:
            return None
        return decision if decision.wait_until is None or now < decision.wait_until else None

    async def _start_alone(self, repository: BackupRepository, view: MaintenanceView) -> Decision:
        """Start a Job while no other repository's is being started; remember what holds it."""
        async with self.places.taking:
            decision = await self._start(repository, view)
        held = None if decision.hold in _WATCHED else (self.cluster.clock.monotonic(), decision)
        self._known[repository.name].held = held
        return decision

    async def _start(self, repository: BackupRepository, view: MaintenanceView) -> Decision:
        """Create a Job, unless reads that are made now show a reason not to."""
        cluster = self.cluster
        server = await self.absence.look()
        read = await leader_jobs.read_before_start(cluster.client, self.namespace, repository, self.sources.settings)
        if read is None:
            return Decision(Hold.NOT_OBSERVED)
        jobs, location, settings = read
        view = replace(
            view,
            server=server,
            no_server_for=self.absence.lasts,
            location_hold=rules.find_location_hold(location),
            job_unfinished=any(not job.ended for job in jobs.of(repository)),
            running_jobs=jobs.running,
            max_concurrent_jobs=settings.max_concurrent_jobs,
            windows=settings.windows,
        )
        decision = rules.decide_maintenance(view)
        if decision.hold is not None or location is None:
            return decision
        slot, interval = rules.slot_of(view.now, view.frequency, repository.uid), view.new_full_interval
        name = rules.job_name(repository.name, slot, rules.count_failures(view.entries), {job.name for job in jobs.all})
        most_bytes = settings.memory_limit_max_bytes
        memory = rules.decide_memory(view.record, may_be_full=decision.may_be_full, most_bytes=most_bytes)
        spec = MaintainRepository(
            job=name,
            ignore_foreign=self.switch is MaintenanceSwitch.ON,
            verify_blobs=settings.verify_blob_limit,
            full_interval_seconds=int(interval.total_seconds()) if interval is not None else None,
            report_snapshots=rules.is_report_due(view.record, view.now),
        )
        inputs = await self._read_inputs(repository)
        try:
            run = leader_jobs.plan_run(name, repository, location, settings.job, memory)
            manifest = build_maintenance_job(run, self.sources.expose_settings(), spec)
            job = await leader_jobs.create_tried(cluster.client, manifest, cluster.check_leading)
        except leader_jobs.PodRejectedError as e:
            await self._report_once(repository, "MaintenanceRejected", str(e))
            return replace(decision, hold=Hold.REJECTED)
        self._known[repository.name].reported.clear()
        running = RunningJob(
            name=job.name, uid=job.uid, created=job.created, fingerprint=view.fingerprint, inputs=inputs
        )
        await self._history.note_running(repository, running)
        if memory.too_small and settings.job.resources is None:
            text = (
                f"the last maintenance was out of memory, and Job {job.name} may use no more than "
                f"{memory.limit_bytes // 2**20} MiB: that is memoryLimitMax"
            )
            await self._report_once(repository, "MaintenanceMemory", text)
        return Decision(Hold.JOB_UNFINISHED)

    async def _report_hold(self, repository: BackupRepository, decision: Decision, cause: str = "") -> None:
        """Record an Event for a hold that a person may have to end; the others are on the status page."""
        if decision.hold is not None and decision.overdue:
            text = f"maintenance has been due since {decision.due_at}, and may not start: {decision.hold}{cause}"
            await self._report_once(repository, "MaintenanceOverdue", text)

    async def _report_once(self, repository: BackupRepository, reason: str, message: str) -> None:
        reported = self._known[repository.name].reported
        if reported.get(reason) != message:
            reported[reason] = message
            await self.cluster.events.record(repository, reason, redact(message), warning=True)

    async def _read_inputs(self, repository: BackupRepository) -> str:
        """Return a hash of what decides whether the repository can be maintained; up to a minute old."""
        inputs = await self.sources.inputs(repository.spec.backup_storage_location)
        return f"{inputs}-{repository.metadata.annotations.get(REPOSITORY_ID_ANNOTATION, '')}"

    async def delete_left(self, job: MaintenanceJob) -> bool:
        """Delete the Job of a BackupRepository that no longer exists; return whether that is tried again.

        One that runs stays, and so does one of the last days: it is history of the next repository of that name, in
        which its run would pass for another cluster's.
        """
        recent = job.ended and abs(self.cluster.now() - job.created) < _REMEMBERED
        running = not (job.ended or job.suspended)
        if not (job.labeled and (recent or running)):
            await self._attendant.delete(job)
        return recent or not job.ended
