"""Models of the transfers: DataUpload, DataDownload, PodVolumeBackup, PodVolumeRestore.

Source: Velero v1.18 and main at d2241adba (1.19), pkg/apis/velero/v2alpha1 and pkg/apis/velero/v1, as
recorded in tests/recordings; the custom resource definitions of an older Velero lack some fields.
Phases are read through `Transfer.phase`, where an absent phase is New.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from typing import ClassVar, Final

from msgspec import field

from core.errors import ConfigError, Translated
from core.models import names
from core.models.base import CustomResource, Int64, SparseModel, Time, WireModel
from core.models.phases import HOLDING_PHASES, Attempts, AttemptStage, Phase
from core.models.transfer_settings import FULL, InPlace
from core.models.units import parse_duration

READ_ALL_FILES: Final = "ReadAllFiles"
"""An uploader setting of ours, which Velero ignores: `true` has a backup also read files of unchanged size and time."""

RESTORE_TYPE: Final = "restoreType"
PLAIN_RESTORE: Final = {RESTORE_TYPE: ""}
"""The field of a spec that the definitions of Velero 1.19 require in each restore; earlier ones do not keep it.

Source: Velero main at 4a7db86f17d3, config/crd/v2alpha1/bases/velero.io_datadownloads.yaml.
"""

_PREFERRED: Final = "true"


def _parse_timeout(text: str | None) -> timedelta:
    """Return a Go duration, zero where there is none; raise ValueError where it is invalid."""
    return parse_duration(text) if text else timedelta()


class Progress(WireModel):
    """`status.progress`, in bytes."""

    total_bytes: Int64 = 0
    bytes_done: Int64 = 0


class TransferStatus(SparseModel):
    """The status fields of all four kinds; the API server prunes those that a kind's CRD lacks."""

    phase: Phase | None = None
    message: str | None = None
    progress: Progress = field(default_factory=Progress)
    accepted_timestamp: Time | None = None
    start_timestamp: Time | None = None
    completion_timestamp: Time | None = None
    accepted_by_node: str | None = None
    node: str | None = None
    node_os: str | None = field(default=None, name="nodeOS")
    path: str | None = None
    snapshot_id: str | None = field(default=None, name="snapshotID")
    incremental_bytes: Int64 | None = None


class TransferSpec(SparseModel):
    """The spec fields of all four kinds."""

    backup_storage_location: str
    cancel: bool = False


