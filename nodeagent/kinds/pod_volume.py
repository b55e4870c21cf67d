"""What PodVolumeBackup and PodVolumeRestore share: a volume where its pod has it mounted.

Knows what of the life cycle is particular to both. Does not know the life cycle, nor how a
volume is reached (`exposer.pod_volume`).
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from core.contract import MoverVerb
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.models.names import POD_VOLUME_FINALIZER
from core.models.transfers import Load, PodVolumeBackup, PodVolumeRestore
from exposer.model import Exposed, Guard, LocatedVolume, Owner, PodVolumeRequest, Waiting, WorkloadRef
from exposer.pod_volume import PodVolumeExposer
from exposer.settings import PlanSource
from nodeagent.kinds.base import Admission, Verdict
from nodeagent.kinds.cache_limit import fit_cache
from nodeagent.kinds.location import check_location
from nodeagent.kinds.plain import PlainKind

__all__ = ["PodVolume", "PodVolumeKind"]

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
    plan: PlanSource
    datamovers: frozenset[str]

    verb: ClassVar[MoverVerb]
    restores: ClassVar[bool]
    finalizer: ClassVar[str] = POD_VOLUME_FINALIZER
    bound_to_node: ClassVar[bool] = True

    def managed(self, cr: Load) -> bool:  # noqa: ARG002 - as the protocol has it
        """Whether it is meant for this data mover: it names none, so the built-in one does it."""
        return bool(self.datamovers & _BUILT_IN)

    async def clean_up(self, cr: Load) -> Waiting | None:
        """Remove the mover pod."""
        return await self.exposer.clean_up(self._request(cr))

    async def ensure_exposed(self, cr: Load, guard: Guard) -> Exposed | Waiting:
        """Bring the volume one step nearer to a mover pod."""
        return await self.exposer.ensure(await fit_cache(self.client, cr, self._request(cr)), guard)

    async def confirm_volume(self, cr: Load) -> None:
        """Return if the workload's pod still has the volume."""
        await self.exposer.confirm(self._request(cr))

    def queue_namespace(self, cr: Load) -> str:
        """The namespace of the workload's pod."""
        return self._request(cr).workload.namespace

    async def _locate(self, cr: PodVolume) -> LocatedVolume | Admission:
        """Return where the volume is, or why the load cannot be accepted now."""
        if cr.spec.uploader_type == _RESTIC:
            return Admission(Verdict.FAILS, "UploaderUnknown", "restic is not supported")
        admission = await check_location(self.client, cr)
        if admission.verdict is not Verdict.READY:
            return admission
        try:
            located = await self.exposer.locate(self._request(cr))
        except ExposeError as e:
            return Admission(Verdict.FAILS, "VolumeRefused", str(e))
        if isinstance(located, Waiting):
            # The pod's image may take its time, or its turn among many.
            return Admission(
                Verdict.WAITS,
                located.reason,
                located.message,
                patient=True,
                trouble=located.trouble,
                pod=(cr.spec.pod.namespace, cr.spec.pod.name),
            )
        return located

    def _request(self, cr: Load) -> PodVolumeRequest:
        if not isinstance(cr, PodVolumeBackup | PodVolumeRestore):
            raise ExposeError(f"{cr.kind} {cr.name} names no volume of a pod")
        plan, pod = self.plan(), cr.spec.pod
        return PodVolumeRequest(
            owner=Owner.of(cr),
            verb=self.verb,
            workload=WorkloadRef(pod.namespace, pod.name, pod.uid),
            volume=cr.spec.volume,
            template=plan.template,
            settings=plan.settings,
            mover=plan.options,
            cache=plan.cache_for(cr.spec.snapshot_size) if isinstance(cr, PodVolumeRestore) else None,
        )
