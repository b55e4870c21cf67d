"""Which backups of `nodeagent backup create` may be deleted: pure rules.

A backup is kept or deleted as a whole. Does not know how anything is read or deleted (`nodeagent.operations.backups.
delete`), nor what the bucket holds: the data mover checks the tags of each snapshot itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from core.models.base import JsonDict, ObjectMeta, format_time, parse_time
from core.models.names import (
    ASYNC_OPERATION_ID_LABEL,
    BACKUP_ANNOTATION,
    BACKUP_LABEL,
    BACKUP_TTL_ANNOTATION,
    OBJECT_NAME,
    RESTORE_UID_LABEL,
    VELERO_BACKUP_LABEL,
    label_value,
)
from core.models.phases import Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from core.models.units import parse_duration
from core.models.verification import read_verification

__all__ = ["Copy", "Hold", "Judgment", "Rule", "build_copy", "build_unreadable_copy", "judge_backups"]

_OF_VELERO: Final = (
    VELERO_BACKUP_LABEL,
    ASYNC_OPERATION_ID_LABEL,
    RESTORE_UID_LABEL,
    "velero.io/backup-uid",
    "velero.io/restore-name",
)
"""Labels of a transfer that a Velero server made, or that it restored from a backup of the namespace.

Source: Velero v1.18, pkg/apis/velero/v1/labels_annotations.go.
"""


class Rule(StrEnum):
    """Why a backup is kept."""

    FOREIGN = "foreign"
    """Something else than `nodeagent backup create` made or owns one of its transfers."""
    IN_PROGRESS = "in-progress"
    """One of its transfers has not ended."""
    RESTORING = "restoring"
    """A restore that has not ended names one of its snapshots."""
    NOT_EXPIRED = "not-expired"
    NEWEST_COPY = "newest-copy"
    """It has the newest complete copy of a volume, or the newest one whose verification did not fail."""


@dataclass(frozen=True)
class Hold:
    """One reason to keep a backup, as text, too."""

    rule: Rule
    text: str


@dataclass(frozen=True)
class Copy:
    """One volume of a backup: its transfer.

    `volume` is namespace and name of the PVC. `volume_namespace` is that of the repository. A `ttl` of None: it never
    expires. `foreign` is why the transfer is not one of `nodeagent backup create`, or cannot be told to be one; empty:
    it is. `damaged`: its last verification failed.
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
    snapshot_id: str = ""
    bytes: int = 0
    ttl: timedelta | None = None
    foreign: str = ""
    deleting: bool = False
    damaged: bool = False

    @property
    def complete(self) -> bool:
        """Whether the volume can be restored from it."""
        return self.phase is Phase.COMPLETED and bool(self.snapshot_id) and not (self.deleting or self.foreign)

    @property
    def shown_volume(self) -> str:
        """Namespace and name of the PVC, as text."""
        return "/".join(self.volume)


@dataclass(frozen=True)
class Judgment:
    """A backup, and why it is kept; without holds it may be deleted."""

    backup: str
    copies: tuple[Copy, ...]
    holds: tuple[Hold, ...]

    def held_by(self, rules: Iterable[Rule]) -> tuple[Hold, ...]:
        """Return the holds of these rules."""
        wanted = frozenset(rules)
        return tuple(hold for hold in self.holds if hold.rule in wanted)

    def changed_since(self, later: "Judgment | None") -> str:
        """Return what of a later judgment of the backup speaks against a deletion; empty: nothing.

        A hold that was known when it was planned, such as a last copy that was named, does not.
        """
        if later is None or {one.uid for one in later.copies} != {one.uid for one in self.copies}:
            return "its transfers are others"
        return next((hold.text for hold in later.holds if hold not in self.holds), "")


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
        snapshot_id=status.snapshot_id,
        bytes=status.progress.total_bytes,
        ttl=_ttl(meta.annotations.get(BACKUP_TTL_ANNOTATION, "")),
        foreign=_foreign(meta, name) or _unnameable(transfer, name),
        deleting=transfer.deleting,
        damaged=verification is not None and not verification.passed,
    )


