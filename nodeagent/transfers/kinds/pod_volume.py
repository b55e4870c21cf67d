"""What PodVolumeBackup and PodVolumeRestore share: a volume where its pod has it mounted.

Knows what of the life cycle is particular to both. Does not know the life cycle, nor how a
volume is reached (`exposer.pod_volume`).

PodVolumeBackup: a running pod's volume goes into the backup repository.

Knows what is particular to it beside what it shares with PodVolumeRestore
(`nodeagent.transfers.kinds.pod_volume`).

PodVolumeRestore: data comes out of the backup repository into a volume of a pod that waits.

Knows what is particular to it beside what it shares with PodVolumeBackup
(`nodeagent.transfers.kinds.pod_volume`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, cast

from core.contract import MoverVerb
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES, Resource
from core.models.base import JsonDict
from core.models.names import POD_VOLUME_BACKUP_LABEL, POD_VOLUME_FINALIZER, POD_VOLUME_RESTORE_LABEL
from core.models.phases import Phase
from core.models.transfers import PodVolumeBackup, PodVolumeRestore, Transfer
from exposer.model import Exposed, Guard, LocatedVolume, Owner, Pending, PodVolumeRequest, Reader, WorkloadRef
from exposer.pod_volume import PodVolumeExposer
from exposer.settings import ExposeSettings
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.kinds.base import COMMON_STATUS_FIELDS, Admission, AdmissionState, PlainKind
from nodeagent.transfers.kinds.repository import check_location, fit_cache
from nodeagent.transfers.outcome import BackupResults, RestoreResults

__all__ = ["PodVolume", "PodVolumeBackupKind", "PodVolumeKind", "PodVolumeRestoreKind"]


PodVolume = PodVolumeBackup | PodVolumeRestore


_RESTIC: Final = "restic"


_BUILT_IN: Final = frozenset({"", "velero"})
"""What `spec.datamover` of other kinds calls the mover that serves pod volumes."""


@dataclass(frozen=True)
class PodVolumeKind(PlainKind):
    """The common part of both adapters.

    `datamovers` are the names that mean this agent where a custom resource names its mover.
    """

    client: KubeClient
    exposer: PodVolumeExposer
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    verb: ClassVar[MoverVerb]
    restores: ClassVar[bool]
    finalizer: ClassVar[str] = POD_VOLUME_FINALIZER
    bound_to_node: ClassVar[bool] = True

    def managed(self, cr: Transfer) -> bool:  # noqa: ARG002 - as the protocol has it
        """Whether it is meant for this data mover: it names none, so the built-in one does it."""
        return bool(self.datamovers & _BUILT_IN)

    async def clean_up(self, cr: Transfer) -> Pending | None:
        """Remove the mover pod."""
        return await self.exposer.clean_up(self._request(cr))

    async def ensure_exposed(self, cr: Transfer, guard: Guard) -> Exposed | Pending:
        """Bring the volume one step nearer to a mover pod."""
        return await self.exposer.ensure(await fit_cache(self.client, cr, self._request(cr)), guard)

    async def confirm_volume(self, cr: Transfer) -> None:
        """Return if the workload's pod still has the volume."""
        await self.exposer.confirm(self._request(cr))

    def queue_namespace(self, cr: Transfer) -> str:
        """The namespace of the workload's pod."""
        return self._request(cr).workload.namespace

    async def _locate(self, cr: PodVolume, reader: Reader) -> LocatedVolume | Admission:
        """Return where the volume is, or why the load cannot be accepted now."""
        if cr.spec.uploader_type == _RESTIC:
            return Admission(AdmissionState.FAILED, "UploaderUnknown", "restic is not supported")
        admission = await check_location(reader, cr)
        if admission.verdict is not AdmissionState.READY:
            return admission
        try:
            located = await self.exposer.locate(self._request(cr), reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, "VolumeRefused", str(e))
        if isinstance(located, Pending):
            # The pod's image may take its time, or its turn among many.
            return Admission(
                AdmissionState.PENDING,
                located.reason,
                located.message,
                indefinite=True,
                blocked=located.blocked,
                pod=(cr.spec.pod.namespace, cr.spec.pod.name),
            )
        return located

    def _request(self, cr: Transfer) -> PodVolumeRequest:
        if not isinstance(cr, PodVolumeBackup | PodVolumeRestore):
            raise ExposeError(f"{cr.kind} {cr.name} names no volume of a pod")
        settings, pod = self.expose_settings(), cr.spec.pod
        return PodVolumeRequest(
            owner=Owner.of(cr),
            verb=self.verb,
            workload=WorkloadRef(pod.namespace, pod.name, pod.uid),
            volume=cr.spec.volume,
            settings=settings,
            cache=settings.cache_for(cr.spec.snapshot_size) if isinstance(cr, PodVolumeRestore) else None,
        )


