"""Jobs that read kopia snapshots back: one for the volumes of a backup in one repository."""

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from core.contract import parse_result
from core.kube.client import Selection
from core.kube.errors import NotFoundError
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.base import JsonDict
from core.models.storage import BackupRepository, RepositoryKey
from core.models.verification import VERIFIED_LINE, SnapshotVerification, VerifiedSnapshot
from exposer.maintenance_job import build_verification_job
from exposer.pod_files import MoverVolume
from nodeagent.operations.mover_jobs import JobAnswer, JobError, JobSubject, JobTools, plan_job, read_location, run_job

__all__ = ["VerificationWork", "find_repository", "plan_verification", "read_answer", "verify_snapshots"]

_CAUSE_CHARACTERS: Final = 1000

_JOB_EXTRA: Final = timedelta(minutes=15)
"""A Job whose command was killed ends by itself, later than the command would have ended it."""


@dataclasses.dataclass(frozen=True)
class VerificationWork:
    """What a Job verifies: snapshots of one repository, of which it reads `percent` of the files.

    With `volume`, all files of the only snapshot are compared with it instead.
    """

    repository: BackupRepository
    snapshots: tuple[str, ...]
    percent: float
    timeout: timedelta
    volume: MoverVolume | None = None


async def find_repository(tools: JobTools, key: RepositoryKey) -> BackupRepository:
    """Return the BackupRepository of a namespace and a location.

    Raises:
        NotFoundError: there is none.
        KubeError: they cannot be listed.
    """
    listed = await tools.client.list(Selection(BACKUP_REPOSITORIES, tools.namespace))
    found = [BackupRepository.parse(raw) for raw in listed if RepositoryKey.of(raw) == key]
    if not found:
        raise NotFoundError(f"there is no BackupRepository of {key}", status=404, reason="NotFound")
    return min(found, key=lambda repository: repository.name)


async def plan_verification(tools: JobTools, work: VerificationWork) -> JsonDict:
    """Return the manifest of the Job.

    Raises:
        ConfigError: no agent is installed, or its configuration cannot be read.
        KubeError: the API server rejected a request.
    """
    location = await read_location(tools.client, tools.namespace, work.repository.spec.backup_storage_location)
    run, expose = await plan_job(tools, JobSubject.of(work.repository, "verify"), location)
    settings = dataclasses.replace(run.settings, active_deadline=work.timeout + _JOB_EXTRA)
    run = dataclasses.replace(run, settings=settings, volume=work.volume)
    return build_verification_job(run, expose, work.snapshots, work.percent)


async def verify_snapshots(tools: JobTools, work: VerificationWork) -> dict[str, VerifiedSnapshot]:
    """Run the Job, and return its results by the IDs of the snapshots.

    Of a Job that failed or did not end in time, the results that its log has count; the others have the cause.

    Raises:
        ConfigError: no agent is installed, or its configuration cannot be read.
        JobError: the Job failed, cannot start, or did not end in time.
        KubeError: the API server rejected a request.
    """
    found: dict[str, VerifiedSnapshot] = {}

    def keep(log: str) -> None:
        found.update(_parse_log(log))

    try:
        answer = await run_job(tools, await plan_verification(tools, work), "verification", work.timeout, keep)
    except JobError as e:
        if not found:
            raise
        text = " ".join(str(e).split())[:_CAUSE_CHARACTERS]
        lost = {
            one: VerifiedSnapshot(id=one, percent=work.percent, faults=[text], fault_count=1) for one in work.snapshots
        }
        return lost | found
    return read_answer(answer, work.snapshots)


def read_answer(answer: JobAnswer, snapshots: Sequence[str]) -> dict[str, VerifiedSnapshot]:
    """Return the results of these snapshots.

    Raises:
        ResultError: the termination message is not that of a verification.
        JobError: one of them has none.
    """
    parse_result(SnapshotVerification, answer.message)
    found = _parse_log(answer.log)
    if missing := [one for one in snapshots if one not in found]:
        raise JobError(f"the log of the pod has no result of {len(missing)} snapshots, such as {missing[0]}")
    return found


def _parse_log(log: str) -> dict[str, VerifiedSnapshot]:
    return {one.id: one for one in VERIFIED_LINE.find(log)}
