"""The contract between the node agent and a data mover pod.

The mover's command line, the reasons and the progress message of its Events, and its result, which
is the termination message.
Source: Velero v1.18, pkg/datapath and pkg/cmd/cli/datamover, as recorded in
tests/recordings/velero-1.18.2.
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from msgspec import UNSET, Meta, UnsetType, field

from core.errors import ContractError, ResultError
from core.file_contract import FileListing
from core.models.base import Int64, Time, WireModel
from core.models.saved_claim import SavedClaim
from core.models.units import format_duration
from core.models.verification import SnapshotVerification

__all__ = [
    "CANCELED_ENDING",
    "FENCE_TIMEOUT",
    "FOREIGN_INTERVALS",
    "MAINTENANCE_ERROR",
    "MOVER_GRACE",
    "TERMINATION_MESSAGE_LIMIT_BYTES",
    "BackupResult",
    "DataPathReason",
    "DeletedSnapshot",
    "InitResult",
    "LocationResult",
    "MaintenanceCause",
    "MaintenanceMode",
    "MaintenanceResult",
    "MoverArgs",
    "MoverVerb",
    "ProgressMessage",
    "ReportedSnapshot",
    "RestoreResult",
    "SnapshotDeletion",
    "SnapshotListing",
    "SnapshotReport",
    "SnapshotTotal",
    "SnapshotVerdict",
    "StoredSnapshot",
    "StoredTotal",
    "TransferToDelete",
    "UnreadRepository",
    "VolumeMode",
    "VolumePath",
    "format_deleted",
    "format_reported",
    "format_stored",
    "format_total",
    "parse_deleted",
    "parse_progress",
    "parse_reported",
    "parse_result",
    "parse_stored",
    "parse_total",
    "shorten_message",
]

CANCELED_ENDING: Final = "data path is canceled"
"""A termination message with this ending means canceled, not failed."""

MAINTENANCE_ERROR: Final = "Repo maintenance error: "
"""The cause of a failed maintenance follows this text in its termination message; Velero's server looks for it.

Source: Velero v1.18, pkg/repository/maintenance/maintenance.go.
"""

FOREIGN_INTERVALS: Final = 3
"""Another cluster maintains a repository if its last run is younger than so many full intervals; one that is due for as
long is overdue."""

MOVER_GRACE: Final = timedelta(seconds=30)
"""`terminationGracePeriodSeconds` of a mover pod: with 0, as in Velero, a pod would be deleted from the API while it
still writes. It bounds `DATA_MOVER_CHECKPOINT_GRACE`; without a checkpoint, a mover exits within 2 s of SIGTERM."""

FENCE_TIMEOUT: Final = timedelta(minutes=2)
"""A mover that writes a volume ends itself so long after the last answer of the API server that confirms its attempt.
The next attempt starts later than that after it was announced. `DATA_MOVER_FENCE_TIMEOUT` can only shorten it."""

TERMINATION_MESSAGE_LIMIT_BYTES: Final = 4096
"""Source: Kubernetes, the limit of a container's termination message in the kubelet."""


_TRANSFER_PARTS: Final = 3


class DataPathReason(StrEnum):
    """`reason` of the Events that a mover records on its custom resource."""

    STARTED = "Data-Path-Started"
    PROGRESS = "Data-Path-Progress"
    COMPLETED = "Data-Path-Completed"
    FAILED = "Data-Path-Failed"
    CANCELED = "Data-Path-Canceled"
    CANCELING = "Data-Path-Canceling"
    STOPPED = "Data-Path-Stopped"
    WARNING = "Data-Path-Warning"
    """Ours: a warning; the transfer continues."""
    WAITING = "Data-Path-Waiting"
    """Ours: why the data path has not started."""
    READY = "Data-Path-Ready"
    """Ours: the data path is no longer pending."""


class VolumeMode(StrEnum):
    """`volumeMode` of a PVC."""

    FILESYSTEM = "Filesystem"
    BLOCK = "Block"


class MoverVerb(StrEnum):
    """Commands of the mover that run in a pod."""

    BACKUP = "backup"
    RESTORE = "restore"
    INIT_REPOSITORY = "init-repository"
    VALIDATE_LOCATION = "validate-location"
    MAINTAIN_REPOSITORY = "maintain-repository"
    REPORT_SNAPSHOTS = "report-snapshots"
    LIST_SNAPSHOTS = "list-snapshots"
    VERIFY_SNAPSHOTS = "verify-snapshots"
    DELETE_SNAPSHOTS = "delete-snapshots"
    LIST_FILES = "list-files"
    SEND_FILES = "send-files"


class MaintenanceMode(StrEnum):
    """What a maintenance ran."""

    NONE = "none"
    """Nothing: `MaintenanceResult.reason` says why."""
    QUICK = "quick"
    FULL = "full"


