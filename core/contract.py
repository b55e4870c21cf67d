"""The contract between the node agent and a data mover pod: command line, Events, and result, the termination message.

Source: Velero v1.18, pkg/datapath and pkg/cmd/cli/datamover, as recorded in tests/recordings/velero-1.18.2.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Final, Self, TypeVar

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import force_setattr

from core.errors import ContractError, ResultError
from core.models.backups import Shrinkage
from core.models.base import Int64, SparseModel, Time, WireModel, cut_texts
from core.models.transfer_settings import LeftOut
from core.models.units import format_duration
from core.snapshot_contract import SnapshotReport

CANCELED_ENDING: Final = "data path is canceled"
"""A termination message with this ending means canceled, not failed."""

EVENTS_VARIABLE: Final = "DATA_MOVER_EVENTS_DIR"
"""Where a mover writes its Events to files, too, for the agent of its node (`core.kube.event_files`)."""

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

_NOTE_BYTES: Final = 1900
_REASON_BYTES: Final = 500
_ERROR_BYTES: Final = 1000
"""Results cut their texts to these sizes: what is longer than a termination message would not be a result."""


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


class MoverMethod(StrEnum):
    """How the data mover of a transfer runs kopia."""

    PLAIN = "plain"
    """By kopia's own commands; each one opens the repository."""
    ONE_OPEN = "one-open"
    """By one process, which opens it once; a backup also reads files that were changed without a new time."""


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
    PLAN_RESTORE = "plan-restore"
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


SNAPSHOT_METADATA_TOKEN: Final = "/var/run/secrets/nodeagent.io/snapshot-metadata/token"  # noqa: S105 - a path
"""The file in a mover pod with the token for `SnapshotMetadata`."""


class SnapshotMetadata(WireModel):
    """Where a CSI driver says which blocks of a snapshot have changed, as its SnapshotMetadataService names it.

    `address` is host and port, `ca_cert` are certificates in PEM, encoded in base64.
    Source: kubernetes-csi/external-snapshot-metadata v1.1.0, client/apis/snapshotmetadataservice/v1beta1/types.go.
    """

    address: str
    ca_cert: str


@dataclass(frozen=True)
class TrackedSnapshot:
    """A snapshot that is backed up by block, and how its driver knows it.

    `change_id` is the storage's handle of it, and `volume_id` the one of its volume; `snapshot_id` is the name of its
    VolumeSnapshot. `metadata` of None: the driver does not say what has changed.
    Source: Velero main at d2241adba, pkg/exposer/csi_snapshot.go (getCBTInfo), for the flags too.
    """

    change_id: str
    volume_id: str
    snapshot_id: str
    metadata: SnapshotMetadata | None = None

    @property
    def flags(self) -> dict[str, str | None]:
        """The flags of a mover, without `--`; None is left out."""
        return {
            "change-id": self.change_id,
            "volume-id": self.volume_id,
            "snapshot-id": self.snapshot_id,
            "snapshot-metadata": self.metadata.to_json() if self.metadata else None,
        }


_NO_FLAGS: Final = frozenset({"verb", "kind_flag", "resource_name", "tracked"})