def build_unreadable_copy(kind: str, raw: JsonDict, why: str) -> Copy | None:
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
        ttl=_ttl(annotations.get(BACKUP_TTL_ANNOTATION, "")),
        foreign=f"cannot be read: {why}",
    )


def _ttl(text: str) -> timedelta | None:
    """Return how long a backup is kept; None, so for ever, where that is not said, or cannot be read."""
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


def judge_backups(copies: Iterable[Copy], restoring: Mapping[str, str], now: datetime) -> list[Judgment]:
    """Return a judgment about each backup, the oldest first.

    Args:
        copies: of all backups in the namespace: a volume's newest copy is the newest of these.
        restoring: the restores that have not ended, by the ID of the snapshot that they name.
        now: by the API server's clock, which stamped the transfers.
    """
    by_backup: dict[str, list[Copy]] = {}
    by_volume: dict[tuple[str, str], list[Copy]] = {}
    for copy in copies:
        by_backup.setdefault(copy.backup, []).append(copy)
        if copy.complete:
            by_volume.setdefault(copy.volume, []).append(copy)
    newest: dict[str, str] = {}
    for of_volume in by_volume.values():
        newest |= _find_newest(of_volume)
    judgments = [
        Judgment(name, tuple(found), tuple(_find_holds(found, restoring, newest, now)))
        for name, found in by_backup.items()
    ]
    return sorted(judgments, key=lambda one: (_age_key(one.copies), one.backup))


def _find_newest(copies: Sequence[Copy]) -> dict[str, str]:
    """Return the UIDs of the copies of one volume that are to be kept, and why."""

    def latest(found: Sequence[Copy]) -> Copy:
        # Of copies of the same second, none is known to be the newest: the name decides, always alike.
        return max(found, key=lambda one: (_created(one), one.backup, one.uid))

    whole = latest(copies)
    why = "the only copy" if len(copies) == 1 else "the newest copy"
    kept = {whole.uid: f"it has {why} of {whole.shown_volume}"}
    sound = [one for one in copies if not one.damaged]
    if sound and whole.damaged:
        best = latest(sound)
        kept[best.uid] = f"it has the newest copy of {best.shown_volume} whose verification did not fail"
    return kept


def _find_holds(
    copies: Sequence[Copy], restoring: Mapping[str, str], newest: Mapping[str, str], now: datetime
) -> Iterable[Hold]:
    for one in copies:
        place = f"{one.kind} {one.transfer}"
        if one.foreign:
            yield Hold(Rule.FOREIGN, f"{place} {one.foreign}")
        if not one.phase.final:
            yield Hold(Rule.IN_PROGRESS, f"{place} of {one.shown_volume} is {one.phase}: cancel the backup first")
        if one.snapshot_id and (restore := restoring.get(one.snapshot_id)):
            yield Hold(Rule.RESTORING, f"{restore} restores {one.shown_volume} from it")
        if one.uid in newest:
            yield Hold(Rule.NEWEST_COPY, newest[one.uid])
    if hold := _not_expired(copies, now):
        yield hold


def _not_expired(copies: Sequence[Copy], now: datetime) -> Hold | None:
    """Return why the backup is not expired; None: it is, which is so once its youngest transfer is."""
    if any(one.ttl is None or one.created is None for one in copies):
        return Hold(Rule.NOT_EXPIRED, "it has no time to live")
    for one in copies:
        if one.ttl is not None and one.created is not None and now - one.created <= one.ttl:
            return Hold(Rule.NOT_EXPIRED, f"it expires after {format_time(_expiry(one.created, one.ttl))}")
    return None


def _expiry(created: datetime, ttl: timedelta) -> datetime:
    try:
        return created + ttl
    except OverflowError:
        return datetime.max.replace(tzinfo=created.tzinfo)


def _created(one: Copy) -> float:
    return one.created.timestamp() if one.created is not None else 0.0


def _age_key(copies: Sequence[Copy]) -> float:
    return min(map(_created, copies))