class MaintenanceCause(StrEnum):
    """How the cause of a failed maintenance begins, up to a colon, if it is one of these."""

    CLOCK_SKEW = "clock skew"
    WRONG_PASSWORD = "wrong password"  # noqa: S105 - no password
    NOT_OWNER = "not the owner"
    OTHER_REPOSITORY = "another repository"
    """The unique ID is not the recorded one."""
    BLOB_NOT_FOUND = "blob not found"
    OUT_OF_MEMORY = "out of memory"
    LOCKED = "locked"
    NOT_RECORDED = "nothing recorded"
    """kopia exited with 0, without the evidence of a success."""


@dataclass(frozen=True)
class MoverArgs:
    """The command line of a mover pod: `python -m datamover` and then `argv`.

    `kind_flag` is the flag that names the custom resource: `data-upload`, `data-download`,
    `pod-volume-backup`, `pod-volume-restore`, `backup-repository` or `backup-storage-location`. Paths are absolute and
    inside the pod; an empty path is omitted. `cache_limit_mib` is what the cache volume has room
    for; 0: there is none. `attempt` is the number of the transfer's attempt. `cluster` identifies the cluster in the
    snapshot of a backup; empty: it is not known. `options` are flags of one verb only.
    """

    verb: MoverVerb
    kind_flag: str
    resource_name: str
    volume_path: str = ""
    volume_mode: VolumeMode = VolumeMode.FILESYSTEM
    cache_volume_path: str = ""
    cache_limit_mib: int = 0
    attempt: int = 1
    cluster: str = ""
    resource_timeout: timedelta = timedelta(minutes=10)
    log_level: str = "info"
    log_format: str = "text"
    options: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The arguments after `python -m datamover`."""
        flags = {
            self.kind_flag: self.resource_name,
            "volume-path": self.volume_path,
            "volume-mode": str(self.volume_mode) if self.volume_path else "",
            "cache-volume-path": self.cache_volume_path,
            "cache-limit-mib": str(self.cache_limit_mib) if self.cache_limit_mib else "",
            "attempt": str(self.attempt) if self.attempt > 1 else "",
            "cluster": self.cluster,
            "resource-timeout": format_duration(self.resource_timeout),
            "log-level": self.log_level,
            "log-format": self.log_format,
        }
        return [str(self.verb), *(f"--{flag}={value}" for flag, value in flags.items() if value), *self.options]


class ProgressMessage(WireModel, omit_defaults=True):
    """The message of a `Data-Path-Progress` Event; zero fields are omitted.

    The fields after `bytes_per_second` are ours; Velero ignores unknown keys. Of a backup, `hashed_bytes` were read,
    `deduped_bytes` of them are in the repository already, and the others became `sent_bytes`, with kopia's indexes.
    `snapshot_started` is when kopia began the snapshot, by the mover's clock; `attempt` is the number of the mover's
    attempt.
    """

    total_bytes: Int64 = 0
    done_bytes: Int64 = 0
    bytes_per_second: Int64 = 0
    sent_bytes: Int64 = 0
    deduped_bytes: Int64 = 0
    hashed_bytes: Int64 = 0
    snapshot_started: Time | None = None
    attempt: int = 1


_Id = Annotated[str, Meta(min_length=1)]


class VolumePath(WireModel):
    """`source` or `target` of a result: the volume's path inside the mover pod."""

    by_path: str
    volume_mode: str = ""


class BackupResult(WireModel):
    """The termination message of a backup that succeeded; sizes in bytes.

    `note` is ours, and Velero ignores it: what the user should know about the backup, for `status.message`.
    """

    snapshot_id: _Id = field(name="snapshotID")
    empty_snapshot: bool = False
    source: VolumePath
    total_bytes: Int64 = 0
    incremental_bytes: Int64 = 0
    note: str | UnsetType = UNSET


class RestoreResult(WireModel):
    """The termination message of a restore that succeeded; sizes in bytes."""

    target: VolumePath
    total_bytes: Int64 = 0


class InitResult(WireModel):
    """The termination message of `init-repository` that succeeded; `created`: there was no repository before."""

    unique_id: _Id = field(name="uniqueID")
    created: bool = False


class LocationResult(WireModel):
    """The termination message of `validate-location` that succeeded: the location is available.

    With `needs_pod` it is not known: a pod with the movers' account and volumes has to find out.
    """

    needs_pod: bool = False


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


class SnapshotReport(WireModel, omit_defaults=True):
    """The termination message of `report-snapshots` that succeeded: the kopia snapshots of one repository by verdict.

    `bucket_read`: Velero's files in the bucket were read; they are not if no verdict depends on them. `unread` is why
    they, or the Backups of the cluster, could not be read; empty: they could, or no verdict depends on them.
    """

    referenced: SnapshotTotal = field(default_factory=SnapshotTotal)
    unreferenced: SnapshotTotal = field(default_factory=SnapshotTotal)
    incomplete: SnapshotTotal = field(default_factory=SnapshotTotal)
    unknown: SnapshotTotal = field(default_factory=SnapshotTotal)
    bucket_read: bool = False
    unread: str = ""


