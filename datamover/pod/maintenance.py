"""The maintenance of one repository in the pod of a Job: may it run, which mode is due, what came of it."""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from msgspec import structs

from core.contract import (
    CANCELED_ENDING,
    FOREIGN_INTERVALS,
    MAINTENANCE_ERROR,
    DataPathReason,
    MaintenanceCause,
    MaintenanceMode,
    MaintenanceResult,
)
from core.errors import AgentError, ContractError, DataPathError
from core.kube.client import Selection, select_labels
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import DATA_UPLOADS, JOBS
from core.kube.types import Job, UncheckedObject
from core.kube.velero_server import has_velero_server
from core.kube.watch import watch_one
from core.models.base import format_time, parse_time
from core.models.names import OWNER_UID_LABEL, REPO_NAME_LABEL, REPOSITORY_ID_ANNOTATION, repo_name_label
from core.models.phases import FINAL_PHASES
from core.models.storage import BackupRepository, BackupStorageLocation
from core.models.units import format_duration
from core.mover_specs import MaintainRepository
from core.redact import Redactor
from datamover.kopia.causes import WRONG_PASSWORD
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.location_files import open_output
from datamover.kopia.maintenance import (
    Maintenance,
    MaintenanceError,
    MaintenanceInfo,
    Span,
    decide_mode,
    find_foreign_run,
    is_full_unfinished,
    parse_full_interval,
)
from datamover.kopia.repository import Repository, RepositoryStatus
from datamover.kopia.snapshots import delete_snapshots
from datamover.pod.cluster import PodContext, open_access
from datamover.pod.reporting import Reporter, Termination, build_failure, build_success
from datamover.pod.snapshot_report import SnapshotReporter, list_stored
from datamover.runtime.child import read_peak_bytes

_logger = logging.getLogger(__name__)

_LABEL_TIMEOUT: Final = timedelta(minutes=10)
"""The leader adds the label within seconds after the pod runs, unless another leader takes over."""

_CHECKPOINT_AGE: Final = timedelta(days=1)
"""A checkpoint that was saved later may be of a transfer that this cluster does not know."""

_UNAVAILABLE: Final = "Unavailable"
"""`status.phase` of a BackupStorageLocation."""

_MARGIN: Final = timedelta(minutes=5)
"""How far the clock of a pod may be from the API server's; kopia runs no maintenance beyond."""

_LONGEST_JOB: Final = timedelta(hours=6, minutes=15)
"""A Job that failed has no completion. Ours end by this deadline, unless a longer one is configured."""

_ENDED: Final = frozenset({"Complete", "Failed"})
"""Conditions of a Job. Source: Kubernetes v1.34, batch/v1 JobConditionType."""

_CAUSE_LIMIT: Final = 1000
"""Characters: the termination message has room for the whole cause."""

_REPORT_TIMEOUT: Final = timedelta(minutes=30)
"""For the snapshot report: reading the files of thousands of backups takes minutes."""


async def maintain(spec: MaintainRepository, context: PodContext) -> Termination:
    """Run the maintenance that is due, once the leader has released it. Raises AgentError if that failed."""
    longest = await _wait_for_release(spec.job, context)
    if await has_velero_server(context.patient_client, context.namespace):
        raise MaintenanceError(f"a Velero server is in namespace {context.namespace}: it does the maintenance")
    wanted, location = await context.reader.place(spec.name)
    _check_writable(location)
    recorder = EventRecorder(context.client, context.clock, component=spec.job, host=context.node)
    reporter = Reporter(recorder, ObjectRef.of(wanted), context.clock)
    with open_access(context, reporter) as access:
        repository = await access.resolve(location, wanted)
        maintenance = Maintenance(repository)
        result = await _Run(spec, access.context, wanted, repository, maintenance, longest).run()
        if spec.report_snapshots:
            snapshots = SnapshotReporter(access.context, repository, wanted.spec.volume_namespace)
            result = await _add_report(result, snapshots)
    return build_success(result.to_json())


async def _add_report(result: MaintenanceResult, snapshots: SnapshotReporter) -> MaintenanceResult:
    """Return the result with the report of the snapshots, or with why there is none: the maintenance succeeded."""
    try:
        async with asyncio.timeout(_REPORT_TIMEOUT.total_seconds()):
            result = structs.replace(result, report=await snapshots.run())
    except TimeoutError:
        result = structs.replace(result, report_error=f"timed out after {format_duration(_REPORT_TIMEOUT)}")
    except AgentError as e:
        result = structs.replace(result, report_error=str(e))
    if result.report_error:
        _logger.warning("no snapshot report: %s", result.report_error)
    if result.peak_bytes:
        # The next Job needs as much memory.
        result = structs.replace(result, peak_bytes=read_peak_bytes())
    return result


