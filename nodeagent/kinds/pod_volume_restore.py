"""PodVolumeRestore: data comes out of the backup repository into a volume of a pod that waits.

Knows what is particular to it beside what it shares with PodVolumeBackup
(`nodeagent.kinds.pod_volume`).
"""

from dataclasses import dataclass
from typing import ClassVar, cast

from core.contract import MoverVerb
from core.kube.resources import POD_VOLUME_RESTORES, Resource
from core.models.base import JsonDict
from core.models.names import POD_VOLUME_RESTORE_LABEL
from core.models.transfers import Load, PodVolumeRestore
from nodeagent.kinds.base import COMMON_STATUS_FIELDS, Admission, Verdict
from nodeagent.kinds.pod_volume import PodVolumeKind
from nodeagent.kinds.results import RestoreResults

__all__ = ["PodVolumeRestoreKind"]


@dataclass(frozen=True)
class PodVolumeRestoreKind(RestoreResults, PodVolumeKind):
    """The adapter of PodVolumeRestores."""

    name: ClassVar[str] = PodVolumeRestore.kind_name
    resource: ClassVar[Resource] = POD_VOLUME_RESTORES
    pod_label: ClassVar[str] = POD_VOLUME_RESTORE_LABEL
    verb: ClassVar[MoverVerb] = MoverVerb.RESTORE
    restores: ClassVar[bool] = True
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {"node"}

    def parse(self, raw: JsonDict) -> Load:
        """Return the PodVolumeRestore that `raw` is."""
        return PodVolumeRestore.parse(raw)

    async def read_node(self, cr: Load) -> str:
        """Return the node of the pod that waits."""
        return await self.exposer.read_node(self._request(cr))

    async def check_admission(self, cr: Load) -> Admission:
        """Say whether location and volume can be used and the pod waits, and on which node."""
        found = await self._locate(cast("PodVolumeRestore", cr))
        return found if isinstance(found, Admission) else Admission(Verdict.READY, node=found.node)
