"""Backups as people see them: the transfers of one name, put together. Pure, but for the lists that it reads."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final

from msgspec import field

from client.backups.methods import Method
from client.backups.moving import (
    Found,
    count_completed,
    group_transfers,
    list_transfers,
    sort_newest_first,
    sum_up,
)
from core.kube.client import KubeClient, select_labels
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS, Resource
from core.models.base import WireModel
from core.models.names import (
    BACKUP_ANNOTATION,
    BACKUP_LABEL,
    BACKUP_TTL_ANNOTATION,
    BACKUP_VOLUMES_ANNOTATION,
    PVC_NAME_ANNOTATION,
    VELERO_BACKUP_LABEL,
    label_value,
)
from core.models.phases import RUNNING_PHASES, Phase
from core.models.saved_claim import SavedClaim
from core.models.transfers import DataUpload, PodVolumeBackup
from core.models.units import parse_duration

__all__ = [
    "Backup",
    "BackupList",
    "BackupOrigin",
    "BackupPhase",
    "BackupVolume",
    "gather",
    "phase_of",
    "read_backups",
    "read_named",
]

_KINDS: Final[Mapping[Resource, type[DataUpload] | type[PodVolumeBackup]]] = {
    DATA_UPLOADS: DataUpload,
    POD_VOLUME_BACKUPS: PodVolumeBackup,
}


class BackupOrigin(StrEnum):
    """Whose command or schedule made a backup."""

    NODEAGENT = "nodeagent"
    VELERO = "velero"


class BackupPhase(StrEnum):
    """The phase of a backup, which follows from those of its transfers."""

    NEW = "New"
    IN_PROGRESS = "InProgress"
    CANCELING = "Canceling"
    COMPLETED = "Completed"
    PARTIALLY_FAILED = "PartiallyFailed"
    FAILED = "Failed"
    CANCELED = "Canceled"
    INCOMPLETE = "Incomplete"
    """All transfers have ended, and there are fewer of them than the backup has volumes."""


class BackupVolume(WireModel):
    """One volume of a backup, by its transfer. Sizes in bytes; `attempt` counts from 1.

    `claim` is the name of the PVC; of a volume of a pod without one, `<pod>:<volume>`. `reason` and `message` are what
    the transfer waits for, or why it failed. `saved` is the PVC as it was; None: the transfer does not have it.
    """

    namespace: str
    claim: str
    method: Method
    kind: str
    transfer: str
    phase: Phase
    reason: str = ""
    message: str = ""
    attempt: int = 1
    node: str = ""
    location: str = ""
    bytes_done: int = 0
    total_bytes: int = 0
    incremental_bytes: int | None = None
    snapshot_id: str = ""
    created: datetime | None = None
    started: datetime | None = None
    completed: datetime | None = None
    saved: SavedClaim | None = None


class Backup(WireModel):
    """One backup.

    `expected` is how many volumes it has, `missing` how many of them have no transfer; None and 0 for one of Velero,
    whose transfers do not say. `expires` is None for a backup that is kept until it is deleted, or unknown.
    """

    name: str
    origin: BackupOrigin
    phase: BackupPhase
    locations: list[str]
    created: datetime | None
    completed: datetime | None
    expires: datetime | None
    ttl: str
    expected: int | None
    missing: int
    bytes_done: int
    total_bytes: int
    volumes: list[BackupVolume]

    @property
    def counted(self) -> str:
        """How many of its volumes are completed, such as `2/3`."""
        return count_completed(self)


class BackupList(WireModel):
    """Backups, the newest first, and notes about what could not be read."""

    backups: list[Backup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all backups."""
        return [one.name for one in self.backups]


_Transfer = DataUpload | PodVolumeBackup


async def read_backups(client: KubeClient, namespace: str, own_name: str = "") -> BackupList:
    """Return the backups whose transfers are in the namespace: all, or the one of ours with that name.

    Raises:
        KubeError: the transfers cannot be listed.
    """
    if not own_name:
        return gather(await list_transfers(client, _KINDS, namespace))
    found = await _read_labeled(client, namespace, own_name, (BACKUP_LABEL,))
    return BackupList(backups=[one for one in found.backups if one.origin is BackupOrigin.NODEAGENT], notes=found.notes)


async def read_named(client: KubeClient, namespace: str, name: str) -> BackupList:
    """Return the backups of that name, ours and Velero's; the transfers of others are not listed.

    Raises:
        KubeError: the transfers cannot be listed.
    """
    return await _read_labeled(client, namespace, name, (BACKUP_LABEL, VELERO_BACKUP_LABEL))


