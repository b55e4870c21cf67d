"""The copies of volumes that backups of `nodeagent backup create` have, as the rules of retention see them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from client.backups.keep_policy import ttl_of_keep
from core.models.base import ObjectMeta, parse_time
from core.models.names import (
    ASYNC_OPERATION_ID_LABEL,
    BACKUP_ANNOTATION,
    BACKUP_KEEP_ANNOTATION,
    BACKUP_LABEL,
    BACKUP_TTL_ANNOTATION,
    OBJECT_NAME,
    RESTORE_UID_LABEL,
    SCHEDULE_LABEL,
    VELERO_BACKUP_LABEL,
    VELERO_RESTORE_LABEL,
    label_value,
)
from core.models.phases import Phase
from core.models.shrinkage import is_shrunk
from core.models.transfers import DataUpload, PodVolumeBackup
from core.models.units import parse_duration
from core.models.verification import read_verification

__all__ = ["Copy", "Series", "build_copy", "build_unreadable_copy"]

_OF_VELERO: Final = (
    VELERO_BACKUP_LABEL,
    ASYNC_OPERATION_ID_LABEL,
    RESTORE_UID_LABEL,
    "velero.io/backup-uid",
    VELERO_RESTORE_LABEL,
)
"""Labels of a transfer that a Velero server made, or that it restored from a backup of the namespace.

Source: Velero v1.18, pkg/apis/velero/v1/labels_annotations.go.
"""


Series = tuple[tuple[str, str], str]
"""A volume, and a location: its copies there are judged by themselves."""


@dataclass(frozen=True)
class Copy:
    """One volume of a backup: its transfer.

    `volume` is namespace and name of the PVC. `volume_namespace` is the repository's. A `ttl` of None: it never
    expires. `foreign` is why the transfer is not one of `nodeagent backup create`, or cannot be told to be one; empty:
    it is. `damaged`: its last verification failed. `shrunk`: it is Shrunk, and not acknowledged. `recorded`: a command
    has begun to delete it. `schedule` is the label of the schedule that made it, and `keep` its policy then, as the
    annotation has it; empty: none.
    """

    backup: str
    kind: str
    transfer: str
    uid: str
    volume: tuple[str, str]
    location: str
    volume_namespace: str
    phase: Phase
    created: datetime | None
    ended: datetime | None = None
    snapshot_id: str = ""
    bytes: int = 0
    ttl: timedelta | None = None
    foreign: str = ""
    deleting: bool = False
    damaged: bool = False
    shrunk: bool = False
    recorded: bool = False
    schedule: str = ""
    keep: str = ""

    @property
    def has_data(self) -> bool:
        """Whether its deletion takes a copy of the volume away."""
        return self.phase is Phase.COMPLETED and bool(self.snapshot_id) and not self.foreign

    @property
    def complete(self) -> bool:
        """Whether the volume can be restored from it: what is being deleted counts as gone."""
        return self.has_data and not (self.deleting or self.recorded)

    @property
    def completed(self) -> datetime | None:
        """When it was completed, or else made; None: not known."""
        return self.ended or self.created

    @property
    def series(self) -> Series:
        """The copies that it is judged among."""
        return self.volume, self.location

    @property
    def age_key(self) -> tuple[float, str, str]:
        """Orders copies, the oldest first: of copies of the same second the name decides, always alike."""
        return self.created.timestamp() if self.created is not None else 0.0, self.backup, self.uid

    @property
    def shown_volume(self) -> str:
        """Namespace and name of the PVC, as text."""
        return "/".join(self.volume)


def build_copy(transfer: DataUpload | PodVolumeBackup) -> Copy | None:
    """Return the volume of a backup of ours that this transfer is; None: it names no such backup."""
    meta, status = transfer.metadata, transfer.status
    name = meta.annotations.get(BACKUP_ANNOTATION, "")
    if not name or BACKUP_LABEL not in meta.labels:
        return None
    verification = read_verification(meta.annotations)
    claim = transfer.source_claim or (
        f"{transfer.spec.pod.name}:{transfer.spec.volume}" if isinstance(transfer, PodVolumeBackup) else ""
    )
    return Copy(
        backup=name,
        kind=transfer.kind_name,
        transfer=transfer.name,
        uid=transfer.uid,
        volume=(transfer.repository_namespace, claim),
        location=transfer.spec.backup_storage_location,
        volume_namespace=transfer.repository_namespace,
        phase=transfer.phase,
        created=meta.creation_timestamp,
        ended=status.completion_timestamp,
        snapshot_id=status.snapshot_id,
        bytes=status.progress.total_bytes,
        ttl=_read_ttl(meta.annotations),
        schedule=meta.labels.get(SCHEDULE_LABEL, ""),
        keep=meta.annotations.get(BACKUP_KEEP_ANNOTATION, ""),
        foreign=_foreign(meta, name) or _unnameable(transfer, name),
        deleting=transfer.deleting,
        damaged=verification is not None and not verification.passed,
        shrunk=is_shrunk(meta.annotations),
    )


def build_unreadable_copy(kind: str, raw: Mapping[str, Any], why: str) -> Copy | None:
    """Return a volume whose transfer cannot be read: nothing of its backup may be deleted; None: of no backup."""
    meta = raw["metadata"]
    annotations = meta.get("annotations") or {}
    name = annotations.get(BACKUP_ANNOTATION, "")
    if not name:
        return None
    return Copy(
        backup=name,
        kind=kind,
        transfer=meta["name"],
        uid=meta.get("uid") or "",
        volume=("", ""),
        location="",
        volume_namespace="",
        phase=Phase.NEW,
        created=parse_time(meta["creationTimestamp"]),
        ttl=_read_ttl(annotations),
        foreign=f"cannot be read: {why}",
    )


def _read_ttl(annotations: Mapping[str, str]) -> timedelta | None:
    """Return how long a backup is kept whatever its schedule keeps; None: that is not said, or cannot be read."""
    text = annotations.get(BACKUP_TTL_ANNOTATION) or ttl_of_keep(annotations.get(BACKUP_KEEP_ANNOTATION, ""))
    try:
        ttl = parse_duration(text) if text else timedelta()
    except ValueError:
        return None
    return ttl if ttl > timedelta() else None


def _foreign(meta: ObjectMeta, backup: str) -> str:
    if meta.labels.get(BACKUP_LABEL) != label_value(backup):
        return f"is not of nodeagent backup create alone: its label {BACKUP_LABEL} is of another backup"
    if meta.owner_references:
        owner = meta.owner_references[0]
        return f"is not of nodeagent backup create alone: {owner.kind} {owner.name} owns it"
    if found := [label for label in _OF_VELERO if label in meta.labels]:
        return f"is not of nodeagent backup create alone: it has Velero's label {found[0]}"
    return ""


def _unnameable(transfer: DataUpload | PodVolumeBackup, backup: str) -> str:
    """Return why a Job cannot be told which snapshots are the transfer's; empty: it can be."""
    if not OBJECT_NAME.fullmatch(backup):
        return f"names no backup: {backup}"
    if not OBJECT_NAME.fullmatch(transfer.repository_namespace):
        return f"names no namespace of its volume: {transfer.repository_namespace}"
    return "" if transfer.spec.backup_storage_location else "names no BackupStorageLocation"
