"""Which kopia snapshots nothing refers to any more: pure judgment of what `snapshot list` says.

Source: Velero v1.18, pkg/uploader/types.go, pkg/podvolume/backupper.go, pkg/backup/actions/csi/pvc_action.go; kopia
0.23.1, snapshot/manifest.go.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as plain
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from msgspec import field

from core.models import names
from core.models.base import Int64, SparseModel, Time, WireModel
from core.snapshot_contract import SnapshotVerdict
from datamover.kopia.snapshots import PIN

_LEAST_AGE: Final = timedelta(days=7)
"""A backup stores what it refers to when it ends: a large cluster's takes days."""

_OWN_PREFIX: Final = "tag:"
"""kopia's command line writes it before each tag, Velero does not. Source: kopia 0.23.1,
cli/command_snapshot_create.go."""

_UPLOAD: Final = re.compile(r"du-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.")
"""The operation ID of a DataUpload: the UIDs of backup and PVC, whose end may be a hash."""


class _Source(WireModel):
    host: str = ""
    user_name: str = ""
    path: str = ""


class _Summary(WireModel):
    size: Int64 = 0


class _Root(WireModel):
    type: str = ""
    obj: str = ""
    summ: _Summary = field(default_factory=_Summary)


class ListedSnapshot(SparseModel):
    """One snapshot of `kopia snapshot list --json`; `incomplete` is why it is, or None."""

    id: str
    source: _Source = field(default_factory=_Source)
    start_time: Time
    end_time: Time
    incomplete: str | None = None
    root_entry: _Root = field(default_factory=_Root)
    tags: dict[str, str] = field(default_factory=dict)
    pins: list[str] = field(default_factory=list)

    @property
    def shown_source(self) -> str:
        """The source as kopia writes it."""
        return f"{self.source.user_name}@{self.source.host}:{self.source.path}"

    @property
    def size_bytes(self) -> int:
        """The size of its files."""
        return self.root_entry.summ.size

    @property
    def root_directory(self) -> str | None:
        """The object ID of its root; None: the root is not a directory."""
        root = self.root_entry
        # kopia would parse an ID that starts with a dash as a flag.
        return root.obj if root.type == "d" and root.obj.isalnum() else None

    @property
    def backup_uid(self) -> str | None:
        """The UID of its backup; None if no tag has it."""
        if uid := self.tag(names.BACKUP_UID_TAG):
            return uid
        found = _UPLOAD.match(self.tag(names.ASYNC_OPERATION_ID_LABEL) or "")
        return found[1] if found else None

    @property
    def transfer_uid(self) -> str | None:
        """The UID of the transfer that it was made for; None if no tag has it."""
        return self.tag(names.TRANSFER_UID_TAG)

    @property
    def is_device_checkpoint(self) -> bool:
        """Whether it is what a backup by block has saved for another attempt."""
        return bool(self.incomplete and self.tag(names.CHECKPOINT_DEVICE_TAG))

    def tag(self, name: str) -> str | None:
        """Return the tag of this name; None: it has none."""
        return self.tags.get(name) or self.tags.get(f"{_OWN_PREFIX}{name}") or None


class CompletedTransfer(NamedTuple):
    """A backup of a volume that names its snapshot: kind, namespace and name, and the attempt that completed it."""

    name: str
    attempt: int


@dataclass(frozen=True)
class References:
    """What refers to snapshots, as far as it was read.

    Attributes:
        snapshot_ids: snapshots that transfers of the cluster name; the transfer of each.
        completed: the completed backups of volumes, by their UIDs.
        backup_uids: the Backups of the cluster.
        in_bucket: the wanted snapshots and UIDs of backups that a file of the bucket names.
        unread: why not all could be read; None: all was.
    """

    snapshot_ids: Mapping[str, str] = plain(default_factory=dict)
    completed: Mapping[str, CompletedTransfer] = plain(default_factory=dict)
    backup_uids: frozenset[str] = frozenset()
    in_bucket: frozenset[str] = frozenset()
    unread: str | None = None


class Judgment(NamedTuple):
    """A verdict, and its reason."""

    verdict: SnapshotVerdict
    reason: str


def judge(snapshot: ListedSnapshot, references: References, now: datetime) -> Judgment:
    """Return whether anything refers to the snapshot; `now` is by the clock that kopia's times are compared with."""
    uid = snapshot.backup_uid
    if found := _judge_by_cluster(snapshot, references):
        return found
    if references.in_bucket & {snapshot.id, uid}:
        return Judgment(SnapshotVerdict.REFERENCED, "a file of a backup in the bucket names it")
    if doubt := _find_doubt(snapshot, references, now):
        return Judgment(SnapshotVerdict.UNKNOWN, doubt)
    reason = f"no Backup has the UID {uid}, and no transfer and no file in the bucket names the snapshot"
    return Judgment(SnapshotVerdict.UNREFERENCED, reason)


def needs_bucket(snapshot: ListedSnapshot, references: References) -> bool:
    """Return whether the verdict depends on the files of the bucket."""
    return _judge_by_cluster(snapshot, references) is None


def _judge_by_cluster(snapshot: ListedSnapshot, references: References) -> Judgment | None:
    """Return the judgment that what is in the bucket cannot change; None: there is none."""
    if transfer := references.snapshot_ids.get(snapshot.id):
        return Judgment(SnapshotVerdict.REFERENCED, f"{transfer} names it")
    if snapshot.incomplete:
        return Judgment(SnapshotVerdict.INCOMPLETE, f"its backup did not end: {snapshot.incomplete}")
    completed = references.completed.get(snapshot.transfer_uid or "")
    attempt = snapshot.tag(names.ATTEMPT_TAG)
    if completed is not None and attempt not in {None, str(completed.attempt)}:
        reason = f"attempt {attempt} of {completed.name} made it, which attempt {completed.attempt} completed"
        return Judgment(SnapshotVerdict.UNREFERENCED, reason)
    if snapshot.backup_uid in references.backup_uids:
        return Judgment(SnapshotVerdict.REFERENCED, f"a Backup has the UID {snapshot.backup_uid}")
    return None


def _find_doubt(snapshot: ListedSnapshot, references: References, now: datetime) -> str | None:
    """Return why something unseen may refer to the snapshot; None: nothing may."""
    if not snapshot.tags:
        return "it has no tags: no data mover made it"
    if (requester := snapshot.tag(names.SNAPSHOT_REQUESTER_TAG)) not in names.SNAPSHOT_REQUESTERS:
        named = "it names no requester" if requester is None else f'its requester is "{requester}"'
        return f"{named}: no data mover made it"
    if pins := [pin for pin in snapshot.pins if pin != PIN]:
        return f'it is pinned by "{pins[0]}"'
    if not snapshot.backup_uid:
        return "no tag has the UID of its backup"
    if now - max(snapshot.start_time, snapshot.end_time) < _LEAST_AGE:
        return f"it is younger than {_LEAST_AGE.days} days"
    return references.unread