async def _read_labeled(client: KubeClient, namespace: str, name: str, labels: Sequence[str]) -> BackupList:
    found: dict[tuple[str, str], Found] = {}
    for label in labels:
        listed = await list_transfers(client, _KINDS, namespace, select_labels({label: label_value(name)}))
        found |= {(resource.kind, raw["metadata"]["name"]): (resource, raw) for resource, raw in listed}
    gathered = gather(found.values())
    return BackupList(backups=[one for one in gathered.backups if one.name == name], notes=gathered.notes)


def gather(found: Iterable[Found]) -> BackupList:
    """Return the backups of these transfers, each with its kind; those of no backup are left out."""
    by_backup, notes = group_transfers(_KINDS, found, _backup_of)
    backups = [_build(origin, name, transfers) for (origin, name), transfers in by_backup.items()]
    sort_newest_first(backups)
    return BackupList(backups=backups, notes=notes)


def _backup_of(transfer: _Transfer) -> tuple[BackupOrigin, str] | None:
    meta = transfer.metadata
    if BACKUP_LABEL in meta.labels and (name := meta.annotations.get(BACKUP_ANNOTATION)):
        return BackupOrigin.NODEAGENT, name
    if name := meta.labels.get(VELERO_BACKUP_LABEL):
        return BackupOrigin.VELERO, name
    return None


def _build(origin: BackupOrigin, name: str, transfers: Sequence[_Transfer]) -> Backup:
    volumes = sorted((_volume(one) for one in transfers), key=lambda one: (one.namespace, one.claim, one.transfer))
    totals = sum_up(volumes, transfers, BACKUP_VOLUMES_ANNOTATION if origin is BackupOrigin.NODEAGENT else "")
    ttl = transfers[0].metadata.annotations.get(BACKUP_TTL_ANNOTATION, "")
    canceling = any(one.cancel_requested and not one.phase.final for one in transfers)
    return Backup(
        name=name,
        origin=origin,
        phase=phase_of([one.phase for one in volumes], missing=totals["missing"], canceling=canceling),
        locations=sorted({one.location for one in volumes}),
        expires=_expires(totals["created"], ttl),
        ttl=ttl,
        volumes=volumes,
        **totals,
    )


def _expires(created: datetime | None, ttl: str) -> datetime | None:
    try:
        return created + parse_duration(ttl) if created and ttl else None
    except (ValueError, OverflowError):
        return None


def phase_of(phases: Sequence[Phase], *, missing: int, canceling: bool) -> BackupPhase:
    """Return the phase of a backup, or of a restore, whose transfers have these."""
    if not all(phase.final for phase in phases):
        if canceling:
            return BackupPhase.CANCELING
        begun = any(phase.final or phase in RUNNING_PHASES for phase in phases)
        return BackupPhase.IN_PROGRESS if begun else BackupPhase.NEW
    if missing:
        return BackupPhase.INCOMPLETE
    kinds = set(phases)
    if len(kinds) == 1:
        return BackupPhase(str(phases[0]))
    return BackupPhase.PARTIALLY_FAILED if Phase.COMPLETED in kinds else BackupPhase.FAILED


def _volume(transfer: _Transfer) -> BackupVolume:
    status, saved = transfer.status, SavedClaim.of(transfer.metadata.annotations)
    if isinstance(transfer, DataUpload):
        namespace, claim, method = transfer.spec.source_namespace, transfer.spec.source_pvc, Method.CSI_SNAPSHOT
    else:
        pod, annotations = transfer.spec.pod, transfer.metadata.annotations
        claim = annotations.get(PVC_NAME_ANNOTATION) or f"{pod.name}:{transfer.spec.volume}"
        namespace, method = pod.namespace, Method.FS_BACKUP
    return BackupVolume(
        namespace=namespace,
        claim=claim,
        method=method,
        kind=transfer.kind_name,
        transfer=transfer.name,
        phase=transfer.phase,
        reason="" if transfer.phase is Phase.COMPLETED else transfer.pending_reason,
        message=status.message,
        attempt=transfer.attempts.number,
        node=status.node,
        location=transfer.spec.backup_storage_location,
        bytes_done=status.progress.bytes_done,
        total_bytes=status.progress.total_bytes,
        incremental_bytes=status.incremental_bytes,
        snapshot_id=status.snapshot_id,
        created=transfer.metadata.creation_timestamp,
        started=status.start_timestamp,
        completed=status.completion_timestamp,
        saved=saved,
    )
