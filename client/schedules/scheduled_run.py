"""One run of a schedule: a backup of its PVCs, its verification, and the deletion of all backups that are expired."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from msgspec import structs

from client.backups.delete import DeletionPlan, DeletionWish, check_plan, execute_plan, plan_deletion
from client.backups.deletion_jobs import DeletionGuard, DeletionRecord, hold_deletions
from client.backups.deletion_report import BackupDeletion, build_deletion, build_report
from client.backups.manifests import BackupError, BackupRequest, Method, PlannedVolume
from client.backups.plan import check_backup, delete_abandoned, plan_backup, start_backup
from client.collections.collection import Backups, VolumeProgress
from client.collections.models import Backup, explain_end
from client.schedules.request import ScheduleRequest
from client.session import Session
from client.verifications.report import VerificationReport, choose_volumes, explain_report
from client.verifications.verify import VerificationRequest, verify_volumes
from core.errors import AgentError
from core.kube.resources import DAEMON_SETS, JOBS
from core.models.backups import RetentionReport
from core.models.base import parse_time
from core.models.names import AGENT_DAEMONSET
from core.models.phases import Phase
from core.models.verification import WHOLE_PERCENT

_STAMP: Final = "%Y%m%d%H%M%S"

_VERIFICATION_TIMEOUT: Final = timedelta(hours=6)
"""Of the Job that reads one repository."""


class ScheduleError(AgentError):
    """Not all of a run succeeded."""


@dataclass(frozen=True)
class ScheduleTools:
    """What a run works with; `job` is the name of the Job that it is of, if it is of one.

    `show` gets the progress of the backup, `on_line` what has been done, `on_report` what retention has left.
    """

    session: Session
    show: Callable[[list[VolumeProgress]], None]
    on_line: Callable[[str], None]
    on_report: Callable[[RetentionReport], None]
    job: str | None = None


@dataclass
class ScheduleRun:
    """A run: the name of its backup, and why it did not succeed, one line each.

    `begun` is when its Job was created; None: it is of none. `unverified`: of a completed volume it is not recorded
    whether its data can be read back.
    """

    backup: str
    begun: datetime | None = None
    failures: list[str] = field(default_factory=list)
    unverified: bool = False


async def run_schedule(tools: ScheduleTools, request: ScheduleRequest) -> None:
    """Back up, wait for the end, verify, and delete what is expired; a failed backup does not keep it from deleting.

    The newest copies of volumes stay in any case. A run may be repeated: of the same Job it continues the backup.

    Raises:
        ScheduleError: the backup is not complete, or not everything was deleted; the message names the first cause.
    """
    run = await _begin(tools, request)
    try:
        await _back_up(tools, request, run)
    except AgentError as e:
        run.failures.append(f"backup {run.backup}: {e}")
        # An earlier pod of the Job may have completed it.
        run.unverified = request.verify and await _exists(tools, run)
    if run.unverified and request.deletes:
        run.failures.append(
            "expired backups are not deleted, since it is not recorded whether the new one can be read back"
        )
    elif request.deletes:
        try:
            await _expire(tools, run, request)
        except AgentError as e:
            run.failures.append(f"deletion of expired backups: {e}")
    if run.failures:
        raise ScheduleError("; ".join(run.failures))


@dataclass(frozen=True)
class SchedulePreview:
    """What a run would back up now, and delete (None: it deletes nothing); `failures` are the volumes it would miss."""

    volumes: list[PlannedVolume]
    failures: list[str]
    deletion: BackupDeletion | None = None


async def preview_schedule(tools: ScheduleTools, request: ScheduleRequest) -> SchedulePreview:
    """Return what a run would do now; nothing is changed; AgentError: a run would not begin."""
    run = await _begin(replace(tools, job=None), request)
    preview = SchedulePreview(await _plan(tools, request, run), run.failures)
    if not request.deletes:
        return preview
    plan, found = await check_plan(
        tools.session, await plan_deletion(tools.session, DeletionWish(policies={request.label: request.keep}))
    )
    return replace(preview, deletion=build_deletion(plan, found, done=False))


async def _begin(tools: ScheduleTools, request: ScheduleRequest) -> ScheduleRun:
    """Return a run, whose backup has the time of its Job by the API server, so that a second pod has the same."""
    session = tools.session
    if tools.job:
        job = await session.client.get(JOBS, session.namespace, tools.job)
        begun = parse_time(job["metadata"]["creationTimestamp"])
        return ScheduleRun(f"{request.name}-{begun.strftime(_STAMP)}", begun)
    # Whether it exists does not matter: the answer has the time.
    await session.client.read(DAEMON_SETS, session.namespace, AGENT_DAEMONSET)
    now = session.date()
    if now is None:
        raise ScheduleError("the API server's answers have no Date: the time is not known")
    return ScheduleRun(f"{request.name}-{now.strftime(_STAMP)}")


async def _plan(tools: ScheduleTools, request: ScheduleRequest, run: ScheduleRun) -> list[PlannedVolume]:
    choice = replace(request.choice, on_left_out=run.failures.append)
    wanted = BackupRequest(
        name=run.backup,
        namespace=request.namespace,
        location=request.location,
        ttl=request.ttl,
        keep=request.keep,
        labels=request.labels,
        annotations=request.annotations,
        schedule=request.name,
    )
    volumes = []
    for volume in await plan_backup(tools.session, wanted, choice):
        try:
            await check_backup(tools.session, [volume])
        except BackupError as e:
            run.failures.append(str(e))
        else:
            volumes.append(volume)
    return volumes


async def _back_up(tools: ScheduleTools, request: ScheduleRequest, run: ScheduleRun) -> None:
    if request.choice.required_method is not Method.FS_BACKUP:
        await delete_abandoned(tools.session, request.name, request.claim_namespaces)
    volumes = await _plan(tools, request, run)
    missing = await start_backup(tools.session, volumes)
    run.failures += missing
    if len(missing) == len(volumes) and not await _exists(tools, run):
        # What each volume lacks has been named.
        return
    tools.on_line(f"backup {run.backup} was started: {len(volumes) - len(missing)} volumes")
    session = tools.session
    backup = await Backups(session.client, session.namespace).wait(run.backup, session.clock, tools.show)
    tools.on_line(f"backup {backup.name} is {backup.phase}: {backup.counted} volumes")
    # What is missing has been named, with its reason, and no volume that has a transfer.
    ended_badly = any(one.phase is not Phase.COMPLETED for one in backup.volumes)
    if (ended_badly or not run.failures) and (failure := explain_end(backup)):
        run.failures.append(f"backup {backup.name} is {backup.phase}: {failure}")
    if request.verify and any(one.phase is Phase.COMPLETED for one in backup.volumes):
        await _verify(tools, backup, run)


async def _exists(tools: ScheduleTools, run: ScheduleRun) -> bool:
    """Return whether the backup of the run has a transfer."""
    return await Backups(tools.session.client, tools.session.namespace).find_existing(run.backup) is not None


async def _verify(tools: ScheduleTools, backup: Backup, run: ScheduleRun) -> None:
    """Read all files of the backup back; the result is recorded on its transfers."""
    volumes, _ = choose_volumes(backup, ())
    # An earlier pod of the Job may have failed after it: not all data is read again.
    volumes = [one for one in volumes if one.verification is None or not one.verification.whole]
    request = VerificationRequest(WHOLE_PERCENT, restore=False, timeout=_VERIFICATION_TIMEOUT)
    verified = await verify_volumes(tools.session, volumes, request)
    report = VerificationReport(backup=backup.name, volumes=verified, notes=[])
    # The rules of retention know of damage by what is recorded.
    run.unverified = any(one.at is None for one in report.volumes)
    for one in report.volumes:
        tools.on_line(f"verification of {one.namespace}/{one.claim}: {one.outcome}")
    if failure := explain_report(report):
        run.failures.append(f"verification of backup {backup.name}: {failure}")


async def _expire(tools: ScheduleTools, run: ScheduleRun, request: ScheduleRequest) -> None:
    """Delete what is expired, and keep the report of it; what fails is a failure of the run."""
    session = tools.session
    async with hold_deletions(session) as guard:
        report = RetentionReport(at=session.now(), schedule=request.name)
        failures: list[str] = []
        try:
            wish = DeletionWish(begun=run.begun, policies={request.label: request.keep})
            plan, _ = await check_plan(session, await plan_deletion(session, wish))
            report = build_report(plan, plan.now or report.at, request.name)
            failures += plan.refusals
            await _carry_out(tools, plan, guard)
        except AgentError as e:
            failures.append(str(e))
        run.failures += [f"deletion of expired backups: {one}" for one in failures]
        report = structs.replace(report, failure="; ".join(failures) or None)
        tools.on_report(report)
        await DeletionRecord(session.client, session.namespace).write_report(report)


async def _carry_out(tools: ScheduleTools, plan: DeletionPlan, guard: DeletionGuard) -> None:
    if not (plan.transfers or plan.stale):
        return
    deletion = build_deletion(plan, await execute_plan(tools.session, plan, guard), done=True)
    for note in deletion.notes:
        tools.on_line(note)
    for one in deletion.backups:
        snapshots = sum(volume.snapshots for volume in one.volumes)
        tools.on_line(f"backup {one.name} was expired, and is deleted with {snapshots} snapshots")
