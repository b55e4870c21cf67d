"""The snapshot report of one repository by command: a Job lists what nothing refers to, and is deleted afterward."""

from datetime import timedelta
from typing import Final

from client.mover_jobs import JobAnswer, JobSubject, JobTools, plan_job, read_location, run_job
from client.repositories import read_repository
from core.contract import parse_result
from core.models.base import WireModel
from core.mover_specs import ReportSnapshots
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotVerdict

__all__ = ["SnapshotList", "report_snapshots"]

_ORDER: Final = (SnapshotVerdict.UNREFERENCED, SnapshotVerdict.INCOMPLETE, SnapshotVerdict.UNKNOWN)


class SnapshotList(WireModel):
    """The kopia snapshots of one repository that are not referenced, and the totals of all of them."""

    repository: str
    totals: SnapshotReport
    snapshots: list[ReportedSnapshot]
    notes: list[str]


async def report_snapshots(tools: JobTools, name: str, *, timeout: timedelta) -> SnapshotList:  # noqa: ASYNC109 - of the Job
    """Run the report of the repository `name` and return it.

    Raises:
        NotFoundError: the repository or its location does not exist.
        ConfigError: no agent is installed, or its configuration cannot be read.
        JobError: the Job failed, cannot start, or did not end in time.
        KubeError: the API server rejected a request.
    """
    repository = await read_repository(tools.client, tools.namespace, name)
    location = await read_location(tools.client, tools.namespace, repository.spec.backup_storage_location)
    subject = JobSubject.of(repository, "report", location)
    manifest = await plan_job(tools, subject, ReportSnapshots())
    answer = await run_job(tools, manifest, "report", timeout)
    return _read(name, answer)


def _read(name: str, answer: JobAnswer) -> SnapshotList:
    totals = parse_result(SnapshotReport, answer.message)
    found = answer.find(REPORTED_LINE)
    notes = [f"what refers to snapshots could not be read: {totals.unread}"] if totals.unread else []
    found.sort(key=lambda one: (_ORDER.index(one.verdict) if one.verdict in _ORDER else len(_ORDER), one.start, one.id))
    return SnapshotList(repository=name, totals=totals, snapshots=found, notes=notes)
