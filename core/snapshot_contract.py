"""The contract between a command and the data movers of its Jobs, which read snapshots and their files, or delete them.

A mover that lists files writes one line for each. One that sends them writes a line about what it sends, and then a tar
of it, to the first process of its own pod that connects to its socket; `SEND_COMMAND` is that process.
"""

import re
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from typing import ClassVar, Final, Self

from msgspec import field
from msgspec.structs import force_setattr

from core.models.backups import SavedClaim
from core.models.base import Int64, SparseModel, Time, WireModel, cut_texts
from core.models.job_output import OutputLine
from core.models.names import BLOCK_DATA_MOVER

_UNREAD_BYTES: Final = 500
_MESSAGE_BYTES: Final = 800
"""The termination message has room for the first beside the result of a maintenance, and for three of the second."""


class SnapshotVerdict(StrEnum):
    """Whether anything still refers to a kopia snapshot."""

    REFERENCED = "referenced"
    """A transfer, a Backup of the cluster or a file of the bucket names it or its backup."""
    UNREFERENCED = "unreferenced"
    """Older than a week, and nothing names it, of all that may; or of an attempt that another one has overtaken."""
    INCOMPLETE = "incomplete"
    """A checkpoint that its backup left behind."""
    UNKNOWN = "unknown"
    """`ReportedSnapshot.reason` says why."""


class SnapshotTotal(WireModel, omit_defaults=True):
    """A number of kopia snapshots, and the size of their files; their deletion frees less, what others share."""

    count: Int64 = 0
    bytes: Int64 = 0


class SnapshotReport(SparseModel, omit_defaults=True):
    """The termination message of `report-snapshots` that succeeded: the kopia snapshots of one repository by verdict.

    `bucket_read`: Velero's files in the bucket were read; they are not if no verdict depends on them. `unread` is why
    they, or the Backups of the cluster, could not be read; None: they could, or no verdict depends on them.
    """

    referenced: SnapshotTotal = field(default_factory=SnapshotTotal)
    unreferenced: SnapshotTotal = field(default_factory=SnapshotTotal)
    incomplete: SnapshotTotal = field(default_factory=SnapshotTotal)
    unknown: SnapshotTotal = field(default_factory=SnapshotTotal)
    bucket_read: bool = False
    unread: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cut_texts(self, unread=_UNREAD_BYTES)


class ReportedSnapshot(SparseModel, omit_defaults=True):
    """A kopia snapshot that is not referenced; `bytes` is the size of its files, `start` when its backup began.

    `command` is kopia's, which would delete it; None unless it is unreferenced. A tenant chooses parts of `source`.
    """

    id: str
    verdict: SnapshotVerdict
    reason: str
    source: str | None = None
    start: str | None = None
    bytes: Int64 = 0
    command: str | None = None


REPORTED_LINE: Final = OutputLine("nodeagent.io/reported-snapshot", ReportedSnapshot)


class StoredSnapshot(SparseModel, omit_defaults=True):
    """A complete kopia snapshot of a volume in a storage location, as its tags and its source describe it.

    `volume_namespace` is its repository's, `bytes` the size of its files, `start` when its backup began.
    `cluster` is the UID of the namespace `kube-system` of its cluster. `backup` is the name of its backup by `nodeagent
    backup create`, which has `backup_volumes`. `claim` is the PVC: as it was if a tag has it, else by the source, where
    `described` is false and the claim has its names only. `backup_uid` is a Velero Backup's. Any writer to the bucket
    chooses all of it.
    """

    id: str
    volume_namespace: str
    source: str | None = None
    requester: str | None = None
    start: str | None = None
    bytes: Int64 = 0
    cluster: str | None = None
    backup: str | None = None
    backup_volumes: Int64 | None = None
    backup_uid: str | None = field(default=None, name="backupUID")
    transfer_uid: str | None = field(default=None, name="transferUID")
    claim: SavedClaim | None = None
    described: bool = False

    @property
    def by_block(self) -> bool:
        """Whether its source is a device, in the format of BLOCK_DATA_MOVER."""
        return self.source is not None and self.source.split("/")[1:2] == [BLOCK_DATA_MOVER]


class UnreadRepository(WireModel):
    """A backup repository whose snapshots could not be listed, and why; `volume_namespace` is its folder."""

    volume_namespace: str
    message: str

    def __post_init__(self) -> None:
        cut_texts(self, message=_MESSAGE_BYTES)


class SnapshotListing(WireModel, omit_defaults=True):
    """The termination message of `list-snapshots` that succeeded.

    `unread` are the first repositories that could not be listed, `unread_count` how many there are.
    """

    unread: list[UnreadRepository] = field(default_factory=list)
    unread_count: Int64 = 0