class ReportedSnapshot(WireModel, omit_defaults=True):
    """A kopia snapshot that is not referenced; `bytes` is the size of its files, `start` when its backup began.

    `command` is kopia's, which would delete it; empty unless it is unreferenced. A tenant chooses parts of `source`.
    """

    id: str
    verdict: SnapshotVerdict
    reason: str
    source: str = ""
    start: str = ""
    bytes: Int64 = 0
    command: str = ""


class _ReportLine(WireModel):
    """A line of the mover's output, which no line of a log is taken for."""

    snapshot: ReportedSnapshot = field(name="nodeagent.io/reported-snapshot")


class StoredSnapshot(WireModel, omit_defaults=True):
    """A complete kopia snapshot of a volume in a storage location, as its tags and its source describe it.

    `volume_namespace` is that of its repository, `bytes` the size of its files, `start` when its backup began.
    `cluster` is the UID of the namespace `kube-system` of its cluster. `backup` is the name of its backup by `nodeagent
    backup create`, which has `backup_volumes`; 0: it is not known. `claim` is the PVC: as it was if a tag has it, else
    by the source, where `described` is false and the claim has its names only. `backup_uid` is that of a Velero Backup.
    Any writer to the bucket chooses all of it.
    """

    id: str
    volume_namespace: str
    source: str = ""
    requester: str = ""
    start: str = ""
    bytes: Int64 = 0
    cluster: str = ""
    backup: str = ""
    backup_volumes: Int64 = 0
    backup_uid: str = field(default="", name="backupUID")
    transfer_uid: str = field(default="", name="transferUID")
    claim: SavedClaim | None = None
    described: bool = False


class UnreadRepository(WireModel):
    """A backup repository whose snapshots could not be listed, and why; `volume_namespace` is its folder."""

    volume_namespace: str
    message: str


class SnapshotListing(WireModel, omit_defaults=True):
    """The termination message of `list-snapshots` that succeeded: how much of a storage location was listed.

    `unread` are the first repositories that could not be listed, `unread_count` how many there are.
    """

    repositories: Int64 = 0
    snapshots: Int64 = 0
    unread: list[UnreadRepository] = field(default_factory=list)
    unread_count: Int64 = 0


class StoredTotal(WireModel):
    """How many snapshots of a repository were listed, as the end of the output says it; `volume_namespace`: its folder.

    The kubelet keeps only the end of a long log, so the reader counts.
    """

    volume_namespace: str
    snapshots: Int64


class _TotalLine(WireModel):
    """A line of the mover's output, which no line of a log is taken for."""

    total: StoredTotal = field(name="nodeagent.io/stored-total")


class _StoredLine(WireModel):
    """A line of the mover's output, which no line of a log is taken for."""

    snapshot: StoredSnapshot = field(name="nodeagent.io/stored-snapshot")


@dataclass(frozen=True, order=True)
class TransferToDelete:
    """A transfer of `nodeagent backup create` whose snapshots are to be deleted.

    They are in the repository of `volume_namespace`, and have tags with its UID and the name of its backup.
    """

    volume_namespace: str
    backup: str
    uid: str

    def __str__(self) -> str:
        """Return it as a value of the flag `--transfer`; no part can have a slash."""
        return f"{self.volume_namespace}/{self.backup}/{self.uid}"

    @classmethod
    def parse(cls, text: str) -> "TransferToDelete":
        """Return the transfer in a value of the flag.

        Raises:
            ValueError: it is none.
        """
        parts = text.split("/")
        if len(parts) != _TRANSFER_PARTS or not all(parts):
            raise ValueError(f'not NAMESPACE/BACKUP/UID: "{text}"')
        return cls(*parts)


class DeletedSnapshot(WireModel, omit_defaults=True):
    """A kopia snapshot of a transfer that was to be deleted; `kept` is why it was not, empty: it was.

    `bytes` is the size of its files, `start` when its backup began; what its deletion frees, maintenance does.
    """

    id: str
    volume_namespace: str
    backup: str
    transfer_uid: str = field(name="transferUID")
    start: str = ""
    bytes: Int64 = 0
    kept: str = ""


class SnapshotDeletion(WireModel, omit_defaults=True):
    """The termination message of `delete-snapshots` that succeeded: how many snapshots were deleted, and kept.

    `unread` are the first repositories whose snapshots could not be deleted, `unread_count` how many there are.
    """

    deleted: Int64 = 0
    kept: Int64 = 0
    unread: list[UnreadRepository] = field(default_factory=list)
    unread_count: Int64 = 0


