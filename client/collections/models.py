"""Backups and restores as people and programs see them: the transfers of one name, put together. Pure."""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from msgspec import field

from client.backups.copies import name_volume
from client.backups.manifests import Method
from core.models import names as wire
from core.models.backups import SavedClaim, Shrinkage
from core.models.base import WireModel
from core.models.phases import RUNNING_PHASES, Phase
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.models.units import parse_count, parse_duration
from core.models.verification import Verification

BackupTransfer = DataUpload | PodVolumeBackup
RestoreTransfer = DataDownload | PodVolumeRestore


class BackupOrigin(StrEnum):
    """Whose command or schedule made a backup."""

    NODEAGENT = "nodeagent"
    VELERO = "velero"


class BackupPhase(StrEnum):
    """The phase of a backup, which follows from the phases of its transfers."""

    NEW = "New"
    IN_PROGRESS = "InProgress"
    CANCELING = "Canceling"
    COMPLETED = "Completed"
    PARTIALLY_FAILED = "PartiallyFailed"
    FAILED = "Failed"
    CANCELED = "Canceled"
    INCOMPLETE = "Incomplete"
    """All transfers that can be read have ended, and there are fewer of them than the backup has volumes."""


class GroupVolume(WireModel):
    """One volume of a backup or a restore, by its transfer. Sizes in bytes; `attempt` counts from 1.

    `claim` is the name of the PVC, of a restore the new one; of a volume of a pod without one, `<pod>:<volume>`.
    `reason` and `message` are what the transfer waits for, or why it failed.
    """

    namespace: str
    claim: str
    kind: str
    transfer: str
    snapshot_id: str
    location: str
    phase: Phase
    reason: str = ""
    message: str = ""
    attempt: int = 1
    node: str = ""
    bytes_done: int = 0
    total_bytes: int = 0
    created: datetime | None = None
    completed: datetime | None = None


class BackupVolume(GroupVolume):
    """One volume of a backup.

    `saved` is the PVC as it was; None: the transfer does not have it. `files` of None: not known, or a block volume.
    `shrunk` of None: it is not Shrunk. `by_block`: it was read as a device, also if it has a file system.
    `verification` is the last one of its data.
    """

    method: Method
    incremental_bytes: int | None = None
    started: datetime | None = None
    saved: SavedClaim | None = None
    files: int | None = None
    shrunk: Shrinkage | None = None
    by_block: bool = False
    verification: Verification | None = None

    @property
    def stored(self) -> bool:
        """Whether its data is in the bucket."""
        return self.phase is Phase.COMPLETED and bool(self.snapshot_id)

    @property
    def state(self) -> str:
        """A sentence: its transfer, its PVC and its phase, and why."""
        cause = f": {self.message}" if self.message else ""
        return f"{self.kind} {self.transfer} of PVC {self.namespace}/{self.claim} is {self.phase}{cause}"


class Group(WireModel):
    """A backup or a restore.

    `expected` is how many volumes it has, `missing` how many of them have no transfer; None and 0 for a backup of
    Velero, whose transfers do not say. `unreadable` is how many transfers cannot be read, which are in no other number.
    """

    name: str
    phase: BackupPhase
    created: datetime | None
    completed: datetime | None
    expected: int | None
    missing: int
    unreadable: int = 0
    bytes_done: int
    total_bytes: int


class Backup(Group):
    """One backup.

    `expires` is None for a backup that is kept until it is deleted, or unknown. `keep` is what its schedule kept by
    count and calendar when it was made; empty: nothing.
    """

    origin: BackupOrigin
    locations: list[str]
    expires: datetime | None
    ttl: str
    keep: str
    volumes: list[BackupVolume]

    @property
    def counted(self) -> str:
        """How many of its volumes are completed, such as `2/3`."""
        return _count_completed(self)

    @property
    def newest(self) -> list[BackupVolume]:
        """The newest transfer of each PVC, in the order of `volumes`."""
        ordered = sorted(self.volumes, key=lambda one: one.created.timestamp() if one.created else 0.0)
        kept = {(one.namespace, one.claim): one for one in ordered}
        return [one for one in self.volumes if kept[one.namespace, one.claim] is one]


