"""The adapters of DataUploads and DataDownloads: a CSI snapshot is backed up, and restored into a volume.

Knows the parts of the life cycle that only these kinds have. Does not know the life cycle, nor how a
volume is created from a snapshot (`exposer.csi_snapshot`), or created and rebound (`exposer.generic_restore`).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Final

from msgspec import UNSET

from core.contract import RestoreResult
from core.errors import ConfigError, ExposeError
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS
from core.models.names import (
    BACKUP_ANNOTATION,
    BLOCK_DATA_MOVER,
    DATA_MOVER_FINALIZER,
    RESTORE_ANNOTATION,
    VELERO_RESTORE_LABEL,
)
from core.models.phases import Phase
from core.models.reasons import FailureReason, PendingReason
from core.models.transfer_settings import InPlace
from core.models.transfers import DataDownload, DataUpload
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.generic_restore import GenericRestoreExposer
from exposer.model import (
    WINDOWS,
    Exposed,
    Guard,
    KeptVolume,
    Owner,
    Pending,
    Reader,
    RestoreRequest,
    SnapshotRequest,
)
from exposer.settings import ExposeSettings
from nodeagent.transfers.kinds.base import (
    COMMON_STATUS_FIELDS,
    Admission,
    AdmissionState,
    KindSpec,
    PlainKind,
    admit_exposable,
    check_location,
    find_unsupported,
    refuse_unsupported,
)
from nodeagent.transfers.outcome import BackupResults, Outcome, RestoreResults, read_outcome

_CSI: Final = "CSI"
"""The only supported snapshot type. Source: Velero v1.18, SnapshotType."""


@dataclass(frozen=True)
class DataUploadKind(BackupResults, PlainKind[DataUpload]):
    """The adapter of DataUploads.

    Attributes:
        exposer: exposes the source snapshot.
        expose_settings: returns the active settings; called for each request.
        datamovers: the values of `spec.datamover` that select this data mover.
    """

    exposer: CSISnapshotExposer
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    spec: ClassVar[KindSpec] = KindSpec(
        name=DataUpload.kind_name,
        resource=DATA_UPLOADS,
        finalizer=DATA_MOVER_FINALIZER,
        status_fields=COMMON_STATUS_FIELDS
        | {
            "acceptedByNode",
            "node",
            "nodeOS",
            "path",
            "snapshotID",
            "incrementalBytes",
            "sourceSize",
            "dataMoverResult",
        },
        restores=False,
        bound_to_node=False,
    )

    def parse(self, raw: Mapping[str, Any]) -> DataUpload:
        """Return the model of `raw`."""
        return DataUpload.parse(raw)

    def managed(self, cr: DataUpload) -> bool:
        """Return whether `spec.datamover` selects this data mover."""
        return cr.spec.datamover in self.datamovers

    def queue_namespace(self, cr: DataUpload) -> str:
        """Return the namespace of the source PVC."""
        return cr.spec.source_namespace

    async def check_admission(self, cr: DataUpload, reader: Reader) -> Admission:
        """Return whether the backup storage location and the source snapshot are ready."""
        spec = cr.spec
        if spec.snapshot_type != _CSI or spec.csi_snapshot is None:
            message = f"snapshot type {spec.snapshot_type!r} is not supported; only {_CSI} with csiSnapshot is"
            return Admission(AdmissionState.FAILED, FailureReason.SNAPSHOT_TYPE_UNKNOWN, message)
        admission = await check_location(reader, cr)
        if admission.decision is not AdmissionState.READY:
            return admission
        request = self._request(cr)
        try:
            waiting = await self.exposer.check(request, reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, FailureReason.SOURCE_MISSING, str(e))
        checked = admit_exposable(admission, waiting, request.copies.needed)
        if not spec.datamover and BACKUP_ANNOTATION in cr.metadata.annotations:
            # What a Velero server restores must have the data mover that it asked for.
            by_block = request.storage_class in request.settings.block_classes
            checked = replace(checked, datamover=BLOCK_DATA_MOVER if by_block else None)
        # Some storage takes hours for a snapshot; one that reports errors for so long never becomes ready.
        return checked if waiting is None else replace(checked, indefinite=not waiting.blocked)

    async def ensure_exposed(self, cr: DataUpload, guard: Guard) -> Exposed | Pending:
        """Take the next steps from the source snapshot to a mover pod."""
        return await self.exposer.ensure(self._request(cr), guard)

    async def confirm_volume(self, cr: DataUpload) -> None:
        """Check that the volume of the mover was created from the source snapshot."""
        await self.exposer.confirm(self._request(cr))

    async def withdraw(self, cr: DataUpload) -> Pending | None:
        """Delete what keeps another attempt of `cr` from being exposed."""
        last = cr.attempts.last
        return None if last is None else await self.exposer.withdraw(self._request(cr), last)

    async def clean_up(self, cr: DataUpload) -> Pending | None:
        """Delete pod, PVC and snapshot objects."""
        if cr.spec.csi_snapshot is None:
            # It failed before admission: there are no expose objects.
            return None
        return await self.exposer.clean_up(self._request(cr))

    def _request(self, cr: DataUpload) -> SnapshotRequest:
        spec = cr.spec
        if spec.csi_snapshot is None:
            raise ExposeError(f"DataUpload {cr.metadata.namespace}/{cr.name} names no CSI snapshot")
        return SnapshotRequest(
            owner=Owner.of(cr),
            source_namespace=spec.source_namespace,
            source_claim=spec.source_pvc,
            volume_snapshot=spec.csi_snapshot.volume_snapshot,
            storage_class=spec.csi_snapshot.storage_class,
            location=spec.backup_storage_location,
            settings=self.expose_settings().for_attempt(cr),
            operation_timeout=cr.operation_timeout,
            requested_at=cr.metadata.creation_timestamp,
            copied=cr.copies,
            by_block=cr.by_block,
            fell_back=bool(cr.not_by_block),
            completed=cr.phase is Phase.COMPLETED,
        )


_TARGET_TIMEOUT: Final = timedelta(minutes=2)
"""How long the target PVC may be missing: Velero creates it after the DataDownload.

