"""The adapter of DataUploads: back up a CSI snapshot.

Knows the parts of the life cycle that only this kind has. Does not know the life cycle, nor how a
volume is created from a snapshot (`exposer.csi_snapshot`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from core.errors import ExposeError
from core.kube.resources import DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS
from core.models.names import DATA_MOVER_FINALIZER
from core.models.reasons import FailureReason
from core.models.transfers import DataUpload
from exposer.model import BackupExposer, Exposed, Guard, Owner, Pending, Reader, SnapshotRequest
from exposer.settings import ExposeSettings
from nodeagent.transfers.kinds.base import (
    COMMON_STATUS_FIELDS,
    Admission,
    AdmissionState,
    KindSpec,
    PlainKind,
    admit_exposable,
    check_mode,
    find_unsupported,
    read_copies,
    refuse_unsupported,
)
from nodeagent.transfers.kinds.location import check_location
from nodeagent.transfers.outcome import BackupResults

__all__ = ["DataUploadKind"]

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

    exposer: BackupExposer
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
        if (refused := find_unsupported(cr)) is not None:
            return refused
        if spec.snapshot_type != _CSI or spec.csi_snapshot is None:
            message = f"snapshot type {spec.snapshot_type!r} is not supported; only {_CSI} with csiSnapshot is"
            return Admission(AdmissionState.FAILED, FailureReason.SNAPSHOT_TYPE_UNKNOWN, message)
        if cr.by_block:
            claim = await reader.read(PERSISTENT_VOLUME_CLAIMS, spec.source_namespace, spec.source_pvc)
            if (refused := check_mode(cr, claim)) is not None:
                return refused
        admission = await check_location(reader, cr)
        if admission.decision is not AdmissionState.READY:
            return admission
        request = self._request(cr)
        try:
            waiting = await self.exposer.check(request, reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, FailureReason.SOURCE_MISSING, str(e))
        checked = admit_exposable(admission, waiting, request.copies.needed)
        # Some storage takes hours for a snapshot; one that reports errors for so long never becomes ready.
        return checked if waiting is None else replace(checked, indefinite=not waiting.blocked)

    async def ensure_exposed(self, cr: DataUpload, guard: Guard) -> Exposed | Pending:
        """Take the next steps from the source snapshot to a mover pod."""
        refuse_unsupported(cr)
        return await self.exposer.ensure(self._request(cr), guard)

    async def confirm_volume(self, cr: DataUpload) -> None:
        """Check that the volume of the mover was created from the source snapshot, and whether it may start."""
        if cr.preparing:
            refuse_unsupported(cr)
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
            copied=read_copies(cr),
        )
