"""Jobs that read kopia snapshots back: one for the volumes of a backup in one repository."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Final, TypeAlias

from client.mover_jobs import find_subject_of, plan_job, run_job
from client.session import Session
from core.contract import parse_result
from core.kube.client import Selection
from core.kube.errors import NotFoundError
from core.kube.resources import BACKUP_REPOSITORIES
from core.kube.types import Manifest
from core.models.storage import BackupRepository, RepositoryKey
from core.models.verification import VERIFIED_LINE, SnapshotVerification, VerifiedSnapshot
from core.mover_specs import VerifySnapshots
from exposer.pod_manifest import MoverVolume

Keep: TypeAlias = Callable[[Mapping[str, VerifiedSnapshot]], Awaitable[None]]
"""Gets results by the IDs of their snapshots, before the Job that found them out is deleted: also of one that failed,
did not end in time, or whose command is interrupted."""

_JOB_EXTRA: Final = timedelta(minutes=15)
"""A Job whose command was killed ends by itself, later than the command would have ended it."""


@dataclasses.dataclass(frozen=True)
class VerificationWork:
    """What a Job verifies: snapshots of one repository, and the `percent` of their files that it reads.

    With `volume`, all files of the only snapshot are compared with it instead.
    """

    repository: BackupRepository
    snapshots: tuple[str, ...]
    percent: float
    timeout: timedelta
    volume: MoverVolume | None = None


async def find_repository(tools: Session, key: RepositoryKey) -> BackupRepository:
    """Return the BackupRepository of a namespace and a location; NotFoundError: there is none."""
    listed = await tools.client.list(Selection(BACKUP_REPOSITORIES, tools.namespace))
    found = [BackupRepository.parse(raw) for raw in listed if RepositoryKey.of(raw) == key]
    if not found:
        raise NotFoundError(f"there is no BackupRepository of {key}", status=404, reason="NotFound")
    return min(found, key=lambda repository: repository.name)


async def plan_verification(tools: Session, work: VerificationWork) -> Manifest:
    """Return the manifest of the Job."""
    subject = await find_subject_of(tools, "verify", work.repository)
    spec = VerifySnapshots(snapshots=work.snapshots, percent=work.percent)
    return await plan_job(tools, subject, spec, longest=work.timeout + _JOB_EXTRA, volume=work.volume)


async def verify_snapshots(tools: Session, work: VerificationWork, keep: Keep, planned: Manifest | None = None) -> None:
    """Run the Job, which may have been planned before; `keep` gets its results.

    Raises:
        ResultError: the termination message is not a verification's.
        JobError: the Job failed, cannot start, did not end in time, or has not all results in its log.
    """

    async def read(log: str) -> None:
        await keep({one.id: one for one in VERIFIED_LINE.find(log)})

    what = "verification" if work.volume is None else "comparison"
    answer = await run_job(tools, planned or await plan_verification(tools, work), what, work.timeout, read)
    parse_result(SnapshotVerification, answer.message)
    # Results that the log has lost are an error, although those before were kept.
    answer.find(VERIFIED_LINE)