@dataclass(frozen=True)
class PodVolumeBackupKind(BackupResults, PodVolumeKind):
    """The adapter of PodVolumeBackups."""

    name: ClassVar[str] = PodVolumeBackup.kind_name
    resource: ClassVar[Resource] = POD_VOLUME_BACKUPS
    pod_label: ClassVar[str] = POD_VOLUME_BACKUP_LABEL
    verb: ClassVar[MoverVerb] = MoverVerb.BACKUP
    restores: ClassVar[bool] = False
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {"path", "snapshotID", "incrementalBytes"}

    def parse(self, raw: JsonDict) -> Transfer:
        """Return the PodVolumeBackup that `raw` is."""
        return PodVolumeBackup.parse(raw)

    async def read_node(self, cr: Transfer) -> str:
        """Return the node that the custom resource names."""
        return _backup(cr).spec.node

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        """Say whether location, pod and volume can be used, and on which node."""
        pvb = _backup(cr)
        found = await self._locate(pvb, reader)
        if isinstance(found, Admission):
            return found
        if found.node != pvb.spec.node:
            message = f"workload pod {pvb.spec.pod.namespace}/{pvb.spec.pod.name} runs on node {found.node}"
            return Admission(AdmissionState.FAILED, "WrongNode", f"{message}, and not on {pvb.spec.node}")
        return Admission(AdmissionState.READY, node=found.node)

    def count(self, cr: Transfer, metrics: Metrics) -> None:
        """Count one that begins or completes, and tell how long it took.

        Source: Velero v1.18, pkg/controller/pod_volume_backup_controller.go.
        """
        if cr.phase is Phase.IN_PROGRESS:
            metrics.pod_volume_backup_enqueued()
        if cr.phase is not Phase.COMPLETED:
            return
        metrics.pod_volume_backup_dequeued()
        pvb, began, ended = _backup(cr), cr.status.start_timestamp, cr.status.completion_timestamp
        if began is None or ended is None:
            return
        spec, meta = pvb.spec, pvb.metadata
        operation = f"{pvb.name}-{spec.backup_storage_location}-{spec.pod.namespace}-{spec.uploader_type}-backup"
        backup = f"{meta.namespace}/{meta.owner_references[0].name if meta.owner_references else ''}"
        metrics.pod_volume_operation(operation, backup, name=pvb.name, seconds=(ended - began).total_seconds())


def _backup(cr: Transfer) -> PodVolumeBackup:
    """Return `cr` as what `PodVolumeBackupKind.parse` made it."""
    return cast("PodVolumeBackup", cr)


@dataclass(frozen=True)
class PodVolumeRestoreKind(RestoreResults, PodVolumeKind):
    """The adapter of PodVolumeRestores."""

    name: ClassVar[str] = PodVolumeRestore.kind_name
    resource: ClassVar[Resource] = POD_VOLUME_RESTORES
    pod_label: ClassVar[str] = POD_VOLUME_RESTORE_LABEL
    verb: ClassVar[MoverVerb] = MoverVerb.RESTORE
    restores: ClassVar[bool] = True
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {"node"}

    def parse(self, raw: JsonDict) -> Transfer:
        """Return the PodVolumeRestore that `raw` is."""
        return PodVolumeRestore.parse(raw)

    async def read_node(self, cr: Transfer) -> str:
        """Return the node of the pod that waits."""
        return await self.exposer.read_node(self._request(cr))

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        """Say whether location and volume can be used and the pod waits, and on which node."""
        found = await self._locate(cast("PodVolumeRestore", cr), reader)
        return found if isinstance(found, Admission) else Admission(AdmissionState.READY, node=found.node)
