"""Backup repositories as a user sees them: the documents of `nodeagent repo get` and `nodeagent repo describe`.

Their fields are stable: they are the JSON that these commands print, in camelCase; times are RFC 3339.
"""

from typing import Self

from msgspec import field

from client.events import EventLine
from client.next_maintenance import NextMaintenance
from core.contract import MaintenanceResult
from core.models.base import Time, WireModel
from core.models.names import REPOSITORY_ID_ANNOTATION
from core.models.storage import BackupRepository, MaintenanceEntry
from core.snapshot_contract import SnapshotTotal
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.verification import RepositoryVerification

__all__ = ["RepositoryDetails", "RepositoryList", "RepositoryProof", "RepositorySummary", "RunningJobState"]


class RepositorySummary(WireModel):
    """One BackupRepository; `contents` and `index_blobs` are from the last maintenance, None until then."""

    name: str
    namespace: str
    volume_namespace: str
    location: str
    phase: str
    message: str = ""
    created: Time | None = None
    last_maintenance: Time | None = None
    maintenance_frequency: str = ""
    repository_id: str = field(name="repositoryID", default="")
    next: NextMaintenance
    contents: int | None = None
    index_blobs: int | None = None

    @classmethod
    def of(cls, repository: BackupRepository, record: MaintenanceRecord, following: NextMaintenance) -> Self:
        """Return what the repository, its record and the decision about it say."""
        meta, spec, status = repository.metadata, repository.spec, repository.status
        return cls(
            name=meta.name,
            namespace=meta.namespace,
            volume_namespace=spec.volume_namespace,
            location=spec.backup_storage_location,
            phase=str(repository.phase),
            message=status.message,
            created=meta.creation_timestamp,
            last_maintenance=status.last_maintenance_time,
            maintenance_frequency=spec.maintenance_frequency,
            repository_id=meta.annotations.get(REPOSITORY_ID_ANNOTATION, ""),
            next=following,
            contents=record.contents,
            index_blobs=record.index_blobs,
        )


class RepositoryList(WireModel):
    """Some BackupRepositories, and what could not be found out about them."""

    repositories: list[RepositorySummary]
    notes: list[str]


class RunningJobState(WireModel):
    """A Job that has not ended, and its pod, if there is one; `pending` is why that has not started."""

    job: str
    created: Time
    pod: str = ""
    phase: str = ""
    node: str = ""
    pending: str = ""


class RepositoryProof(WireModel):
    """What the leader has verified of a repository.

    `outcome` is what it found; empty: nothing yet. So many of the 16 `shares` were read; `proven` is since when all of
    them were, None: not all. `damaged` names volumes, files and the copies that are still right. `message` is why the
    last Job found nothing out.
    """

    at: Time | None = None
    outcome: str = ""
    shares: int = 0
    proven: Time | None = None
    damaged: list[str] = field(default_factory=list)
    message: str = ""

    @classmethod
    def of(cls, record: RepositoryVerification) -> Self | None:
        """Return what the record says; None: no Job has ended."""
        if record.job is None:
            return None
        return cls(
            at=record.at,
            outcome=str(record.outcome or ""),
            shares=len(record.shares),
            proven=record.proven_at,
            damaged=record.damaged,
            message=record.message,
        )


class RepositoryDetails(RepositorySummary):
    """Everything that is known about one BackupRepository.

    `created_here`: an agent of this cluster created the kopia repository, instead of finding it. `next_quick` and
    `next_full` are kopia's own schedule. `last_result` is from the newest Job whose pod still exists. The peaks are
    kopia's resident memory in earlier runs; `memory_request` and `memory_limit` apply to the next attempt;
    `memory_too_small`: the last one was out of memory, and this one gets no more. `incomplete_full`: the last full
    maintenance did not finish. `unreferenced` are the kopia snapshots that nothing refers to, as of `reported_at`;
    None: not known. `verification` is None where the leader has not verified it. `history` and `events` begin with the
    newest.
    """

    created_here: bool = False
    location_phase: str = ""
    location_message: str = ""
    next_quick: Time | None = None
    next_full: Time | None = None
    full_interval_seconds: float = 0.0
    last_mode: str = ""
    last_result: MaintenanceResult | None = None
    peak_quick_bytes: int = 0
    peak_full_bytes: int = 0
    memory_request: str = ""
    memory_limit: str = ""
    memory_too_small: bool = False
    incomplete_full: bool = False
    reported_at: Time | None = None
    unreferenced: SnapshotTotal | None = None
    verification: RepositoryProof | None = None
    running: list[RunningJobState] = field(default_factory=list)
    history: list[MaintenanceEntry] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