@dataclass(frozen=True)
class MoverArgs:
    """The command line of a transfer's mover pod: `python -m datamover` and then `argv`.

    Other pods have one of `core.mover_specs`. `kind_flag` is the flag that names the custom resource: `data-upload`,
    `data-download`, `pod-volume-backup` or `pod-volume-restore`. Paths are absolute and inside the pod.
    `cache_limit_mib` is what the cache volume has room for. `attempt` is the number of the transfer's attempt.
    `cluster` identifies the cluster in the snapshot of a backup. `compression` is the algorithm of a backup whose
    custom resource names none. With `ignore_files`, files named `.kopiaignore` have an effect on a backup. `exclude`
    are its exclusions as JSON. `read_all_files`: it also reads files whose size and time are unchanged since the last
    one. `mover` is how kopia is run; None: plain. With `require_attributes`, a restore fails if the target does
    not take owners, modes and times. `followed`: another restore of the same volume follows, and ends the wait of the
    pod. `tracked` is the snapshot of a backup by block; None: the storage has no handles of it and its volume.
    """

    verb: MoverVerb
    kind_flag: str
    resource_name: str
    volume_path: str | None = None
    volume_mode: VolumeMode = VolumeMode.FILESYSTEM
    cache_volume_path: str | None = None
    cache_limit_mib: int | None = None
    attempt: int = 1
    cluster: str | None = None
    compression: str | None = None
    mover: str | None = None
    exclude: str | None = None
    resource_timeout: timedelta = timedelta(minutes=10)
    log_level: str = "info"
    log_format: str = "text"
    ignore_files: bool = False
    read_all_files: bool = False
    require_attributes: bool = False
    followed: bool = False
    tracked: TrackedSnapshot | None = None

    @property
    def argv(self) -> list[str]:
        """The arguments after `python -m datamover`: each field is a flag of its name."""
        fields = vars(self) | {
            "volume_mode": self.volume_mode if self.volume_path else None,
            "attempt": self.attempt if self.attempt > 1 else None,
            "resource_timeout": format_duration(self.resource_timeout),
        }
        named = {name.replace("_", "-"): value for name, value in fields.items() if name not in _NO_FLAGS}
        flags = {self.kind_flag: self.resource_name} | named | (self.tracked.flags if self.tracked else {})
        given = ((flag, value) for flag, value in flags.items() if value is not None and value is not False)
        return [str(self.verb), *(f"--{flag}" if value is True else f"--{flag}={value}" for flag, value in given)]

    def mount(self, volume_path: str | None, mode: VolumeMode, cache_path: str | None) -> Self:
        """Return it with the volumes of its pod."""
        return replace(self, volume_path=volume_path, volume_mode=mode, cache_volume_path=cache_path)


class ProgressMessage(WireModel, omit_defaults=True):
    """The message of a `Data-Path-Progress` Event; zero fields are omitted.

    The fields after `bytes_per_second` are ours; Velero ignores unknown keys. Of a backup, `hashed_bytes` were read,
    `deduped_bytes` of them are in the repository already, and the others became `stored_bytes` by compression, and
    `sent_bytes` with kopia's indexes. `snapshot_started` is when kopia began the snapshot, by the mover's clock;
    `attempt` is the number of the mover's attempt.
    """

    total_bytes: Int64 = 0
    done_bytes: Int64 = 0
    bytes_per_second: Int64 = 0
    sent_bytes: Int64 = 0
    deduped_bytes: Int64 = 0
    hashed_bytes: Int64 = 0
    stored_bytes: Int64 = 0
    snapshot_started: Time | None = None
    attempt: int = 1


_Id = Annotated[str, Meta(min_length=1)]


class VolumePath(WireModel):
    """`source` or `target` of a result: the volume's path inside the mover pod."""

    by_path: str
    volume_mode: str = ""


class BackupResult(WireModel):
    """The termination message of a backup that succeeded; sizes in bytes.

    `incremental_bytes` is absent if it is not known. The fields from `note` on are ours; Velero ignores them. `note` is
    what the user should know about the backup, for `status.message`. If it was compressed, `new_bytes` were not in the
    repository yet, and are `stored_bytes` there. `fallback_full`: everything was read, although a parent was named, or
    of a device by block although there is one; `fallback_cause` says why, or why a storage was not believed what a
    device has. `restart_cause`: a device was read again from its start, although an earlier attempt had saved a
    checkpoint. `files` is absent for a block device. `shrunk` is absent unless the backup is Shrunk, and `left_out`
    unless exclusions applied.
    """

    snapshot_id: _Id = field(name="snapshotID")
    empty_snapshot: bool = False
    source: VolumePath
    total_bytes: Int64 = 0
    incremental_bytes: Int64 | UnsetType = UNSET
    note: str | UnsetType = UNSET
    new_bytes: Int64 | UnsetType = UNSET
    stored_bytes: Int64 | UnsetType = UNSET
    fallback_full: bool | UnsetType = UNSET
    fallback_cause: str | UnsetType = UNSET
    restart_cause: str | UnsetType = UNSET
    files: Int64 | UnsetType = UNSET
    shrunk: Shrinkage | UnsetType = UNSET
    left_out: LeftOut | UnsetType = UNSET

    def __post_init__(self) -> None:
        cut_texts(self, note=_NOTE_BYTES, fallback_cause=_REASON_BYTES, restart_cause=_REASON_BYTES)
        if isinstance(self.left_out, LeftOut):
            force_setattr(self, "left_out", self.left_out.cut)


