"""The steps of one repository's verification: attend a Job, store what it has found, or start the next one.

A Job reads shares of the repository, or tests the restore of a volume, and changes nothing in it: it runs beside a
Velero server, too. What is due is in `nodeagent.maintenance.verification`. Every step starts from what the API server
has, and may run twice. Results are written to transfers first, and to the BackupRepository at last: that the end of a
Job is stored is the only thing that keeps it from being taken again.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Final

from msgspec import structs

from core.errors import AgentError, ContractError, ResultError
from core.kube.client import Selection
from core.kube.errors import KubeError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUPS, DATA_UPLOADS, JOBS, POD_VOLUME_BACKUPS, Resource
from core.kube.types import UncheckedObject
from core.models import names
from core.models.base import format_time
from core.models.job_output import read_output
from core.models.phases import Phase
from core.models.storage import BackupRepository, RepositoryKey
from core.models.transfers import DataUpload, PodVolumeBackup, Transfer
from core.models.verification import (
    SHARE_LINE,
    VERIFIED_LINE,
    Verification,
    VerificationOutcome,
    VerifiedShare,
    VerifiedSnapshot,
    is_damaged,
)
from core.mover_specs import VerifySnapshots
from core.redact import redact
from exposer.pod_status import parse_pod_end
from exposer.pods import MaintenanceRun, build_command_job
from nodeagent.leader.context import Cluster
from nodeagent.leader.maintenance import jobs as leader_jobs
from nodeagent.leader.maintenance.restore_tests import build_restore_test, restorable
from nodeagent.leader.maintenance.steps import MaintenanceSources
from nodeagent.maintenance import verification
from nodeagent.maintenance.jobs import MaintenanceJob, RepositoryJobs, describe_failure, has_started, read_pod
from nodeagent.maintenance.record import FailureCause
from nodeagent.maintenance.restore_tests import NEVER, choose_copy
from nodeagent.maintenance.rules import CLOCKS, Decision, Hold, decide_memory, find_location_hold, record_of, was_ready
from nodeagent.maintenance.verification import RepositoryVerification, VerificationView, VerifiedCopy
from nodeagent.runtime.workqueue import Requeue, Timers

_log = logging.getLogger(__name__)

_LOG_LIMIT_BYTES: Final = 15 << 20
"""Some 40,000 snapshots; the transport refuses a response of 16 MiB."""

_MODELS: Final[tuple[tuple[Resource[UncheckedObject], type[Transfer]], ...]] = (
    (DATA_UPLOADS, DataUpload),
    (POD_VOLUME_BACKUPS, PodVolumeBackup),
)

_DECIDE: Final = {False: verification.decide_verification, True: verification.decide_restore_test}
"""By whether it is about a restore test."""

_NO_ACCOUNT: Final = "nodeagent install --restore-tests makes the account, or restoreTests of the chart"
_NO_RESULT: Final = "the Job has no result"

_NO_COPY_SECONDS: Final = 6 * 3600.0
"""Between two looks for a copy to restore where there was none, or the pod was rejected: each lists all transfers."""


@dataclass(frozen=True)
class _Found:
    """What a Job has found out; `failure` is why it failed, None: it did not."""

    shares: Sequence[VerifiedShare] = ()
    snapshots: Sequence[VerifiedSnapshot] = ()
    failure: str | None = None
    memory_bytes: int | None = None


class VerificationSteps:
    """Takes the steps of all repositories of a namespace during one term of this leader."""

    def __init__(
        self, cluster: Cluster, sources: MaintenanceSources, *, namespace: str, places: leader_jobs.Places
    ) -> None:
        self._cluster = cluster
        self._sources = sources
        self._namespace = namespace
        self._places = places
        self._ages = Timers(cluster.clock)
        self._held: dict[tuple[str, bool], float] = {}
        self._reported: dict[str, str] = {}

    def forget(self, name: str) -> None:
        """Drop what is remembered about a repository that was deleted."""
        self._ages.forget(name)
        for restores in (False, True):
            self._held.pop((name, restores), None)
        self._reported.pop(name, None)

    async def step(self, repository: BackupRepository, jobs: RepositoryJobs, *, waiting: int) -> Requeue:
        """Take a step, given all Jobs and how many repositories are `waiting` for maintenance, which goes first."""
        own, record = jobs.verifying(repository), self._record_of(repository)
        # Not by a time: if a clock was set back, the end of a Job would count as old, and its name block the next one.
        following = {kind: verification.verification_name(repository, restores=kind) for kind in _DECIDE}
        new = [job for job in own if job.ended and job.name == following[bool(job.restores)]]
        if new:
            found = await self._read(repository, new[0])
            transfers = [one async for one in self._completed(repository.key.volume_namespace)]
            await self._write(repository, new[0], found, transfers)
            return Requeue(leader_jobs.STEP_SECONDS)
        if job := next((job for job in own if not job.ended), None):
            last = record.tests.job if job.restores else record.job
            return await self._attend(repository, job, given_up=last == job.created)
        plan = self._sources.verification()
        if plan is None:
            return Requeue(leader_jobs.LOOK_AGAIN_SECONDS)
        backups = self._sources.backups(repository.key)
        if backups is None:
            return Requeue(leader_jobs.STEP_SECONDS)
        view = VerificationView(
            now=self._cluster.now(),
            plan=plan,
            record=record,
            has_backups=bool(list(backups)),
            ready_once=was_ready(repository),
            job_unfinished=any(not job.ended for job in jobs.of(repository)),
            running_jobs=jobs.running + waiting,
            max_concurrent_jobs=await self._places.count(repository.key),
        )
        decision = await self._decide(repository, view, waiting, restores=False)
        again = leader_jobs.look_again(decision, self._cluster.now())
        if decision.hold is Hold.JOB_UNFINISHED:
            return again
        decision = await self._decide(repository, view, waiting, restores=True)
        return min(again, leader_jobs.look_again(decision, self._cluster.now()), key=lambda one: one.after_seconds)

    async def _decide(
        self, repository: BackupRepository, view: VerificationView, waiting: int, *, restores: bool
    ) -> Decision:
        decision, now = _DECIDE[restores](view), self._cluster.clock.monotonic()
        if decision.hold is None and now >= self._held.get((repository.name, restores), 0.0):
            async with self._places.taking:
                decision = await self._start(repository, view, waiting, restores=restores)
            if decision.hold not in {Hold.CONCURRENCY, Hold.JOB_UNFINISHED, Hold.NOT_OBSERVED}:
                listed = restores and decision.hold in {Hold.IDLE, Hold.REJECTED}
                seconds = _NO_COPY_SECONDS if listed else leader_jobs.HELD_SECONDS
                self._held[repository.name, restores] = self._cluster.clock.monotonic() + seconds
        return decision

    def _record_of(self, repository: BackupRepository) -> RepositoryVerification:
        return verification.verification_of(repository).before(self._cluster.now() + CLOCKS)

    async def _attend(self, repository: BackupRepository, job: MaintenanceJob, *, given_up: bool) -> Requeue:
        """Wait for the end of the Job; give up one whose pod never runs, and delete it."""
        if not given_up:
            seconds = self._ages.seconds(repository.name, job.uid)
            pod = await read_pod(self._cluster.client, self._namespace, job.name)
            if has_started(pod):
                return Requeue(leader_jobs.LOOK_AGAIN_SECONDS)
            if seconds < leader_jobs.START_SECONDS:
                return Requeue(leader_jobs.START_SECONDS - seconds)
            failure = await leader_jobs.explain_start(self._sources.causes, job, pod)
            await self._write(repository, job, _Found(failure=failure), [])
        self._cluster.check_leading()
        await self._cluster.client.delete(JOBS, self._namespace, job.name, uid=job.uid)
        return Requeue(leader_jobs.STEP_SECONDS)

    async def _start(
        self, repository: BackupRepository, view: VerificationView, waiting: int, *, restores: bool
    ) -> Decision:
        """Create a Job, unless reads that are made now show a reason not to."""
        cluster = self._cluster
        read = await leader_jobs.read_before_start(cluster.client, self._namespace, repository, self._sources.settings)
        if read is None:
            return Decision(Hold.NOT_OBSERVED)
        jobs, location, settings = read
        own = [*jobs.of(repository), *jobs.verifying(repository)]
        view = replace(
            view,
            location_hold=find_location_hold(location),
            job_unfinished=any(not job.ended for job in own),
            running_jobs=jobs.running + waiting,
            max_concurrent_jobs=settings.max_concurrent_jobs,
            windows=settings.windows,
        )
        decision = _DECIDE[restores](view)
        if decision.hold is not None or location is None:
            return decision
        known = record_of(repository)
        known = structs.replace(known, memory_bytes=max(known.memory_bytes or 0, view.record.memory_bytes or 0))
        memory = decide_memory(known, may_be_full=True, most_bytes=settings.memory_limit_max_bytes)
        name = verification.verification_name(repository, restores=restores)
        run = leader_jobs.plan_run(name, repository, location, settings.job, memory)
        try:
            created = await self._create(run, repository.key, view, restores=restores)
        except leader_jobs.PodRejectedError as e:
            hint = f"; {_NO_ACCOUNT}" if restores and names.RESTORE_TEST_ACCOUNT in str(e) else ""
            await self._report_once(repository, "VerificationRejected", f"{e}{hint}")
            return Decision(Hold.REJECTED)
        return Decision(Hold.JOB_UNFINISHED if created else Hold.IDLE)

    async def _create(self, run: MaintenanceRun, key: RepositoryKey, view: VerificationView, *, restores: bool) -> bool:
        """Create the Job; return whether there is anything to do for it."""
        expose = self._sources.expose_settings()
        if restores:
            copies = [restorable(cr) async for cr in self._completed(key.volume_namespace) if _is_in(cr, key)]
            copy = choose_copy(view.record.tests, filter(None, copies))
            if copy is None:
                return False
            manifest = build_restore_test(run, expose, copy, view.plan)
        else:
            spec = VerifySnapshots(shares=verification.choose_shares(view), least=verification.least_shares(view))
            manifest = build_command_job(run, expose, spec)
            manifest["metadata"]["labels"][names.VERIFIED_REPOSITORY_LABEL] = run.owner.uid
        await leader_jobs.create_tried(self._cluster.client, manifest, self._cluster.check_leading)
        return True

    async def _read(self, repository: BackupRepository, job: MaintenanceJob) -> _Found:
        """Return what the Job says in its log and its termination message."""
        client, namespace, log, unread = self._cluster.client, self._namespace, "", ""
        pod = await read_pod(client, namespace, job.name)
        end = parse_pod_end(pod) if pod is not None else None
        if pod is not None:
            name, limit = pod["metadata"]["name"], _LOG_LIMIT_BYTES
            try:
                log = await client.pod_log(namespace, name, container=names.MAINTENANCE_CONTAINER, limit_bytes=limit)
            except KubeError as e:
                # A container that never ran has no log, and the kubelet of a lost node does not answer.
                if self._may_pass(e, repository, job):
                    raise
                unread = str(e)
        found = _Found(SHARE_LINE.find(log), VERIFIED_LINE.find(log))
        if end is None or not (job.succeeded or end.exit_code == 0):
            failed = describe_failure(job, pod)
            message = (failed.entry and failed.entry.message) or ""
            out_of_memory = failed.cause is FailureCause.OUT_OF_MEMORY and failed.limit_bytes
            return replace(found, failure=message, memory_bytes=2 * out_of_memory if out_of_memory else None)
        try:
            # Results that the log has lost are an error, although those before count.
            read_output(VERIFIED_LINE, end.message, log)
        except (ContractError, ResultError) as e:
            return replace(found, failure=unread or str(e))
        unknown = [one for one in found.snapshots if one.outcome is None]
        if unknown:
            text = f"{len(unknown)} of {len(found.snapshots)} snapshots could not be verified"
            return replace(found, failure=f"{text}: {unknown[0].id}: {'; '.join(unknown[0].faults)}")
        return found

    async def _completed(self, volume_namespace: str) -> AsyncIterator[Transfer]:
        """Yield all completed backups of the namespace's volumes that name a snapshot, in all locations.

        A cluster may have too many to keep all.
        """
        for resource, model in _MODELS:
            async for page in self._cluster.client.pages(Selection(resource, self._namespace)):
                for raw in page.items:
                    try:
                        cr = model.parse(raw)
                    except ContractError as e:
                        _log.debug("transfer ignored, the resource is invalid: %s", e)
                        continue
                    completed = cr.phase is Phase.COMPLETED and cr.status.snapshot_id
                    if completed and cr.repository_namespace == volume_namespace:
                        yield cr

    async def _write(
        self, repository: BackupRepository, job: MaintenanceJob, found: _Found, transfers: Iterable[Transfer]
    ) -> None:
        """Write what the Job has found to the transfers, and then to the repository, with Events."""
        cluster, key = self._cluster, repository.key
        by_id = {one.id: one for one in found.snapshots}
        every = [(cr, by_id.get(cr.status.snapshot_id or "") if _is_in(cr, key) else None) for cr in transfers]
        own = [(cr, one) for cr, one in every if _is_in(cr, key)]
        named = {cr.status.snapshot_id for cr, _ in own}
        unnamed = [one for one in by_id.values() if one.id not in named]
        damage = (*verification.describe_damage(starmap(_copy_of, every)), *verification.describe_unnamed(unnamed))
        after = self._after(repository, job, found, list(map(redact, damage)), {cr.source_claim or "" for cr, _ in own})
        # At one time: of several copies of a volume, a damaged one counts.
        at = cluster.now().replace(microsecond=0)
        for cr, one in own:
            if (outcome := _conclude(cr, one, found, after)) is None:
                continue
            try:
                await self._record(cr, one, Verification(at=at, outcome=outcome))
            except AgentError as e:
                # What is damaged must not pass for a good copy.
                if self._may_pass(e, repository, job):
                    raise
                # It may have been deleted meanwhile.
                _log.warning("could not record the verification of %s %s: %s", cr.kind_name, cr.name, e)
        cluster.check_leading()
        change = {"metadata": {"annotations": {names.VERIFICATION_ANNOTATION: after.to_json()}}}
        await cluster.client.patch_if_unchanged(BACKUP_REPOSITORIES, repository.metadata, change)
        await self._report(repository, job, found, after)

    def _after(
        self, repository: BackupRepository, job: MaintenanceJob, found: _Found, damaged: list[str], claims: set[str]
    ) -> RepositoryVerification:
        """Return the record after the end of the Job; `claims` are the PVCs that have a backup, if known."""
        record, at = self._record_of(repository), self._cluster.now()
        failure = None if found.failure is None else redact(found.failure)
        if job.restores:
            outcome = next((one.outcome for one in found.snapshots if one.outcome), None)
            if outcome is not None:
                tests = record.tests.found(job.created, job.restores, outcome)
            else:
                tests = record.tests.failed(job.created, job.restores, failure or _NO_RESULT, at)
            # Of a Job whose pod never ran, no backups were read.
            tests = tests.only(claims) if claims else tests
            return verification.after_restore_test(record, tests, damaged=damaged, at=at)
        memory_bytes = found.memory_bytes
        return verification.after_job(
            record, job.created, found.shares, damaged=damaged, failure=failure, at=at, memory_bytes=memory_bytes
        )

    def _may_pass(self, error: AgentError, repository: BackupRepository, job: MaintenanceJob) -> bool:
        """Return whether the error may pass: it has not kept the end of the Job from being stored for long."""
        return error.retry and self._ages.seconds(repository.name, f"end of {job.uid}") < leader_jobs.START_SECONDS

    async def _record(self, cr: Transfer, found: VerifiedSnapshot | None, new: Verification) -> None:
        """Record the verification on a transfer, with an Event if it is the first that failed."""
        cluster, last = self._cluster, Verification.from_annotations(cr.metadata.annotations)
        resource = DATA_UPLOADS if isinstance(cr, DataUpload) else POD_VOLUME_BACKUPS
        cluster.check_leading()
        patch = {"metadata": {"annotations": {names.VERIFICATION_ANNOTATION: new.to_json()}, "uid": cr.uid}}
        await cluster.client.patch(resource, self._namespace, cr.name, patch)
        if found is not None and not new.passed and not is_damaged(last):
            faults = redact(f"kopia snapshot {found.id}: {'; '.join(found.faults)}")
            await cluster.events.record(cr, "VerificationFailed", faults, warning=True)

    async def _report(
        self, repository: BackupRepository, job: MaintenanceJob, found: _Found, after: RepositoryVerification
    ) -> None:
        """Record Events on the repository: what was right, each volume that is not, why nothing was found out."""
        events = self._cluster.events
        if after.damaged_at == job.created:
            for text in after.damaged:
                await events.record(repository, "VerificationFailed", text, warning=True)
        elif job.restores and found.failure is None:
            read = "; ".join(f"{one.files} files with {one.bytes} bytes are right" for one in found.snapshots)
            await events.record(repository, "Verified", f"PVC {job.restores} was restored and compared: {read}")
        elif found.shares:
            contents = sum(one.contents or 0 for one in found.shares)
            text = f"read {len(found.shares)} of {len(after.read_at)} shares: {contents} contents are right"
            if after.proven_at is not None:
                text += f"; all was read since {format_time(after.proven_at)}"
            await events.record(repository, "Verified", text)
        if found.failure is None:
            self._reported.pop(repository.name, None)
            return
        text = f"PVC {job.restores}: {after.tests.message}" if job.restores else after.message
        await self._report_once(repository, "VerificationIncomplete", f"Job {job.name}: {text}")

    async def _report_once(self, repository: BackupRepository, reason: str, message: str) -> None:
        if self._reported.get(repository.name) != message:
            self._reported[repository.name] = message
            await self._cluster.events.record(repository, reason, redact(message), warning=True)


def _conclude(
    cr: Transfer, one: VerifiedSnapshot | None, found: _Found, after: RepositoryVerification
) -> VerificationOutcome | None:
    """Return what is known now of the snapshot of a transfer: what was found out, or that all of it was read by now.

    A Job that failed may know of damage, and not in which snapshots.
    """
    if one is not None and one.outcome is not None:
        return one.outcome
    completed = cr.status.completion_timestamp or cr.metadata.creation_timestamp
    if found.failure is not None or completed is None:
        return None
    last = Verification.from_annotations(cr.metadata.annotations)
    return VerificationOutcome.PASSED if verification.proves(after, completed, last) else None


def _is_in(cr: Transfer, key: RepositoryKey) -> bool:
    return (cr.repository_namespace, cr.spec.backup_storage_location) == key[:2]


def _copy_of(cr: Transfer, found: VerifiedSnapshot | None) -> VerifiedCopy:
    meta, created = cr.metadata, cr.made_at
    owners = (owner.name for owner in meta.owner_references if owner.kind == BACKUPS.kind)
    backup = meta.annotations.get(names.BACKUP_ANNOTATION) or next(owners, "")
    name = f"backup {backup}" if backup else f"{cr.kind_name} {cr.name}"
    if created is not None:
        name += f" of {format_time(created)}"
    return VerifiedCopy(
        cr.repository_namespace,
        cr.source_claim or cr.name,
        f"{name} in location {cr.spec.backup_storage_location}",
        created or NEVER,
        found,
        Verification.from_annotations(meta.annotations),
    )