class Transfer(CustomResource):
    """One transfer: the backup or restore of one volume."""

    spec: TransferSpec
    status: TransferStatus = field(default_factory=TransferStatus)

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace, name."""
        return (self.kind_name, self.metadata.namespace, self.name)

    @property
    def phase(self) -> Phase:
        """`status.phase`; absent reads as New."""
        return self.status.phase or Phase.NEW

    @property
    def attempts(self) -> Attempts:
        """Its attempts; the first one where the annotation is absent or invalid."""
        return Attempts.from_annotations(self.metadata.annotations) or Attempts()

    @property
    def stage(self) -> AttemptStage | None:
        """How far its attempt is, while its phase is InProgress; None in any other phase."""
        return self.attempts.stage if self.phase is Phase.IN_PROGRESS else None

    @property
    def restore_uid(self) -> str | None:
        """The UID of the Restore that a restore is part of, for which its pod waits; None: none is known."""
        return None

    @property
    def accepted_at(self) -> datetime | None:
        """When it was accepted; its creation where a client created it with a phase but without that time."""
        return self.status.accepted_timestamp or self.metadata.creation_timestamp

    @property
    def made_at(self) -> datetime | None:
        """When it was created, which is not before its data; None: not known.

        A Velero server creates the PodVolumeBackups that it finds in a bucket, also weeks after these have ended.
        Source: Velero v1.18, pkg/controller/backup_sync_controller.go.
        """
        status = self.status
        times = (self.metadata.creation_timestamp, status.start_timestamp, status.completion_timestamp)
        return min((time for time in times if time is not None), default=None)

    @property
    def began_at(self) -> datetime | None:
        """When its data path began; None: it did not. An end before that sets `startTimestamp`, too, as in Velero."""
        started, completed = self.status.start_timestamp, self.status.completion_timestamp
        return None if started == completed and self.phase is not Phase.COMPLETED else started

    @property
    def interrupted(self) -> bool:
        """Whether its attempt was interrupted, and the next one has not started its data path."""
        return self.stage not in {None, AttemptStage.RUNNING}

    @property
    def between_attempts(self) -> bool:
        """Whether its attempt was interrupted, and the next one is not exposed yet."""
        return self.stage in {AttemptStage.WAITING, AttemptStage.READY}

    @property
    def preparing(self) -> bool:
        """Whether it gets a mover pod, or its mover waits for a slot: in its first attempt or in another one."""
        return self.phase in HOLDING_PHASES or self.stage is AttemptStage.EXPOSING

    def age_seconds(self, now: datetime) -> float:
        """Return how old it is at `now`, a time by the API server's clock, which set its creation time."""
        created = self.metadata.creation_timestamp
        return 0.0 if created is None else (now - created).total_seconds()

    @property
    def cancel_requested(self) -> bool:
        """Whether a cancel was requested, by `spec.cancel` or by deletion."""
        return self.spec.cancel or self.deleting

    @property
    def pending_reason(self) -> str | None:
        """The pending reason, which `status.message` describes; None where none was reported."""
        return self.metadata.annotations.get(names.PENDING_REASON_ANNOTATION) or None

    @property
    def copies(self) -> tuple[str, ...]:
        """The Secrets and ConfigMaps that it was accepted with, such as `Secret/token`."""
        return tuple(self.metadata.annotations.get(names.COPIES_ANNOTATION, "").split())

    @property
    def settings(self) -> dict[str, str]:
        """The uploader settings of this transfer, such as `ParallelFilesUpload`."""
        raise NotImplementedError

    @property
    def in_place(self) -> InPlace | None:
        """How a restore goes into a volume that may have data; None: as into a new one, or it is a backup.

        Raises:
            ConfigError: the type is unknown, or a setting is invalid.
        """
        return None

    @property
    def valid_in_place(self) -> InPlace | None:
        """The same, and None also where that is invalid: admission refuses it, and cleanup has to work."""
        with suppress(ConfigError):
            return self.in_place
        return None

    @property
    def operation_timeout(self) -> timedelta | None:
        """Timeout of one operation on the cluster for this transfer; None where it has none of its own."""
        return None

    @property
    def required_feature(self) -> str | None:
        """What its agent must have announced that it can carry out; None: every agent can."""
        return None

    @property
    def by_block(self) -> bool:
        """Whether it is one of the data mover for block devices."""
        return False

    @property
    def prefers_block(self) -> bool:
        """Whether that is by the configuration alone, so that files will do where the storage has no devices."""
        return False

    @property
    def not_by_block(self) -> str:
        """Why files are backed up although the configuration prefers a device; empty: it does not, or a device is."""
        text = self.metadata.annotations.get(names.BLOCK_PREFERRED_ANNOTATION, "")
        return "" if self.by_block or text == _PREFERRED else text

    @property
    def unfinished(self) -> str | None:
        """In what state it leaves its volume if it ends now, as text; None: in none of its own."""
        return None

    @property
    def repository_namespace(self) -> str:
        """The volume namespace whose backup repository holds the data."""
        raise NotImplementedError

    @property
    def source_claim(self) -> str | None:
        """The PVC that is backed up, in the volume namespace; None for a restore, and where it is not known."""
        return None


class CSISnapshotSpec(WireModel):
    """`spec.csiSnapshot` of a DataUpload."""

    volume_snapshot: str
    storage_class: str


class _MoverSpec(TransferSpec):
    datamover: str = ""
    source_namespace: str
    data_mover_config: dict[str, str] = field(default_factory=dict)
    operation_timeout: str | None = None

    def __post_init__(self) -> None:
        """Reject an invalid duration; msgspec converts the ValueError to a validation error."""
        super().__post_init__()
        with Translated(ValueError, ValueError, "operationTimeout"):
            _parse_timeout(self.operation_timeout)


