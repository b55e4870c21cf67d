"""A deletion of backups as people and programs see it: what goes, what stays and why; and the report of a run. Pure."""

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Final

from msgspec import field

from client.backups.delete import DeletionPlan
from client.backups.retention import Backlog, RetentionDecision, RetentionRule, explain_backlog
from core.models.backups import HeldBackup, RetentionReport
from core.models.base import Time, WireModel
from core.snapshot_contract import DeletedSnapshot

_REPORTED: Final = (
    RetentionRule.FAILING_VOLUME,
    RetentionRule.SHRUNK,
    RetentionRule.UNCONFIRMED,
    RetentionRule.NOT_FOUND,
    RetentionRule.FOREIGN,
    RetentionRule.RESTORING,
    RetentionRule.NEWEST_COPY,
    RetentionRule.LOCATION,
)
"""Rules that may not end by themselves, the most urgent first: what the report has."""

_LET_GO: Final = (RetentionRule.FAILING_VOLUME, RetentionRule.NOT_FOUND, RetentionRule.NEWEST_COPY)
"""What a person may give up by deleting the backup. What is unconfirmed may be the last copy that is left."""

_MOST_REPORTED: Final = 100


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
    `waiting` is how many expired copies wait for the limit of deletions, `waiting_why` why so many, `through` when they
    will be gone. `notes` are snapshots that are kept or that are not there, and places in which nothing can be deleted.
    """

    done: bool
    backups: list[DeletedBackup] = field(default_factory=list)
    kept: list[KeptBackup] = field(default_factory=list)
    unfinished: int = 0
    waiting: int = 0
    waiting_why: str = ""
    through: Time | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to delete."""
        return not self.backups and not self.unfinished


def build_deletion(plan: DeletionPlan, snapshots: Sequence[DeletedSnapshot], *, done: bool) -> BackupDeletion:
    """Return the deletion by this plan, with the snapshots of it that were found."""
    notes = [f"snapshot {one.id} of backup {one.backup} is kept: {one.kept}" for one in snapshots if one.kept]
    notes += [*([] if done else plan.refusals), *_name_gone(plan, snapshots)]
    return BackupDeletion.like(
        explain_backlog(plan.judgments, plan.now) if plan.now is not None else Backlog(),
        done=done,
        backups=[_build_backup(one, snapshots) for one in plan.deleted],
        kept=[
            KeptBackup(name=one.backup, reasons=[hold.text for hold in one.holds])
            for one in plan.kept
            if not one.held_by((RetentionRule.LIMIT,))
        ],
        unfinished=len(plan.unfinished),
        notes=notes,
    )


def build_report(plan: DeletionPlan, at: datetime, schedule: str | None = None) -> RetentionReport:
    """Return the report of a run that carried this plan out, or is about to; `at` is the time now."""
    held = [one for judgment in plan.kept for one in _report_held(judgment, plan.absent)]
    # What a person can do something about must not be cut off by what waits for a location.
    held.sort(key=lambda one: _REPORTED.index(RetentionRule(one.rule)))
    return RetentionReport.like(
        explain_backlog(plan.judgments, at),
        at=at,
        schedule=schedule,
        deleted=len(plan.deleted),
        held=held[:_MOST_REPORTED],
        held_count=len(held),
    )


def _report_held(judgment: RetentionDecision, absent: Collection[str]) -> Iterator[HeldBackup]:
    """Yield the backup for the first rule of _REPORTED that holds it: for each failing volume, else for one volume."""
    holds = next((found for rule in _REPORTED if (found := judgment.held_by((rule,)))), ())
    for hold in holds if holds and holds[0].rule is RetentionRule.FAILING_VOLUME else holds[:1]:
        copy = next((one for one in judgment.copies if one.uid == hold.uid), judgment.copies[0])
        lets_go = hold.rule in _LET_GO or copy.location in absent
        yield HeldBackup.like(
            copy,
            rule=hold.rule,
            reason=hold.text,
            bytes=sum(one.bytes for one in judgment.copies),
            command=hold.command or (f"nodeagent backup delete {judgment.backup}" if lets_go else None),
        )


def _name_gone(plan: DeletionPlan, snapshots: Sequence[DeletedSnapshot]) -> Iterator[str]:
    """Yield a note about each volume whose snapshot is out of reach, or not in its repository: it was no copy then."""
    found = {one.transfer_uid for one in snapshots}
    for one in plan.copies:
        if one.snapshot_id and one.location in plan.absent:
            place = f"BackupStorageLocation {one.location}"
            yield f"{place} does not exist: snapshot {one.snapshot_id} stays until it is back"
        elif one.snapshot_id and one.uid not in found:
            shown = f"{one.kind} {one.transfer} of {one.shown_volume}"
            yield f"{shown}: its snapshot {one.snapshot_id} is not in the repository"


def _build_backup(judgment: RetentionDecision, snapshots: Sequence[DeletedSnapshot]) -> DeletedBackup:
    volumes = []
    for copy in sorted(judgment.copies, key=lambda one: (one.volume, one.transfer)):
        own = [one for one in snapshots if one.transfer_uid == copy.uid and not one.kept]
        volumes.append(DeletedVolume.like(copy, snapshots=len(own), bytes=sum(one.bytes for one in own)))
    losses = [hold.text for hold in judgment.held_by((RetentionRule.NEWEST_COPY, RetentionRule.SHRUNK))]
    losses += [f"it may have the last copy: {hold.text}" for hold in judgment.held_by((RetentionRule.UNCONFIRMED,))]
    return DeletedBackup(name=judgment.backup, volumes=volumes, losses=losses)