class RestoreResult(WireModel):
    """The termination message of a restore that succeeded; sizes in bytes.

    The others than the first two are ours. `note` is what the user should know, for `status.message`: the target did
    not take the owner, mode or time of `unset` entries. `incremental_bytes` were written; it is absent if that is not
    known. `fallback_full`: everything was written, although the restore was to be incremental. `fs_type` is the file
    system on a device that was restored by block; absent: none that is known.
    """

    target: VolumePath
    total_bytes: Int64 = 0
    incremental_bytes: Int64 | UnsetType = UNSET
    fallback_full: bool | UnsetType = UNSET
    note: str | UnsetType = UNSET
    unset: Int64 | UnsetType = UNSET
    fs_type: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        cut_texts(self, note=_NOTE_BYTES)


class InitResult(WireModel):
    """The termination message of `init-repository` that succeeded; `created`: there was no repository before."""

    unique_id: _Id = field(name="uniqueID")
    created: bool = False


class LocationResult(WireModel):
    """The termination message of `validate-location` that succeeded: the location is available.

    With `needs_pod` it is not known: a pod with the movers' account and volumes has to find out.
    """

    needs_pod: bool = False


class MaintenanceResult(SparseModel, omit_defaults=True):
    """The termination message of `maintain-repository` that succeeded, or had nothing to do.

    `reason` says why nothing ran (mode `none`); `held`: because another cluster maintains the repository. `next_quick`
    and `next_full` are kopia's next due times, by the clock of the pod; `foreign_at` is when the newest maintenance
    began that this cluster did not start. `incomplete_full`: the last full maintenance did not finish, in whichever
    cluster it ran. `interval_differs`: the full interval is not the one of the BackupRepository, and was not changed.
    Sizes in bytes; `peak_bytes` is the highest resident memory of kopia and of the data mover, `freed_bytes` what the
    bucket shrank by; None: not measured. `report` is the snapshot report, if one was requested and succeeded;
    `report_error` is why it failed.
    """

    mode: MaintenanceMode
    reason: str | None = None
    held: bool = False
    repository_id: str | None = field(name="repositoryID", default=None)
    seconds: float = 0.0
    contents: Int64 | None = None
    index_blobs: Int64 | None = None
    freed_bytes: Int64 | None = None
    peak_bytes: Int64 = 0
    full_interval_seconds: float | None = None
    interval_differs: bool = False
    incomplete_full: bool = False
    next_quick: Time | None = None
    next_full: Time | None = None
    foreign_at: Time | None = None
    report: SnapshotReport | None = None
    report_error: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cut_texts(self, reason=_REASON_BYTES, report_error=_ERROR_BYTES)


_Result = TypeVar("_Result", bound=WireModel)


def parse_result(model: type[_Result], message: str) -> _Result:
    """Return the result of a mover that exited with 0; raise ResultError if the message is not the JSON of `model`."""
    try:
        return model.from_json(message)
    except ContractError as e:
        shown = message or "the termination message is empty"
        raise ResultError(f"data mover exited with code 0, but its result is invalid: {shown}") from e


def parse_progress(message: str) -> ProgressMessage:
    """Return the progress in an Event's message; raise ContractError if it has none."""
    try:
        return ProgressMessage.from_json(message)
    except ContractError as e:
        raise ContractError(f"invalid progress message: {message[:200]!r}") from e


def shorten_message(message: str) -> str:
    """Return `message` shortened from the front to the limit of a termination message."""
    raw = message.encode(errors="replace")
    if len(raw) <= TERMINATION_MESSAGE_LIMIT_BYTES:
        return message
    mark = "… "
    kept = raw[-(TERMINATION_MESSAGE_LIMIT_BYTES - len(mark.encode())) :]
    return mark + kept.decode(errors="ignore")