class _DataMoverTransfer(Transfer):
    spec: _MoverSpec

    @property
    def settings(self) -> dict[str, str]:
        """`spec.dataMoverConfig`."""
        return self.spec.data_mover_config

    @property
    def by_block(self) -> bool:
        """Whether `spec.datamover` is the one for block devices."""
        return self.spec.datamover == names.BLOCK_DATA_MOVER

    @property
    def required_feature(self) -> str | None:
        """An earlier agent would fail it, or write another format."""
        return names.BLOCK_DATA_MOVER if self.by_block else None

    @property
    def operation_timeout(self) -> timedelta | None:
        """`spec.operationTimeout`; None where it is absent or zero, which is how Go encodes absent."""
        timeout = _parse_timeout(self.spec.operation_timeout)
        return timeout if timeout > timedelta() else None

    @property
    def repository_namespace(self) -> str:
        """The namespace of the source PVC."""
        return self.spec.source_namespace


class DataUploadSpec(_MoverSpec):
    """`spec` of a DataUpload."""

    snapshot_type: str
    csi_snapshot: CSISnapshotSpec | None = None
    source_pvc: str = field(name="sourcePVC")
    parent_snapshot: str | None = None


class DataUpload(_DataMoverTransfer):
    """Backup of a CSI snapshot into the backup repository."""

    kind_name: ClassVar[str] = "DataUpload"
    spec: DataUploadSpec

    @property
    def source_claim(self) -> str | None:
        """`spec.sourcePVC`."""
        return self.spec.source_pvc

    @property
    def prefers_block(self) -> bool:
        """As by the leader that accepted it."""
        return self.by_block and self.metadata.annotations.get(names.BLOCK_PREFERRED_ANNOTATION) == _PREFERRED


class TargetVolume(SparseModel):
    """`spec.targetVolume` of a DataDownload; `pv` names the existing volume to restore into, None: a new one.

    `fs_type` is the file system of the source; None: the server did not know it, or knows no such field.
    """

    pvc: str
    namespace: str
    pv: str | None = None
    fs_type: str | None = None


class BaseSnapshotSpec(SparseModel):
    """`spec.csiSnapshot` of a DataDownload: what a restore of changed blocks compares the existing volume with.

    `clean_up`: the server took it for this restore alone, and leaves its deletion to the data mover.
    Source: Velero main at 4a7db86f17d3, pkg/restore/actions/csi/pvc_action_test.go.
    """

    volume_snapshot: str | None = None
    volume_snapshot_namespace: str | None = None
    clean_up: bool = False


class DataDownloadSpec(_MoverSpec):
    """`spec` of a DataDownload."""

    target_volume: TargetVolume
    snapshot_id: str = field(name="snapshotID")
    snapshot_size: Int64 = 0
    node_os: str | None = field(default=None, name="nodeOS")
    restore_type: str = ""
    csi_snapshot: BaseSnapshotSpec | None = None


class DataDownload(_DataMoverTransfer):
    """Restore of a kopia snapshot into the target PVC."""

    kind_name: ClassVar[str] = "DataDownload"
    spec: DataDownloadSpec

    @property
    def in_place(self) -> InPlace | None:
        """How it goes into the existing volume `targetVolume.pv`; None without that, whatever the type."""
        if not self.spec.target_volume.pv:
            return None
        return InPlace.of(self.spec.restore_type, self.settings) or InPlace.of(FULL, self.settings)

    @property
    def required_feature(self) -> str | None:
        """An earlier agent would fail it, or restore into a new volume, and report success.

        An agent that has the data mover for block devices can do both.
        """
        return super().required_feature or (names.RESTORE_IN_PLACE if self.spec.target_volume.pv else None)

    @property
    def unfinished(self) -> str | None:
        """An existing volume is given back, which one that never became the restore's may not be."""
        target = self.spec.target_volume
        if not target.pv:
            return None
        place = f"PVC {target.namespace}/{target.pvc}"
        if self.status.start_timestamp is None:
            return f"PersistentVolume {target.pv} was not changed; if it was released for this, {place} gets it back"
        return f"PersistentVolume {target.pv} may have been restored in part, and is given back to {place}"