async def _wait_for_release(job: str, context: PodContext) -> timedelta:
    """Return the Job's deadline once it has the label by which a Velero server would wait for it."""
    shown = f"Job {context.namespace}/{job}"
    states = watch_one(context.client, JOBS, context.namespace, name=job, clock=context.clock)
    try:
        async with asyncio.timeout(_LABEL_TIMEOUT.total_seconds()), aclosing(states):
            async for raw in states:
                if raw is None:
                    raise MaintenanceError(f"{shown} does not exist")
                if REPO_NAME_LABEL in raw["metadata"].get("labels", {}):
                    break
    except TimeoutError as e:
        waited = format_duration(_LABEL_TIMEOUT)
        raise MaintenanceError(f"{shown} has no label {REPO_NAME_LABEL} after {waited}: no leader released it") from e
    return timedelta(seconds=raw.get("spec", {}).get("activeDeadlineSeconds", 0) if raw else 0)


def _check_writable(location: BackupStorageLocation) -> None:
    """Check that maintenance may write to the location. Raises MaintenanceError if it is read-only or unavailable."""
    if location.read_only:
        raise MaintenanceError(f"BackupStorageLocation {location.name} is read-only")
    if location.status.phase == _UNAVAILABLE:
        reason = location.status.message or "its status gives no reason"
        raise MaintenanceError(f"BackupStorageLocation {location.name} is unavailable: {reason}")


@dataclass(frozen=True)
class _Run:
    """The maintenance of a repository that the leader has released; its Jobs have the deadline `longest`."""

    spec: MaintainRepository
    context: PodContext
    wanted: BackupRepository
    repository: Repository
    maintenance: Maintenance
    longest: timedelta

    async def run(self) -> MaintenanceResult:
        """Run what is due, and return what came of it."""
        info = await self.repository.open(self.maintenance.read_info)
        status = await self.repository.status()
        self._check_identity(info, status)
        if not info.owner:
            # The creation of the repository was interrupted, and nothing was backed up since.
            await self.maintenance.own()
        now = self.context.clock.now()
        foreign_at = find_foreign_run(info, await self._list_known_spans(now), now)
        requested = timedelta(seconds=self.spec.full_interval_seconds or 0)
        configured = parse_full_interval(self.wanted.spec.repository_config)
        result = MaintenanceResult(
            mode=MaintenanceMode.NONE,
            repository_id=status.unique_id,
            full_interval_seconds=info.full.duration.total_seconds() or None,
            interval_differs=not requested and configured not in (None, info.full.duration),
            incomplete_full=is_full_unfinished(info),
            next_quick=info.next_quick,
            next_full=info.next_full,
            foreign_at=foreign_at,
        )
        if hold := self._find_hold(info, foreign_at, now):
            return structs.replace(result, reason=hold, held=True)
        if requested and requested != info.full.duration:
            await self.maintenance.set_full_interval(requested)
            result = structs.replace(result, full_interval_seconds=requested.total_seconds())
            # By a shorter one, the last full run would seem to have begun later, at a time of no Job: it runs again.
            info = await self.maintenance.read_info()
        decision = decide_mode(info, now, epochs=status.epochs)
        _logger.info("%s maintenance: %s", decision.mode, decision.reason)
        if decision.mode is MaintenanceMode.NONE:
            return structs.replace(result, reason=decision.reason)
        return await self._execute(result, decision.mode, epochs=status.epochs)

    def _check_identity(self, info: MaintenanceInfo, status: RepositoryStatus) -> None:
        """Check that the repository is the recorded one, and its maintenance this client's."""
        recorded = self.wanted.metadata.annotations.get(REPOSITORY_ID_ANNOTATION) or status.unique_id
        if recorded != status.unique_id:
            raise MaintenanceError(
                f"{MaintenanceCause.OTHER_REPOSITORY}: {self.repository.description} has the unique ID "
                f"{status.unique_id}, and {recorded} is recorded"
            )
        if info.owner not in {None, IDENTITY}:
            raise MaintenanceError(
                f"{MaintenanceCause.NOT_OWNER}: maintenance belongs to {info.owner}, not to {IDENTITY}"
            )

    def _find_hold(self, info: MaintenanceInfo, foreign_at: datetime | None, now: datetime) -> str | None:
        """Return why nothing may run now, because of another cluster; None: it may."""
        if foreign_at is None or self.spec.ignore_foreign:
            return None
        until = foreign_at + FOREIGN_INTERVALS * info.full.duration
        if now >= until:
            return None
        return (
            f"another cluster or a person ran maintenance at {format_time(foreign_at)}: "
            f"none of ours before {format_time(until)}"
        )

    async def _list_known_spans(self, now: datetime) -> list[Span]:
        """Return when Jobs of this cluster ran; this one has not begun."""
        longest = max(self.longest, _LONGEST_JOB)
        spans = [
            Span(entry.start_timestamp, entry.complete_timestamp or entry.start_timestamp + longest)
            for entry in self.wanted.status.recent_maintenance
            if entry.start_timestamp
        ]
        client, namespace = self.context.patient_client, self.context.namespace
        for label in ({OWNER_UID_LABEL: self.wanted.uid}, {REPO_NAME_LABEL: repo_name_label(self.wanted.name)}):
            jobs = await client.list(Selection(JOBS, namespace, label_selector=select_labels(label)))
            spans += [_span_of(job, now) for job in jobs if job["metadata"]["name"] != self.spec.job]
        return [Span(start - _MARGIN, end + _MARGIN) for start, end in spans]

    async def _execute(self, result: MaintenanceResult, mode: MaintenanceMode, *, epochs: bool) -> MaintenanceResult:
        """Run maintenance, and return `result` with what came of it."""
        maintenance, clock = self.maintenance, self.context.clock
        if mode is MaintenanceMode.FULL:
            await self._remove_checkpoints()
        before = await maintenance.measure_bucket() if mode is MaintenanceMode.FULL else None
        started = clock.monotonic()
        info = await maintenance.run(
            mode, epochs=epochs, verify=before is not None and before.blobs < self.spec.verify_blobs
        )
        result = structs.replace(
            result,
            mode=mode,
            incomplete_full=False,
            seconds=round(clock.monotonic() - started, 1),
            next_quick=info.next_quick,
            next_full=info.next_full,
            peak_bytes=read_peak_bytes(),
        )
        try:
            return structs.replace(
                result,
                contents=await maintenance.count_contents(),
                index_blobs=await maintenance.count_index_blobs(),
                freed_bytes=max(0, before.bytes - (await maintenance.measure_bucket()).bytes) if before else None,
            )
        except DataPathError as e:
            # The maintenance succeeded all the same.
            _logger.warning("cannot measure %s: %s", self.repository.description, e)
            return result

    async def _remove_checkpoints(self) -> None:
        """Delete the checkpoints of devices whose backups have ended, so that this run frees what only they need."""
        repository, context = self.repository, self.context
        attempted = f"{repository.description}: delete checkpoints of devices"
        try:
            with open_output(repository.work_dir) as file:
                read, oldest = await list_stored(repository, file), context.clock.now() - _CHECKPOINT_AGE
                found = [one for one in read() if one.is_device_checkpoint and one.end_time < oldest]
            if not found:
                return
            unfinished = await _list_unfinished(context)
            gone = [one.id for one in found if one.transfer_uid not in unfinished]
            await delete_snapshots(repository, attempted, gone)
        except AgentError as e:
            _logger.warning("checkpoints of devices are kept until the next full maintenance: %s", e)
        else:
            _logger.info("deleted %d checkpoints of devices whose backups have ended", len(gone))


