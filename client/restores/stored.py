"""What a storage location holds, by its snapshots alone: a Job lists them, also in a cluster that knows no backup."""

from collections.abc import Sequence
from datetime import timedelta

from msgspec import field

from client.mover_jobs import (
    IncompleteLogError,
    JobAnswer,
    JobError,
    JobSubject,
    JobTools,
    plan_job,
    read_location,
    run_job,
)
from core.contract import parse_result
from core.models.base import WireModel
from core.models.storage import RepositoryKey
from core.mover_specs import ListSnapshots
from core.snapshot_contract import STORED_LINE, SnapshotListing, StoredSnapshot
from exposer.model import Owner

__all__ = ["StoredList", "list_stored"]


class StoredList(WireModel):
    """The complete snapshots of volumes in a storage location, and notes about what could not be read."""

    location: str
    snapshots: list[StoredSnapshot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def list_stored(
    tools: JobTools,
    location_name: str,
    *,
    volume_namespaces: Sequence[str] = (),
    timeout: timedelta,  # noqa: ASYNC109 - of the Job
) -> StoredList:
    """Return the snapshots of the repositories of these namespaces, or of all in the location.

    They are in the order of cluster, backup, namespace and PVC, and of each PVC the newest first.

    Raises:
        NotFoundError: the location does not exist.
        ConfigError: no agent is installed, or its configuration cannot be read.
        JobError: the Job failed, cannot start, did not end in time, or has not the whole list in its log.
        KubeError: the API server rejected a request.
    """
    location = await read_location(tools.client, tools.namespace, location_name)
    subject = JobSubject(Owner.of(location), "list", RepositoryKey("", location_name), location)
    spec = ListSnapshots(volume_namespaces=tuple(volume_namespaces))
    manifest = await plan_job(tools, subject, spec)
    answer = await run_job(tools, manifest, "list", timeout)
    return _read(location_name, answer)


def _read(location: str, answer: JobAnswer) -> StoredList:
    totals = parse_result(SnapshotListing, answer.message)
    try:
        found = answer.find(STORED_LINE)
    except IncompleteLogError as e:
        raise JobError(f"{e}: list one namespace at a time (-n)") from e
    notes = [f"the repository of namespace {one.volume_namespace}: {one.message}" for one in totals.unread]
    if (more := totals.unread_count - len(totals.unread)) > 0:
        notes.append(f"{more} more repositories could not be listed")
    found.sort(key=lambda one: one.start, reverse=True)
    found.sort(key=_group)
    return StoredList(location=location, snapshots=found, notes=notes)


def _group(one: StoredSnapshot) -> tuple[str, str, str, str]:
    claim = one.claim
    return one.cluster, one.backup, claim.namespace if claim else one.volume_namespace, claim.name if claim else ""
