"""Reads backup repositories for a user: their resources, Jobs, what the leader says, and a report of their snapshots.

Everything is read with the user's permissions. What cannot be read is left out, with a note that says why.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeVar

from msgspec.structs import asdict

from client.installation import read_events, read_named, read_settings
from client.leader_page import LeaderDecision, read_leader_decisions
from client.mover_jobs import JobAnswer, find_subject_of, plan_job, run_job
from client.repository_view import (
    NextMaintenance,
    RepositoryDetails,
    RepositoryList,
    RepositoryProof,
    RepositorySummary,
    RunningJobState,
    compute_next,
)
from client.session import Session
from client.text import missing
from core.contract import MaintenanceMode, MaintenanceResult, parse_result
from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS
from core.kube.types import Object, Pod
from core.kube.velero_server import has_velero_server
from core.models.base import JsonDict, WireModel
from core.models.names import REPOSITORY_CREATED_ANNOTATION
from core.models.storage import BackupRepository, BackupStorageLocation
from core.mover_specs import ReportSnapshots
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotVerdict
from exposer.pod_status import diagnose_pod
from nodeagent.config.repositories import MaintenanceSettings, ParsedMaintenance, parse_maintenance, read_maintenance
from nodeagent.maintenance.jobs import SUSPENDED, MaintenanceJob, RepositoryJobs, describe_end, list_jobs, read_pod
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import MaintenanceView, decide_memory, find_location_hold, is_full_incomplete, view_of
from nodeagent.maintenance.verification import verification_of
from nodeagent.runtime.settings import MaintenanceSwitch, Settings

_T = TypeVar("_T")
_Model = TypeVar("_Model", BackupRepository, BackupStorageLocation)

_NO_ENTRIES: Final = parse_maintenance({})


@dataclass(frozen=True)
class _Surroundings:
    """What a decision depends on beside the repository; `locations` None: they could not be read."""

    jobs: RepositoryJobs
    locations: dict[str, BackupStorageLocation] | None
    server: bool
    switch: MaintenanceSwitch
    configured: ParsedMaintenance

    def location_of(self, repository: BackupRepository) -> BackupStorageLocation | None:
        return (self.locations or {}).get(repository.spec.backup_storage_location)

    def settings_of(self, repository: BackupRepository) -> MaintenanceSettings:
        return self.configured.settings_for(repository.key)

    def decide(self, repository: BackupRepository, view: MaintenanceView) -> NextMaintenance:
        known = self.locations is not None
        settings = self.settings_of(repository)
        whole = dataclasses.replace(
            view,
            switch=self.switch,
            server=self.server,
            location_hold=find_location_hold(self.location_of(repository)) if known else None,
            job_unfinished=any(not job.ended for job in self.jobs.of(repository)),
            running_jobs=self.jobs.running,
            max_concurrent_jobs=settings.max_concurrent_jobs,
            windows=settings.windows,
        )
        return compute_next(whole)


class RepositoryReader:
    """Reads the repositories of one namespace for one command."""

    def __init__(self, client: KubeClient, namespace: str, *, now: Callable[[], datetime]) -> None:
        self._client = client
        self._namespace = namespace
        self._now = now
        self._notes: list[str] = []
        self._around: _Surroundings | None = None

    async def summarize(self, names: Sequence[str] = ()) -> RepositoryList:
        """Return the repositories of these names, all of them if there are none; in the order of their names.

        Raises:
            NotFoundError: there is none of such a name.
        """
        found = await self._client.list(Selection(BACKUP_REPOSITORIES, self._namespace))
        by_name = {raw["metadata"]["name"]: raw for raw in found}
        for name in names:
            if name not in by_name:
                raise missing(f"{BACKUP_REPOSITORIES.kind} {self._namespace}/{name} does not exist", name, by_name)
        chosen = [by_name[name] for name in sorted(set(names) or by_name)]
        repositories = [one for raw in chosen if (one := self._parse(BackupRepository, raw)) is not None]
        settings, said = await self._ask_agents()
        now = self._now()
        summaries = []
        for one in repositories:
            view = view_of(one, now)
            following = await self._decide(one, view, said.get(one.name), settings)
            summaries.append(RepositorySummary.of(one, view.record, following))
        return RepositoryList(repositories=summaries, notes=self._notes)

    async def describe(self, name: str) -> RepositoryDetails:
        """Return everything about one repository.

        Raises:
            NotFoundError: there is none of that name.
            ContractError: it is invalid.
        """
        repository = await read_repository(self._client, self._namespace, name)
        settings, said = await self._ask_agents()
        around = await self._look_around(settings)
        view = view_of(repository, self._now())
        record, following = view.record, await self._decide(repository, view, said.get(name), settings)
        location, jobs = around.location_of(repository), around.jobs.of(repository)
        running = [*jobs, *around.jobs.verifying(repository)]
        memory = _next_memory(record, following, around.settings_of(repository))
        return RepositoryDetails.like(
            record,
            **asdict(RepositorySummary.of(repository, record, following)),
            created_here=repository.metadata.annotations.get(REPOSITORY_CREATED_ANNOTATION) == "true",
            location_phase=(location.status.phase or "Available") if location is not None else "",
            location_message=(location and location.status.message) or "",
            full_interval_seconds=record.full_interval_seconds or 0.0,
            last_mode=str(record.mode) if record.at else "",
            last_result=await self._try("the result of the last Job", self._read_result(jobs), None),
            **memory,
            incomplete_full=is_full_incomplete(record, view.entries),
            unreferenced=record.orphans,
            verification=RepositoryProof.of(verification_of(repository)),
            running=[await self._read_running(job) for job in running if not job.ended],
            history=repository.status.recent_maintenance[::-1],
            events=await self._try("Events", read_events(self._client, self._namespace, repository.uid), []),
            notes=self._notes,
        )

    async def _try(self, what: str, read: Awaitable[_T], otherwise: _T, failed: str = "could not be read") -> _T:
        try:
            return await read
        except AgentError as e:
            self._notes.append(f"{what} {failed}: {e}")
            return otherwise

    def _parse(self, model: type[_Model], raw: Object) -> _Model | None:
        try:
            return model.parse(raw)
        except ContractError as e:
            self._notes.append(str(e))
            return None

    async def _ask_agents(self) -> tuple[Settings, dict[str, LeaderDecision]]:
        """Return the settings of the agents, and what the leader says."""
        read, unknown = read_settings(self._client, self._namespace), Settings(node_name="")
        settings = await self._try("the flags of the agents", read, unknown, "are not known, defaults are assumed")
        asked, nothing = read_leader_decisions(self._client, self._namespace, settings), dict[str, LeaderDecision]()
        failed = "did not answer, so the next maintenance is computed here"
        return settings, await self._try("the leader", asked, nothing, failed)

    async def _decide(
        self, repository: BackupRepository, view: MaintenanceView, said: LeaderDecision | None, settings: Settings
    ) -> NextMaintenance:
        if said is not None:
            return NextMaintenance.of_leader(said, view.record, view.now)
        return (await self._look_around(settings)).decide(repository, view)

    async def _look_around(self, settings: Settings) -> _Surroundings:
        if self._around is not None:
            return self._around
        client, namespace = self._client, self._namespace
        server = bool(await self._try("Deployments", has_velero_server(client, namespace), None))
        locations = await self._try("locations", self._read_locations(), None)
        jobs = await self._try("Jobs", list_jobs(client, namespace), RepositoryJobs())
        configured = _NO_ENTRIES
        if name := settings.maintenance_config_map:
            read = read_maintenance(client, namespace, name)
            configured = parse_maintenance(await self._try("the configuration of maintenance", read, {}))
        self._around = _Surroundings(jobs, locations, server, settings.maintenance, configured)
        return self._around

    async def _read_locations(self) -> dict[str, BackupStorageLocation] | None:
        listed = await self._client.list(Selection(BACKUP_STORAGE_LOCATIONS, self._namespace))
        parsed = [self._parse(BackupStorageLocation, raw) for raw in listed]
        return {one.name: one for one in parsed if one is not None}

    async def _read_result(self, jobs: Sequence[MaintenanceJob]) -> MaintenanceResult | None:
        ended = [job for job in jobs if job.ours and job.ended]
        if not ended:
            return None
        return describe_end(ended[-1], await read_pod(self._client, self._namespace, ended[-1].name)).result

    async def _read_running(self, job: MaintenanceJob) -> RunningJobState:
        read = read_pod(self._client, self._namespace, job.name)
        pod = await self._try(f"the pod of Job {job.name}", read, None)
        state: JsonDict = {"pending": SUSPENDED} if job.suspended else {}
        if pod is not None:
            state = {
                "pod": pod["metadata"]["name"],
                "phase": (pod.get("status") or {}).get("phase", ""),
                "node": (pod.get("spec") or {}).get("nodeName", ""),
                "pending": _pending(pod) or "",
            }
        return RunningJobState(job=job.name, created=job.created, **state)


async def read_repository(client: KubeClient, namespace: str, name: str) -> BackupRepository:
    """Return the BackupRepository.

    Raises:
        NotFoundError: it does not exist; the message has the name that may be meant.
        ContractError: it is invalid.
    """
    return BackupRepository.parse(await read_named(client, BACKUP_REPOSITORIES, namespace, name))


def _next_memory(record: MaintenanceRecord, following: NextMaintenance, settings: MaintenanceSettings) -> JsonDict:
    """Return the fields of RepositoryDetails about the memory of the next attempt; quantities, empty: none."""
    resources, too_small = settings.job.resources, False
    if resources is None:
        full = following.mode != MaintenanceMode.QUICK
        memory = decide_memory(record, may_be_full=full, most_bytes=settings.memory_limit_max_bytes)
        resources, too_small = memory.resources, memory.too_small
    request, limit = (
        str((part or {}).get("memory", "")) for part in (resources.get("requests"), resources.get("limits"))
    )
    return {"memory_request": request, "memory_limit": limit, "memory_too_small": too_small}


def _pending(pod: Pod) -> str | None:
    try:
        pending = diagnose_pod(pod)
    except AgentError as e:
        return str(e)
    return pending.message if pending is not None else None


_ORDER: Final = (SnapshotVerdict.UNREFERENCED, SnapshotVerdict.INCOMPLETE, SnapshotVerdict.UNKNOWN)


class SnapshotList(WireModel):
    """The kopia snapshots of one repository that are not referenced, and the totals of all of them."""

    repository: str
    totals: SnapshotReport
    snapshots: list[ReportedSnapshot]
    notes: list[str]


async def report_snapshots(tools: Session, name: str, *, timeout: timedelta) -> SnapshotList:
    """Run the report of the repository `name` and return it.

    Raises:
        NotFoundError: the repository or its location does not exist.
        JobError: the Job failed, cannot start, or did not end in time.
    """
    repository = await read_repository(tools.client, tools.namespace, name)
    manifest = await plan_job(tools, await find_subject_of(tools, "report", repository), ReportSnapshots())
    return _read(name, await run_job(tools, manifest, "report", timeout))


def _read(name: str, answer: JobAnswer) -> SnapshotList:
    totals = parse_result(SnapshotReport, answer.message)
    found = answer.find(REPORTED_LINE)
    notes = [f"what refers to snapshots could not be read: {totals.unread}"] if totals.unread else []
    found.sort(
        key=lambda one: (_ORDER.index(one.verdict) if one.verdict in _ORDER else len(_ORDER), one.start or "", one.id)
    )
    return SnapshotList(repository=name, totals=totals, snapshots=found, notes=notes)
