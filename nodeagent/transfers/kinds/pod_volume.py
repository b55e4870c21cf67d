"""The adapters of PodVolumeBackups and PodVolumeRestores: a volume of a pod, as mounted on its node."""

from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeVar

from core.contract import MoverVerb
from core.kube.resources import POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES
from core.models.names import POD_VOLUME_FINALIZER
from core.models.phases import Phase
from core.models.reasons import FailureReason
from core.models.transfers import PodVolumeBackup, PodVolumeRestore
from exposer.model import Pending, PodVolumeRequest, Reader
from exposer.pod_volume import PodVolumeExposer
from nodeagent import metrics as metric
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import (
    COMMON_STATUS_FIELDS,
    Admission,
    AdmissionState,
    Kind,
    KindSpec,
    admit_exposable,
    find_unsupported,
)
from nodeagent.transfers.outcome import BackupResults, RestoreResults

P = TypeVar("P", PodVolumeBackup, PodVolumeRestore)

_RESTIC: Final = "restic"


@dataclass(frozen=True)
class PodVolumeKind(Kind[P]):
    """The common part of both adapters."""

    exposer: PodVolumeExposer

    verb: ClassVar[MoverVerb]
    volume_fault: ClassVar[FailureReason] = FailureReason.VOLUME_REJECTED

    def queue_namespace(self, cr: P) -> str:
        """Return the namespace of the workload pod."""
        return cr.spec.pod.namespace

    def _refuse(self, cr: P) -> Admission | None:
        if cr.spec.uploader_type != _RESTIC:
            return None
        return Admission(AdmissionState.FAILED, FailureReason.UPLOADER_UNKNOWN, "restic is not supported")

    async def _check_volume(self, cr: P, reader: Reader, ready: Admission) -> Admission:
        located = await self.exposer.locate(self._request(cr), reader)
        if not isinstance(located, Pending):
            return replace(ready, node=located.node)
        waiting, pod = admit_exposable(ready, located, ()), (cr.spec.pod.namespace, cr.spec.pod.name)
        # The workload pod may wait for its volumes, or for other restores.
        return replace(waiting, indefinite=not located.blocked, pod=pod)

    def _request(self, cr: P) -> PodVolumeRequest:
        return PodVolumeRequest.of(
            cr,
            self.expose_settings(),
            verb=self.verb,
            workload=cr.spec.pod,
            volume=cr.spec.volume,
            restore=cr.restore_uid,
            in_place=cr.valid_in_place,
        )


@dataclass(frozen=True)
class PodVolumeBackupKind(BackupResults, PodVolumeKind[PodVolumeBackup]):
    """The adapter of PodVolumeBackups."""

    verb: ClassVar[MoverVerb] = MoverVerb.BACKUP
    spec: ClassVar[KindSpec] = KindSpec(
        model=PodVolumeBackup,
        resource=POD_VOLUME_BACKUPS,
        finalizer=POD_VOLUME_FINALIZER,
        status_fields=COMMON_STATUS_FIELDS | {"path", "snapshotID", "incrementalBytes", "sourceSize"},
        restores=False,
        bound_to_node=True,
    )

    async def read_node(self, cr: PodVolumeBackup) -> str:
        """Return `spec.node`."""
        return cr.spec.node

    async def _check_volume(self, cr: PodVolumeBackup, reader: Reader, ready: Admission) -> Admission:
        admission = await super()._check_volume(cr, reader, ready)
        if admission.decision is AdmissionState.READY and admission.node != cr.spec.node:
            message = f"workload pod {cr.spec.pod} runs on node {admission.node}"
            return Admission(AdmissionState.FAILED, FailureReason.WRONG_NODE, f"{message}, and not on {cr.spec.node}")
        return admission

    def count(self, cr: PodVolumeBackup, metrics: Metrics) -> None:
        """Count a transfer that starts or completes, and observe its duration.

        Source: Velero v1.18, pkg/controller/pod_volume_backup_controller.go.
        """
        if cr.phase is Phase.IN_PROGRESS:
            metrics.inc(metric.POD_VOLUME_BACKUPS_STARTED)
        if cr.phase is not Phase.COMPLETED:
            return
        metrics.inc(metric.POD_VOLUME_BACKUPS_ENDED)
        began, ended = cr.status.start_timestamp, cr.status.completion_timestamp
        if began is None or ended is None:
            return
        spec, meta = cr.spec, cr.metadata
        operation = f"{cr.name}-{spec.backup_storage_location}-{spec.pod.namespace}-{spec.uploader_type}-backup"
        backup = f"{meta.namespace}/{meta.owner_references[0].name if meta.owner_references else ''}"
        seconds = (ended - began).total_seconds()
        metrics.observe(metric.POD_VOLUME_SECONDS, seconds, operation, backup, cr.name)
        metrics.set(metric.POD_VOLUME_LAST_SECONDS, seconds, operation, backup, cr.name)


@dataclass(frozen=True)
class PodVolumeRestoreKind(RestoreResults, PodVolumeKind[PodVolumeRestore]):
    """The adapter of PodVolumeRestores."""

    verb: ClassVar[MoverVerb] = MoverVerb.RESTORE
    spec: ClassVar[KindSpec] = KindSpec(
        model=PodVolumeRestore,
        resource=POD_VOLUME_RESTORES,
        finalizer=POD_VOLUME_FINALIZER,
        status_fields=COMMON_STATUS_FIELDS | {"node", "incrementalBytes"},
        restores=True,
        bound_to_node=True,
    )

    async def read_node(self, cr: PodVolumeRestore) -> str | None:
        """Return the node of the workload pod."""
        return await self.exposer.read_node(self._request(cr))

    async def confirm_volume(self, cr: PodVolumeRestore, *, moved: bool = False) -> None:
        """Check that the workload pod has the volume and, before a mover may write, still waits for it.

        An earlier attempt may have written everything although its result was lost: its pod then runs with the data.
        """
        if cr.preparing:
            self._check_supported(cr)
            await self.exposer.confirm_alone(self._request(cr))
        await self.exposer.confirm(self._request(cr), waits=not moved and (cr.preparing or cr.interrupted))

    def _request(self, cr: PodVolumeRestore) -> PodVolumeRequest:
        return replace(super()._request(cr), cache=self.expose_settings().cache_for(cr.spec.snapshot_size or None))

    def _refuse(self, cr: PodVolumeRestore) -> Admission | None:
        return find_unsupported(cr) or super()._refuse(cr)