async def _list_unfinished(context: PodContext) -> set[str]:
    """Return the UIDs of the DataUploads that have no final phase, or one that cannot be read."""
    found: set[str] = set()
    async for page in context.patient_client.pages(Selection(DATA_UPLOADS, context.namespace)):
        found |= {raw["metadata"]["uid"] for raw in page.items if not _has_ended(raw)}
        for malformed in page.malformed:
            meta = malformed.get("metadata")
            uid = meta.get("uid") if isinstance(meta, dict) else None
            if not isinstance(uid, str):
                raise ContractError(f"a DataUpload in namespace {context.namespace} has no UID")
            found.add(uid)
    return found


def _has_ended(raw: UncheckedObject) -> bool:
    status = raw.get("status")
    phase = status.get("phase") if isinstance(status, dict) else None
    return isinstance(phase, str) and phase in FINAL_PHASES


def _span_of(job: Job, now: datetime) -> Span:
    """Return when a Job ran; one that failed has no completion, but a condition."""
    status = job.get("status") or {}
    ends = [
        condition.get("lastTransitionTime")
        for condition in status.get("conditions") or []
        if condition["type"] in _ENDED and condition["status"] == "True"
    ]
    end = next(filter(None, [status.get("completionTime"), *ends]), None)
    return Span(parse_time(job["metadata"]["creationTimestamp"]), parse_time(end) if end else now)


def build_maintenance_failure(error: Exception, redactor: Redactor) -> Termination:
    """Return the termination that `error` causes: its message ends in the cause, where a Velero server looks for it."""
    text = build_failure(error, redactor).message.removesuffix(f": {CANCELED_ENDING}")
    cause, *details = text.splitlines() or [""]
    if WRONG_PASSWORD in cause:
        cause = f"{MaintenanceCause.WRONG_PASSWORD}: {cause}"
    message = "\n".join([*details, f"{MAINTENANCE_ERROR}{cause[:_CAUSE_LIMIT]}"])
    return Termination(DataPathReason.FAILED, message, AgentError.exit_code)
