"""PodVolumeBackup: a running pod's volume goes into the backup repository.

Knows what is particular to it beside what it shares with PodVolumeRestore
(`nodeagent.kinds.pod_volume`).
"""

from dataclasses import dataclass
from typing import ClassVar, cast

from core.contract import MoverVerb
from core.kube.resources import POD_VOLUME_BACKUPS, Resource
from core.models.base import JsonDict
from core.models.names import POD_VOLUME_BACKUP_LABEL
from core.models.phases import Phase
from core.models.transfers import Load, PodVolumeBackup
from nodeagent.kinds.base import COMMON_STATUS_FIELDS, Admission, Verdict
from nodeagent.kinds.pod_volume import PodVolumeKind
from nodeagent.kinds.results import BackupResults
from nodeagent.runtime.metrics import Metrics

__all__ = ["PodVolumeBackupKind"]


@dataclass(frozen=True)
class PodVolumeBackupKind(BackupResults, PodVolumeKind):
    """The adapter of PodVolumeBackups."""

    name: ClassVar[str] = PodVolumeBackup.kind_name
    resource: ClassVar[Resource] = POD_VOLUME_BACKUPS
    pod_label: ClassVar[str] = POD_VOLUME_BACKUP_LABEL
    verb: ClassVar[MoverVerb] = MoverVerb.BACKUP
    restores: ClassVar[bool] = False
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {"path", "snapshotID", "incrementalBytes"}

    def parse(self, raw: JsonDict) -> Load:
        """Return the PodVolumeBackup that `raw` is."""
        return PodVolumeBackup.parse(raw)

    async def read_node(self, cr: Load) -> str:
        """Return the node that the custom resource names."""
        return _backup(cr).spec.node

    async def check_admission(self, cr: Load) -> Admission:
        """Say whether location, pod and volume can be used, and on which node."""
        pvb = _backup(cr)
        found = await self._locate(pvb)
        if isinstance(found, Admission):
            return found
        if found.node != pvb.spec.node:
            message = f"workload pod {pvb.spec.pod.namespace}/{pvb.spec.pod.name} runs on node {found.node}"
            return Admission(Verdict.FAILS, "WrongNode", f"{message}, and not on {pvb.spec.node}")
        return Admission(Verdict.READY, node=found.node)

    def count(self, cr: Load, metrics: Metrics) -> None:
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


def _backup(cr: Load) -> PodVolumeBackup:
    """Return `cr` as what `PodVolumeBackupKind.parse` made it."""
    return cast("PodVolumeBackup", cr)
