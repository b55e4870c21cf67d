"""DataUpload: a CSI snapshot goes into the backup repository.

Knows what of the life cycle is particular to it. Does not know the life cycle, nor how a
snapshot becomes a volume (`exposer.csi_snapshot`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, cast

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS, Resource
from core.models.base import JsonDict
from core.models.names import DATA_MOVER_FINALIZER, DATA_UPLOAD_LABEL
from core.models.transfers import DataUpload, Transfer
from exposer.model import Exposed, Exposer, Guard, Owner, Pending, Reader, SnapshotRequest
from exposer.settings import ExposeSettings
from nodeagent.transfers.kinds.base import COMMON_STATUS_FIELDS, READY, Admission, AdmissionState, PlainKind
from nodeagent.transfers.kinds.repository import check_location
from nodeagent.transfers.outcome import BackupResults

__all__ = ["DataUploadKind"]

_CSI: Final = "CSI"
"""The only snapshot type there is. Source: Velero v1.18, SnapshotType."""


@dataclass(frozen=True)
class DataUploadKind(BackupResults, PlainKind):
    """The adapter of DataUploads.

    `datamovers` are the names in `spec.datamover` that mean this agent.
    """

    client: KubeClient
    exposer: Exposer[SnapshotRequest]
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    name: ClassVar[str] = DataUpload.kind_name
    resource: ClassVar[Resource] = DATA_UPLOADS
    finalizer: ClassVar[str] = DATA_MOVER_FINALIZER
    pod_label: ClassVar[str] = DATA_UPLOAD_LABEL
    restores: ClassVar[bool] = False
    bound_to_node: ClassVar[bool] = False
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {
        "acceptedByNode",
        "node",
        "nodeOS",
        "path",
        "snapshotID",
        "incrementalBytes",
        "dataMoverResult",
    }

    def parse(self, raw: JsonDict) -> Transfer:
        """Return the DataUpload that `raw` is."""
        return DataUpload.parse(raw)

    def managed(self, cr: Transfer) -> bool:
        """Whether it is meant for this data mover."""
        return _upload(cr).spec.datamover in self.datamovers

    def queue_namespace(self, cr: Transfer) -> str:
        """The namespace of the claim that is backed up."""
        return _upload(cr).spec.source_namespace

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        """Say whether location and snapshot are there and ready."""
        spec = _upload(cr).spec
        if spec.snapshot_type != _CSI or spec.csi_snapshot is None:
            message = f"snapshot type {spec.snapshot_type!r} is not supported; only {_CSI} with csiSnapshot is"
            return Admission(AdmissionState.FAILED, "SnapshotTypeUnknown", message)
        admission = await check_location(reader, cr)
        if admission.verdict is not AdmissionState.READY:
            return admission
        try:
            waiting = await self.exposer.check(self._request(cr), reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, "SourceMissing", str(e))
        if waiting is None:
            return READY
        # Taking a snapshot may last for hours on some storages; one that goes wrong for so long never comes.
        indefinite = not waiting.blocked
        return Admission(
            AdmissionState.PENDING, waiting.reason, waiting.message, indefinite=indefinite, blocked=waiting.blocked
        )

    async def ensure_exposed(self, cr: Transfer, guard: Guard) -> Exposed | Pending:
        """Bring the snapshot's data one step nearer to a mover pod."""
        return await self.exposer.ensure(self._request(cr), guard)

    async def clean_up(self, cr: Transfer) -> Pending | None:
        """Remove pod, claim and snapshots."""
        if _upload(cr).spec.csi_snapshot is None:
            # It was refused for that; nothing was made.
            return None
        return await self.exposer.clean_up(self._request(cr))

    def _request(self, cr: Transfer) -> SnapshotRequest:
        spec = _upload(cr).spec
        if spec.csi_snapshot is None:
            raise ExposeError(f"DataUpload {cr.metadata.namespace}/{cr.name} names no CSI snapshot")
        return SnapshotRequest(
            owner=Owner.of(cr),
            source_namespace=spec.source_namespace,
            source_claim=spec.source_pvc,
            volume_snapshot=spec.csi_snapshot.volume_snapshot,
            storage_class=spec.csi_snapshot.storage_class,
            settings=self.expose_settings(),
            operation_timeout=cr.operation_timeout,
            requested_at=cr.metadata.creation_timestamp,
        )


def _upload(cr: Transfer) -> DataUpload:
    """Return `cr` as what `DataUploadKind.parse` made it."""
    return cast("DataUpload", cr)
