"""The adapters of DataUploads and DataDownloads: a CSI snapshot is backed up, and restored into a volume."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from msgspec import UNSET

from core.contract import RestoreResult
from core.errors import ExposeError
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS
from core.models import names
from core.models.phases import Phase
from core.models.reasons import FailureReason
from core.models.transfers import DataDownload, DataUpload
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.generic_restore import GenericRestoreExposer
from exposer.model import WINDOWS, KeptVolume, Pending, Reader, RestoreRequest, SnapshotRequest
from nodeagent.transfers.kinds.base import (
    COMMON_STATUS_FIELDS,
    Admission,
    AdmissionState,
    Kind,
    KindSpec,
    admit_exposable,
    find_unsupported,
)
from nodeagent.transfers.outcome import BackupResults, Outcome, RestoreResults, read_outcome

_CSI: Final = "CSI"
"""The only supported snapshot type. Source: Velero v1.18, SnapshotType."""


@dataclass(frozen=True)
class DataUploadKind(BackupResults, Kind[DataUpload]):
    """The adapter of DataUploads."""

    exposer: CSISnapshotExposer

    volume_fault: ClassVar[FailureReason] = FailureReason.SOURCE_MISSING
    spec: ClassVar[KindSpec] = KindSpec(
        model=DataUpload,
        resource=DATA_UPLOADS,
        finalizer=names.DATA_MOVER_FINALIZER,
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

    def queue_namespace(self, cr: DataUpload) -> str:
        """Return the namespace of the source PVC."""
        return cr.spec.source_namespace

    def _refuse(self, cr: DataUpload) -> Admission | None:
        if cr.spec.snapshot_type == _CSI and cr.spec.csi_snapshot is not None:
            return None
        message = f"snapshot type {cr.spec.snapshot_type!r} is not supported; only {_CSI} with csiSnapshot is"
        return Admission(AdmissionState.FAILED, FailureReason.SNAPSHOT_TYPE_UNKNOWN, message)

    async def _check_volume(self, cr: DataUpload, reader: Reader, ready: Admission) -> Admission:
        request = self._request(cr)
        waiting = await self.exposer.check(request, reader)
        checked = admit_exposable(ready, waiting, request.copies.needed)
        if not cr.spec.datamover and names.BACKUP_ANNOTATION in cr.metadata.annotations:
            # What a Velero server restores must have the data mover that it asked for.
            by_block = request.storage_class in request.settings.block_classes
            checked = replace(checked, datamover=names.BLOCK_DATA_MOVER if by_block else None)
        # Some storage takes hours for a snapshot; one that reports errors for so long never becomes ready.
        return checked if waiting is None else replace(checked, indefinite=not waiting.blocked)

    async def clean_up(self, cr: DataUpload) -> Pending | None:
        """Delete pod, PVC and snapshot objects; there are none if it names no snapshot, and so was not admitted."""
        return await super().clean_up(cr) if cr.spec.csi_snapshot is not None else None

    def _request(self, cr: DataUpload) -> SnapshotRequest:
        spec = cr.spec
        if spec.csi_snapshot is None:
            raise ExposeError(f"DataUpload {cr.metadata.namespace}/{cr.name} names no CSI snapshot")
        return SnapshotRequest.of(
            cr,
            self.expose_settings(),
            source_namespace=spec.source_namespace,
            source_claim=spec.source_pvc,
            volume_snapshot=spec.csi_snapshot.volume_snapshot,
            storage_class=spec.csi_snapshot.storage_class,
            fell_back=bool(cr.not_by_block),
            completed=cr.phase is Phase.COMPLETED,
        )


@dataclass(frozen=True)
class DataDownloadKind(RestoreResults, Kind[DataDownload]):
    """The adapter of DataDownloads."""

    exposer: GenericRestoreExposer

    volume_fault: ClassVar[FailureReason] = FailureReason.TARGET_CLAIM_UNUSABLE
    spec: ClassVar[KindSpec] = KindSpec(
        model=DataDownload,
        resource=DATA_DOWNLOADS,
        finalizer=names.DATA_MOVER_FINALIZER,
        status_fields=COMMON_STATUS_FIELDS | {"acceptedByNode", "node", "incrementalBytes"},
        restores=True,
        bound_to_node=False,
    )

    def queue_namespace(self, cr: DataDownload) -> str:
        """Return the namespace of the target PVC."""
        return cr.spec.target_volume.namespace

    def _refuse(self, cr: DataDownload) -> Admission | None:
        return find_unsupported(cr)

    async def _check_volume(self, cr: DataDownload, reader: Reader, ready: Admission) -> Admission:
        request = self._request(cr)
        return admit_exposable(ready, await self.exposer.check(request, reader), request.copies.needed)

    async def confirm_volume(self, cr: DataDownload, *, moved: bool = False) -> None:
        """Check whether the mover may start; its own PVC keeps the volume."""
        if cr.preparing:
            self._check_supported(cr)
            await super().confirm_volume(cr, moved=moved)

    async def keep(self, cr: DataDownload, outcome: Outcome) -> Outcome:
        """Return `outcome` with the restored volume."""
        kept = await self.exposer.read_volume(self._request(cr))
        return replace(outcome, pv_name=kept.pv_name, reclaim_policy=kept.reclaim_policy, provisioned=kept.provisioned)

    async def complete(self, cr: DataDownload, outcome: Outcome) -> Pending | None:
        """Rebind the restored volume to the target PVC."""
        return await self.exposer.rebind(self._request(cr), _kept_volume(outcome))

    async def clean_up(self, cr: DataDownload) -> Pending | None:
        """Delete pod and PVCs, and a new volume if it was never rebound; an existing one is given back."""
        request, waiting = self._request(cr), None
        if cr.phase is not Phase.COMPLETED:
            if request.volume:
                waiting = await self.exposer.give_back(request)
            elif (outcome := read_outcome(cr)) is not None and outcome.pv_name:
                waiting = await self.exposer.drop_volume(request, _kept_volume(outcome))
        return waiting or await super().clean_up(cr)

    def _request(self, cr: DataDownload) -> RestoreRequest:
        settings, spec = self.expose_settings(), cr.spec
        target, meta = spec.target_volume, cr.metadata
        nodes = (cr.status.node, cr.status.accepted_by_node, *(one.node for one in cr.attempts.interruptions))
        return RestoreRequest.of(
            cr,
            settings,
            target_namespace=target.namespace,
            target_claim=target.pvc,
            cache=settings.cache_for(spec.snapshot_size or None),
            # As in Velero, every value but windows means Linux.
            for_windows=spec.node_os == WINDOWS,
            volume=target.pv,
            base_snapshot=_base_snapshot(cr),
            restore=meta.annotations.get(names.RESTORE_ANNOTATION)
            or meta.labels.get(names.VELERO_RESTORE_LABEL)
            or None,
            fs_type=target.fs_type,
            nodes=tuple(dict.fromkeys(filter(None, nodes))),
        )


def _base_snapshot(cr: DataDownload) -> tuple[str, str] | None:
    """Return the snapshot that nobody but the data mover deletes; None: there is none."""
    base = cr.spec.csi_snapshot
    if base is None or not base.clean_up or not base.volume_snapshot:
        return None
    return base.volume_snapshot_namespace or cr.spec.target_volume.namespace, base.volume_snapshot


def _kept_volume(outcome: Outcome) -> KeptVolume:
    found = outcome.result.fs_type if isinstance(outcome.result, RestoreResult) else UNSET
    return KeptVolume(outcome.pv_name, outcome.reclaim_policy, provisioned=outcome.provisioned, fs_type=found or None)