STORED_LINE: Final = OutputLine("nodeagent.io/stored-snapshot", StoredSnapshot)


@dataclass(frozen=True, order=True)
class _FlagValue:
    """A value of a flag with parts that have no slash; `form` names them."""

    form: ClassVar[str]

    def __str__(self) -> str:
        return "/".join(astuple(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `text` names; raise ValueError if it has another form."""
        parts = text.split("/")
        if len(parts) != len(fields(cls)) or not all(parts):
            raise ValueError(f'not {cls.form}: "{text}"')
        return cls(*parts)


@dataclass(frozen=True, order=True)
class TransferToDelete(_FlagValue):
    """A transfer of `nodeagent backup create` whose snapshots are to be deleted.

    They are in the repository of `volume_namespace`, and have tags with its UID and the name of its backup.
    """

    form: ClassVar[str] = "NAMESPACE/BACKUP/UID"

    volume_namespace: str
    backup: str
    uid: str


@dataclass(frozen=True, order=True)
class CopyToCheck(_FlagValue):
    """A copy that must be there, so that older ones may go: its snapshot, in the repository of `volume_namespace`."""

    form: ClassVar[str] = "NAMESPACE/SNAPSHOT"

    volume_namespace: str
    snapshot_id: str


class CheckedCopy(SparseModel, omit_defaults=True):
    """A copy that was looked at: `fault` is why it is not known that it can be restored; None: its root was read."""

    volume_namespace: str
    snapshot_id: str = field(name="snapshotID")
    fault: str | None = None


class DeletedSnapshot(SparseModel, omit_defaults=True):
    """A kopia snapshot of a transfer that was to be deleted; `kept` is why it was not; None: it was.

    `bytes` is the size of its files, `start` when its backup began; what its deletion frees, maintenance does.
    """

    id: str
    volume_namespace: str
    backup: str
    transfer_uid: str = field(name="transferUID")
    start: str | None = None
    bytes: Int64 = 0
    kept: str | None = None


class SnapshotDeletion(WireModel, omit_defaults=True):
    """The termination message of `delete-snapshots` that succeeded.

    `unread` are the first repositories whose snapshots could not be deleted, `unread_count` how many there are. `now`
    is the time by the clock of the pod at its end.
    """

    unread: list[UnreadRepository] = field(default_factory=list)
    unread_count: Int64 = 0
    now: Time | None = None


DELETED_LINE: Final = OutputLine("nodeagent.io/deleted-snapshot", DeletedSnapshot)
CHECKED_LINE: Final = OutputLine("nodeagent.io/checked-copy", CheckedCopy)

SEND_COMMAND: Final = ("python", "-m", "datamover.pod.file_relay")
"""What is executed in the pod to read what it sends: the stream on standard output, SentFiles on standard error."""

_MODE: Final = re.compile(r"[0-7]{1,7}")


class FileType(StrEnum):
    """What an entry of a directory is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    OTHER = "other"


class FileEntry(SparseModel, omit_defaults=True):
    """An entry of a directory in a snapshot; all of it was chosen by those who wrote to the volume.

    `mode` are its permissions, such as `0644`. Of a directory, `size_bytes` and `files` are of all below it.
    """

    name: str
    type: FileType
    mode: str | None = None
    user_id: Int64 = 0
    group_id: Int64 = 0
    size_bytes: Int64 = 0
    files: Int64 = 0
    modified: str | None = None

    def __post_init__(self) -> None:
        """Read a mode that is none as absent."""
        super().__post_init__()
        if self.mode is not None and not _MODE.fullmatch(self.mode):
            force_setattr(self, "mode", None)


ENTRY_LINE: Final = OutputLine("nodeagent.io/file-entry", FileEntry)


class FileListing(SparseModel, omit_defaults=True):
    """The termination message of `list-files` that succeeded.

    `type` is the type of what was listed: of a directory, `entries` is how many it has after the name where the list
    begins, and `listed` how many of them were listed; the others exceed the limit. Of anything else, both are 1.
    `note` is what a reader should know about the entries, or None.
    """

    type: FileType
    entries: Int64 = 0
    listed: Int64 = 0
    note: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cut_texts(self, note=_MESSAGE_BYTES)


class SentFiles(SparseModel, omit_defaults=True):
    """How `send-files` ended: how many bytes it sent, the first line included, and why not all; None: all.

    `note` is what a reader should know about the files, or None.
    """

    bytes: Int64 = 0
    error: str | None = None
    note: str | None = None