class PodReference(SparseModel):
    """`spec.pod`: the workload pod, by UID, or by name alone where `uid` is None."""

    namespace: str = ""
    name: str = ""
    uid: str | None = None

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def matches(self, uid: str) -> bool:
        """Return whether the pod of that name with this UID is the referenced one.

        A user may omit the UID when creating a custom resource, because Velero never reads it.
        Source: Velero v1.18, pkg/exposer/pod_volume.go.
        """
        return self.uid in {None, uid}


class _PodVolumeSpec(TransferSpec):
    pod: PodReference
    volume: str
    uploader_type: str = ""
    uploader_settings: dict[str, str] = field(default_factory=dict)


class _PodVolumeTransfer(Transfer):
    spec: _PodVolumeSpec

    @property
    def settings(self) -> dict[str, str]:
        """`spec.uploaderSettings`."""
        return self.spec.uploader_settings


class PodVolumeBackupSpec(_PodVolumeSpec):
    """`spec` of a PodVolumeBackup."""

    node: str
    tags: dict[str, str] = field(default_factory=dict)
    parent_snapshot: str | None = None


class PodVolumeBackup(_PodVolumeTransfer):
    """Backup of a running pod's volume into the backup repository."""

    kind_name: ClassVar[str] = "PodVolumeBackup"
    spec: PodVolumeBackupSpec

    @property
    def source_claim(self) -> str | None:
        """The PVC of the volume, as the creator of the resource annotated it."""
        return self.metadata.annotations.get(names.PVC_NAME_ANNOTATION) or None

    @property
    def repository_namespace(self) -> str:
        """The workload pod's namespace."""
        return self.spec.pod.namespace


class PodVolumeRestoreSpec(_PodVolumeSpec):
    """`spec` of a PodVolumeRestore."""

    snapshot_id: str = field(name="snapshotID")
    source_namespace: str
    snapshot_size: Int64 = 0
    restore_type: str = ""


_RESTORE_KIND: Final = "Restore"


class PodVolumeRestore(_PodVolumeTransfer):
    """Restore of a kopia snapshot into a pod's volume, before the pod starts."""

    kind_name: ClassVar[str] = "PodVolumeRestore"
    spec: PodVolumeRestoreSpec

    @property
    def in_place(self) -> InPlace | None:
        """How it goes into the volume of the pod, which may be an existing one; None: as into a new one."""
        return InPlace.of(self.spec.restore_type, self.settings)

    @property
    def restore_uid(self) -> str | None:
        """The UID of the first owner of any kind, as Velero takes it, or of the label that a user may write instead.

        Source: Velero v1.18, writeCompletionMark in pkg/podvolume/restore_micro_service.go.
        """
        owners = self.metadata.owner_references
        uids = [*(owner.uid for owner in owners if owner.kind == _RESTORE_KIND), *(owner.uid for owner in owners)]
        return next(iter(uids), None) or self.metadata.labels.get(names.RESTORE_UID_LABEL) or None

    @property
    def required_feature(self) -> str | None:
        """An earlier agent would keep the extra files, and report success."""
        found = self.valid_in_place
        return names.RESTORE_IN_PLACE if found is not None and found.delete_extra_files else None

    @property
    def unfinished(self) -> str | None:
        """The pod that waits for its data does not start."""
        if self.valid_in_place is None or self.status.start_timestamp is None:
            return None
        return f"volume {self.spec.volume} may have been restored in part: restore it again"

    @property
    def repository_namespace(self) -> str:
        """The namespace that was backed up."""
        return self.spec.source_namespace


KIND_NAMES: Final = tuple(kind.kind_name for kind in (DataUpload, DataDownload, PodVolumeBackup, PodVolumeRestore))
"""The names of all kinds of transfers."""