class _DeletedLine(WireModel):
    """A line of the mover's output, which no line of a log is taken for."""

    snapshot: DeletedSnapshot = field(name="nodeagent.io/deleted-snapshot")


class MaintenanceResult(WireModel, omit_defaults=True):
    """The termination message of `maintain-repository` that succeeded, or had nothing to do.

    `reason` says why nothing ran (mode `none`); `held`: because another cluster maintains the repository. `next_quick`
    and `next_full` are kopia's next due times, by the clock of the pod; `foreign_at` is when the newest maintenance
    began that this cluster did not start.
    `incomplete_full`: the last full maintenance did not finish, in whichever cluster it ran.
    `interval_differs`: the full interval is not the one of the BackupRepository, and was not changed.
    Sizes in bytes; `peak_bytes` is the highest resident memory of kopia and of the data mover, `freed_bytes` what the
    bucket shrank by.
    `report` is the snapshot report, if one was requested and succeeded; `report_error` is why it failed.
    """

    mode: MaintenanceMode
    reason: str = ""
    held: bool = False
    repository_id: str = field(name="repositoryID", default="")
    seconds: float = 0.0
    contents: Int64 = 0
    index_blobs: Int64 = 0
    freed_bytes: Int64 = 0
    peak_bytes: Int64 = 0
    full_interval_seconds: float = 0.0
    interval_differs: bool = False
    incomplete_full: bool = False
    next_quick: Time | None = None
    next_full: Time | None = None
    foreign_at: Time | None = None
    report: SnapshotReport | None = None
    report_error: str = ""


_Result = TypeVar(
    "_Result",
    BackupResult,
    RestoreResult,
    InitResult,
    LocationResult,
    MaintenanceResult,
    SnapshotReport,
    SnapshotListing,
    SnapshotVerification,
    SnapshotDeletion,
    FileListing,
)


def parse_result(model: type[_Result], message: str) -> _Result:
    """Return the result of a mover that exited with 0.

    Raises:
        ResultError: the message is not the JSON of `model`; it never counts as an empty success.
    """
    try:
        return model.from_json(message)
    except ContractError as e:
        shown = message or "the termination message is empty"
        text = f"data mover exited with code 0, but its result is invalid: {shown}"
        raise ResultError(text) from e


def parse_progress(message: str) -> ProgressMessage:
    """Return the progress in an Event's message.

    Raises:
        ContractError: it is not a progress message.
    """
    try:
        return ProgressMessage.from_json(message)
    except ContractError as e:
        text = f"invalid progress message: {message[:200]!r}"
        raise ContractError(text) from e


def format_reported(snapshot: ReportedSnapshot) -> str:
    """Return the line for a mover's output, in ASCII: control characters are escaped."""
    return _format(_ReportLine(snapshot=snapshot))


def parse_reported(line: str) -> ReportedSnapshot | None:
    """Return the snapshot in a line of a mover's output or log; None: the line has none."""
    try:
        return _ReportLine.from_json(line).snapshot
    except ContractError:
        return None


def format_stored(snapshot: StoredSnapshot) -> str:
    """Return the line for a mover's output, in ASCII: control characters are escaped."""
    return _format(_StoredLine(snapshot=snapshot))


def parse_stored(line: str) -> StoredSnapshot | None:
    """Return the snapshot in a line of a mover's output or log; None: the line has none."""
    try:
        return _StoredLine.from_json(line).snapshot
    except ContractError:
        return None


def format_total(total: StoredTotal) -> str:
    """Return the line for a mover's output."""
    return _format(_TotalLine(total=total))


def parse_total(line: str) -> StoredTotal | None:
    """Return the total in a line of a mover's output or log; None: the line has none."""
    try:
        return _TotalLine.from_json(line).total
    except ContractError:
        return None


def format_deleted(snapshot: DeletedSnapshot) -> str:
    """Return the line for a mover's output, in ASCII: control characters are escaped."""
    return _format(_DeletedLine(snapshot=snapshot))


def parse_deleted(line: str) -> DeletedSnapshot | None:
    """Return the snapshot in a line of a mover's output or log; None: the line has none."""
    try:
        return _DeletedLine.from_json(line).snapshot
    except ContractError:
        return None


def _format(line: WireModel) -> str:
    return json.dumps(line.to_wire(), separators=(",", ":"))


def shorten_message(message: str) -> str:
    """Return `message` shortened from the front to the limit of a termination message."""
    raw = message.encode(errors="replace")
    if len(raw) <= TERMINATION_MESSAGE_LIMIT_BYTES:
        return message
    mark = "… "
    kept = raw[-(TERMINATION_MESSAGE_LIMIT_BYTES - len(mark.encode())) :]
    return mark + kept.decode(errors="ignore")