class BackupList(WireModel):
    """Backups, the newest first, and notes about what could not be read."""

    backups: list[Backup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class RestoreVolume(GroupVolume):
    """One volume of a restore."""


class Restore(Group):
    """One restore."""

    volumes: list[RestoreVolume]

    @property
    def counted(self) -> str:
        """How many of its volumes are restored, such as `2/3`."""
        return _count_completed(self)


class RestoreList(WireModel):
    """Restores, the newest first, and notes about what could not be read."""

    restores: list[Restore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Volume = BackupVolume | RestoreVolume


def build_backup(origin: BackupOrigin, name: str, transfers: Sequence[BackupTransfer], unreadable: int = 0) -> Backup:
    """Return the backup that has these transfers, and others that cannot be read."""
    annotation = wire.BACKUP_VOLUMES_ANNOTATION if origin is BackupOrigin.NODEAGENT else None
    state = _sum_up(map(_build_backup_volume, transfers), transfers, annotation, unreadable)
    annotations = transfers[0].metadata.annotations
    ttl = annotations.get(wire.BACKUP_TTL_ANNOTATION, "")
    return Backup(
        name=name,
        origin=origin,
        locations=sorted({one.location for one in state["volumes"]}),
        expires=_expires(state["created"], ttl),
        ttl=ttl,
        keep=annotations.get(wire.BACKUP_KEEP_ANNOTATION, ""),
        **state,
    )


def _expires(created: datetime | None, ttl: str) -> datetime | None:
    try:
        return created + parse_duration(ttl) if created and ttl else None
    except (ValueError, OverflowError):
        return None


def _build_backup_volume(transfer: BackupTransfer) -> BackupVolume:
    status, annotations = transfer.status, transfer.metadata.annotations
    return BackupVolume(
        namespace=transfer.repository_namespace,
        claim=name_volume(transfer),
        method=Method.CSI_SNAPSHOT if isinstance(transfer, DataUpload) else Method.FS_BACKUP,
        incremental_bytes=status.incremental_bytes,
        snapshot_id=status.snapshot_id or "",
        started=status.start_timestamp,
        saved=SavedClaim.from_annotations(annotations),
        files=parse_count(annotations.get(wire.FILES_ANNOTATION, "")),
        shrunk=Shrinkage.from_annotations(annotations),
        by_block=transfer.by_block,
        verification=Verification.from_annotations(annotations),
        **_facts_of(transfer),
    )


def _facts_of(transfer: Transfer) -> dict[str, Any]:
    """Return what volumes of backups and of restores have in common."""
    status, progress = transfer.status, transfer.status.progress
    return {
        "kind": transfer.kind_name,
        "transfer": transfer.name,
        "phase": transfer.phase,
        "reason": "" if transfer.phase is Phase.COMPLETED else transfer.pending_reason or "",
        "message": status.message or "",
        "attempt": transfer.attempts.number,
        "node": status.node or "",
        "location": transfer.spec.backup_storage_location,
        "bytes_done": progress.bytes_done,
        "total_bytes": progress.total_bytes,
        "created": transfer.made_at,
        "completed": status.completion_timestamp,
    }


def build_restore(name: str, transfers: Sequence[RestoreTransfer], unreadable: int = 0) -> Restore:
    """Return the restore that has these transfers, and others that cannot be read."""
    volumes = map(_build_restore_volume, transfers)
    return Restore(name=name, **_sum_up(volumes, transfers, wire.RESTORE_VOLUMES_ANNOTATION, unreadable))


def _build_restore_volume(transfer: RestoreTransfer) -> RestoreVolume:
    if isinstance(transfer, DataDownload):
        namespace, claim = transfer.spec.target_volume.namespace, transfer.spec.target_volume.pvc
    else:
        namespace = transfer.spec.pod.namespace
        claim = transfer.metadata.annotations.get(wire.PVC_NAME_ANNOTATION, "")
    snapshot = transfer.spec.snapshot_id
    return RestoreVolume(namespace=namespace, claim=claim, snapshot_id=snapshot, **_facts_of(transfer))


def _sum_up(
    built: Iterable[Volume], transfers: Sequence[Transfer], annotation: str | None, unreadable: int
) -> dict[str, Any]:
    """Return what all groups have but a name; `annotation` of the transfers says how many volumes there should be."""
    volumes = sorted(built, key=lambda one: (one.namespace, one.claim, one.transfer))
    counts = [parse_count(one.metadata.annotations.get(annotation, "")) for one in transfers] if annotation else []
    expected = max((count for count in counts if count is not None), default=None)
    missing = max(0, (expected or 0) - len(volumes) - unreadable)
    ended = all(one.phase.final for one in volumes)
    canceling = any(one.cancel_requested and not one.phase.final for one in transfers)
    return {
        "phase": _decide_phase([one.phase for one in volumes], missing=missing + unreadable, canceling=canceling),
        "created": min((one.created for one in volumes if one.created), default=None),
        "completed": max((one.completed for one in volumes if one.completed), default=None) if ended else None,
        "expected": expected,
        "missing": missing,
        "unreadable": unreadable,
        "bytes_done": sum(one.bytes_done for one in volumes),
        "total_bytes": sum(one.total_bytes for one in volumes),
        "volumes": volumes,
    }


def _decide_phase(phases: Sequence[Phase], *, missing: int, canceling: bool) -> BackupPhase:
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


def _count_completed(group: Backup | Restore) -> str:
    completed = sum(one.phase is Phase.COMPLETED for one in group.volumes)
    return f"{completed}/{len(group.volumes) + group.missing + group.unreadable}"


def find_difference(group: Backup | Restore, volumes: Collection[str]) -> str | None:
    """Return what the group has that one of these volumes, as `NAMESPACE/PVC`, does not have; None: nothing."""
    others = sorted({f"{one.namespace}/{one.claim}" for one in group.volumes}.difference(volumes))
    if others:
        return f"the volume {others[0]}"
    return f"{group.expected} volumes instead of {len(volumes)}" if group.expected not in {None, len(volumes)} else None


def explain_end(group: Backup | Restore) -> str | None:
    """Return which volume of one that has ended did not complete, and why; None: all did."""
    lost = [one for one in group.volumes if one.phase is not Phase.COMPLETED]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    if lost:
        first = lost[0]
        return f"PVC {first.namespace}/{first.claim} is {first.phase}: {first.message or 'no message'}{more}"
    if group.unreadable:
        return f"{group.unreadable} transfers cannot be read"
    return f"{group.missing} of {group.expected} volumes have no transfer: it was deleted" if group.missing else None
