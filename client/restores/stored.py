"""What a storage location holds, by its snapshots alone: a Job lists them, also in a cluster that knows no backup."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from msgspec import field

from client.mover_jobs import JobAnswer, JobSubject, JobTools, plan_job, read_location, run_job
from core.contract import parse_result
from core.models.base import WireModel
from core.models.storage import RepositoryKey
from core.mover_specs import ListSnapshots
from core.snapshot_contract import STORED_LINE, TOTAL_LINE, SnapshotListing, StoredSnapshot
from exposer.maintenance_job import build_command_job
from exposer.model import Owner

__all__ = ["StoredList", "list_stored"]

_SHOWN_CUT: Final = 10


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
        JobError: the Job failed, cannot start, or did not end in time.
        KubeError: the API server rejected a request.
    """
    location = await read_location(tools.client, tools.namespace, location_name)
    subject = JobSubject(Owner.of(location), "list", RepositoryKey("", location_name))
    spec = ListSnapshots(volume_namespaces=tuple(volume_namespaces))
    manifest = build_command_job(*await plan_job(tools, subject, location), spec)
    answer = await run_job(tools, manifest, "list", timeout)
    return _read(location_name, answer)


def _read(location: str, answer: JobAnswer) -> StoredList:
    totals = parse_result(SnapshotListing, answer.message)
    found = STORED_LINE.find(answer.log)
    notes = [f"the repository of namespace {one.volume_namespace}: {one.message}" for one in totals.unread]
    if (more := totals.unread_count - len(totals.unread)) > 0:
        notes.append(f"{more} more repositories could not be listed")
    if len(found) < totals.snapshots:
        text = f"the log of the pod has only {len(found)} of {totals.snapshots} snapshots{_name_cut(found, answer.log)}"
        notes.append(f"{text}: list one namespace at a time (-n)")
    found.sort(key=lambda one: one.start, reverse=True)
    found.sort(key=_group)
    return StoredList(location=location, snapshots=found, notes=notes)


def _name_cut(found: Sequence[StoredSnapshot], log: str) -> str:
    """Return of which namespaces snapshots are missing; empty: the log does not say how many there were."""
    kept = Counter(one.volume_namespace for one in found)
    totals = TOTAL_LINE.find(log)
    cut = [one for one in totals if kept[one.volume_namespace] < one.snapshots]
    shown = [f"{one.volume_namespace} ({kept[one.volume_namespace]} of {one.snapshots})" for one in cut[:_SHOWN_CUT]]
    more = f" and {len(cut) - len(shown)} more namespaces" if len(cut) > len(shown) else ""
    return f", and not all of {', '.join(shown)}{more}" if shown else ""


def _group(one: StoredSnapshot) -> tuple[str, str, str, str]:
    claim = one.claim
    return one.cluster, one.backup, claim.namespace if claim else one.volume_namespace, claim.name if claim else ""
