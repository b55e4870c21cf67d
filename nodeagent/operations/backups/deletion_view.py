"""A deletion of backups as people and programs see it: what goes, what stays and why. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import field

from core.models.base import WireModel
from core.snapshot_contract import DeletedSnapshot
from nodeagent.operations.backups.delete import DeletionPlan, Place
from nodeagent.operations.backups.deletion import Judgment, Rule

__all__ = ["BackupDeletion", "DeletedBackup", "DeletedVolume", "KeptBackup", "build_deletion"]


class DeletedVolume(WireModel):
    """One volume of a backup that is deleted: its transfer, and how many snapshots it has, of `bytes` in all.

    Other snapshots may share their data, so that less becomes free; maintenance of the repository frees it.
    """

    namespace: str
    claim: str
    kind: str
    transfer: str
    location: str
    snapshots: int
    bytes: int


class DeletedBackup(WireModel):
    """A backup that is deleted; `losses` are the volumes whose newest or only copy it has, as sentences."""

    name: str
    volumes: list[DeletedVolume]
    losses: list[str]


class KeptBackup(WireModel):
    """A backup that is expired, and why it is kept."""

    name: str
    reasons: list[str]


class BackupDeletion(WireModel):
    """A deletion, or the plan of one (`done` is false).

    `unfinished` is of how many transfers only the snapshots are left, by an earlier deletion that was interrupted.
    `notes` are snapshots that are kept or that are not there, and places in which nothing can be deleted.
    """

    done: bool
    backups: list[DeletedBackup] = field(default_factory=list)
    kept: list[KeptBackup] = field(default_factory=list)
    unfinished: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to delete."""
        return not self.backups and not self.unfinished


def build_deletion(
    plan: DeletionPlan, snapshots: Sequence[DeletedSnapshot], refused: Mapping[Place, str], *, done: bool
) -> BackupDeletion:
    """Return the deletion by this plan, with the snapshots of it that were found, and the places that were refused."""
    notes = [f"snapshot {one.id} of backup {one.backup} is kept: {one.kept}" for one in snapshots if one.kept]
    notes += [
        f"nothing can be deleted in BackupStorageLocation {where}: {text}" for (where, _), text in refused.items()
    ]
    notes += _name_gone(plan, snapshots)
    return BackupDeletion(
        done=done,
        backups=[_build_backup(one, snapshots) for one in plan.deleted],
        kept=[KeptBackup(name=one.backup, reasons=[hold.text for hold in one.holds]) for one in plan.kept],
        unfinished=len(plan.unfinished),
        notes=notes,
    )


def _name_gone(plan: DeletionPlan, snapshots: Sequence[DeletedSnapshot]) -> list[str]:
    """Return a note about each volume whose snapshot is not in its repository: it was no copy any more."""
    found = {one.transfer_uid for one in snapshots}
    return [
        f"{one.kind} {one.transfer} of {one.shown_volume}: its snapshot {one.snapshot_id} is not in the repository"
        for one in plan.copies
        if one.snapshot_id and one.uid not in found
    ]


def _build_backup(judgment: Judgment, snapshots: Sequence[DeletedSnapshot]) -> DeletedBackup:
    volumes = []
    for copy in sorted(judgment.copies, key=lambda one: (one.volume, one.transfer)):
        own = [one for one in snapshots if one.transfer_uid == copy.uid and not one.kept]
        namespace, claim = copy.volume
        volumes.append(
            DeletedVolume(
                namespace=namespace,
                claim=claim,
                kind=copy.kind,
                transfer=copy.transfer,
                location=copy.location,
                snapshots=len(own),
                bytes=sum(one.bytes for one in own),
            )
        )
    losses = [hold.text for hold in judgment.held_by((Rule.NEWEST_COPY,))]
    return DeletedBackup(name=judgment.backup, volumes=volumes, losses=losses)