Source: Velero v1.18, the CSI restore action of PersistentVolumeClaims.
"""


@dataclass(frozen=True)
class DataDownloadKind(RestoreResults, PlainKind[DataDownload]):
    """The adapter of DataDownloads.

    Attributes:
        exposer: exposes and rebinds the new volume.
        expose_settings: returns the active settings; called for each request.
        datamovers: the values of `spec.datamover` that select this data mover.
    """

    exposer: GenericRestoreExposer
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    spec: ClassVar[KindSpec] = KindSpec(
        name=DataDownload.kind_name,
        resource=DATA_DOWNLOADS,
        finalizer=DATA_MOVER_FINALIZER,
        status_fields=COMMON_STATUS_FIELDS | {"acceptedByNode", "node", "incrementalBytes"},
        restores=True,
        bound_to_node=False,
    )

    def parse(self, raw: Mapping[str, Any]) -> DataDownload:
        """Return the model of `raw`."""
        return DataDownload.parse(raw)

    def managed(self, cr: DataDownload) -> bool:
        """Return whether `spec.datamover` selects this data mover."""
        return cr.spec.datamover in self.datamovers

    def queue_namespace(self, cr: DataDownload) -> str:
        """Return the namespace of the target PVC."""
        return cr.spec.target_volume.namespace

    async def check_admission(self, cr: DataDownload, reader: Reader) -> Admission:
        """Return whether the backup storage location is ready and the target PVC is unbound."""
        if (refused := find_unsupported(cr)) is not None:
            return refused
        admission = await check_location(reader, cr)
        if admission.decision is not AdmissionState.READY:
            return admission
        target = cr.spec.target_volume
        claim = await reader.read(PERSISTENT_VOLUME_CLAIMS, target.namespace, target.pvc)
        if claim is None:
            message = f"PersistentVolumeClaim {target.namespace}/{target.pvc} to restore into does not exist"
            return Admission(AdmissionState.PENDING, PendingReason.TARGET_CLAIM_MISSING, message, limit=_TARGET_TIMEOUT)
        request = self._request(cr)
        try:
            waiting = await self.exposer.check(request, reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, FailureReason.TARGET_CLAIM_UNUSABLE, str(e))
        return admit_exposable(admission, waiting, request.copies.needed)

    async def ensure_exposed(self, cr: DataDownload, guard: Guard) -> Exposed | Pending:
        """Take the next steps from the volume to a mover pod."""
        refuse_unsupported(cr)
        return await self.exposer.ensure(self._request(cr), guard)

    async def confirm_volume(self, cr: DataDownload) -> None:
        """Check whether the mover may start; its own PVC keeps the volume."""
        if cr.preparing:
            refuse_unsupported(cr)
            await self.exposer.confirm(self._request(cr))

    async def keep(self, cr: DataDownload, outcome: Outcome) -> Outcome:
        """Return `outcome` with the restored volume."""
        kept = await self.exposer.read_volume(self._request(cr))
        return replace(outcome, pv_name=kept.pv_name, reclaim_policy=kept.reclaim_policy, provisioned=kept.provisioned)

    async def complete(self, cr: DataDownload, outcome: Outcome) -> Pending | None:
        """Rebind the restored volume to the target PVC."""
        return await self.exposer.rebind(self._request(cr), _kept_volume(outcome))

    async def withdraw(self, cr: DataDownload) -> Pending | None:
        """Delete what keeps another attempt of `cr` from being exposed."""
        last = cr.attempts.last
        return None if last is None else await self.exposer.withdraw(self._request(cr), last)

    async def clean_up(self, cr: DataDownload) -> Pending | None:
        """Delete pod and PVCs, and a new volume if it was never rebound; an existing one is given back."""
        request = self._request(cr)
        if cr.phase is not Phase.COMPLETED:
            waiting = await self._release_volume(request, read_outcome(cr))
            if waiting is not None:
                return waiting
        return await self.exposer.clean_up(request)

    async def _release_volume(self, request: RestoreRequest, outcome: Outcome | None) -> Pending | None:
        if request.volume:
            return await self.exposer.give_back(request)
        if outcome is not None and outcome.pv_name:
            return await self.exposer.drop_volume(request, _kept_volume(outcome))
        return None

    def _request(self, cr: DataDownload) -> RestoreRequest:
        settings, spec = self.expose_settings().for_attempt(cr), cr.spec
        target, meta = spec.target_volume, cr.metadata
        return RestoreRequest(
            owner=Owner.of(cr),
            target_namespace=target.namespace,
            target_claim=target.pvc,
            location=spec.backup_storage_location,
            settings=settings,
            operation_timeout=cr.operation_timeout,
            cache=settings.cache_for(spec.snapshot_size or None),
            # As in Velero, every value but windows means Linux.
            for_windows=spec.node_os == WINDOWS,
            copied=cr.copies,
            volume=target.pv,
            in_place=_read_in_place(cr),
            base_snapshot=_base_snapshot(cr),
            requested_at=meta.creation_timestamp,
            restore=meta.annotations.get(RESTORE_ANNOTATION) or meta.labels.get(VELERO_RESTORE_LABEL) or None,
            by_block=cr.by_block,
            fs_type=target.fs_type,
        )


def _base_snapshot(cr: DataDownload) -> tuple[str, str] | None:
    """Return the snapshot that nobody but the data mover deletes; None: there is none."""
    base = cr.spec.csi_snapshot
    if base is None or not base.clean_up or not base.volume_snapshot:
        return None
    return base.volume_snapshot_namespace or cr.spec.target_volume.namespace, base.volume_snapshot


def _read_in_place(cr: DataDownload) -> InPlace | None:
    """Return how the data goes into an existing volume; None: into a new one, or that is invalid."""
    # Cleanup needs a request, too; admission refuses what is invalid.
    with suppress(ConfigError):
        return cr.in_place
    return None


def _kept_volume(outcome: Outcome) -> KeptVolume:
    found = outcome.result.fs_type if isinstance(outcome.result, RestoreResult) else UNSET
    return KeptVolume(outcome.pv_name, outcome.reclaim_policy, provisioned=outcome.provisioned, fs_type=found or None)
