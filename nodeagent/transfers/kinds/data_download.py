"""DataDownload: data comes out of the backup repository into a claim that waits for it.

Knows what of the life cycle is particular to it. Does not know the life cycle, nor how a
volume is made and handed over (`exposer.generic_restore`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar, Final, cast

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, Resource
from core.models.base import JsonDict
from core.models.names import DATA_DOWNLOAD_LABEL, DATA_MOVER_FINALIZER
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import DataDownload, Transfer
from exposer.model import Exposed, Guard, KeptVolume, Owner, Pending, Reader, RestoreExposer, RestoreRequest
from exposer.placement import LINUX, WINDOWS
from exposer.settings import ExposeSettings
from nodeagent.transfers.kinds.base import COMMON_STATUS_FIELDS, READY, Admission, AdmissionState, PlainKind
from nodeagent.transfers.kinds.repository import check_location, fit_cache
from nodeagent.transfers.outcome import Outcome, RestoreResults, read_outcome

__all__ = ["DataDownloadKind"]

_TARGET_PATIENCE: Final = timedelta(minutes=2)
"""A server makes the DataDownload before its target claim.

Source: Velero v1.18, the CSI restore action of PersistentVolumeClaims.
"""


@dataclass(frozen=True)
class DataDownloadKind(RestoreResults, PlainKind):
    """The adapter of DataDownloads.

    `datamovers` are the names in `spec.datamover` that mean this agent.
    """

    client: KubeClient
    exposer: RestoreExposer
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    name: ClassVar[str] = DataDownload.kind_name
    resource: ClassVar[Resource] = DATA_DOWNLOADS
    finalizer: ClassVar[str] = DATA_MOVER_FINALIZER
    pod_label: ClassVar[str] = DATA_DOWNLOAD_LABEL
    restores: ClassVar[bool] = True
    bound_to_node: ClassVar[bool] = False
    status_fields: ClassVar[frozenset[str]] = COMMON_STATUS_FIELDS | {"acceptedByNode", "node"}

    def parse(self, raw: JsonDict) -> Transfer:
        """Return the DataDownload that `raw` is."""
        return DataDownload.parse(raw)

    def managed(self, cr: Transfer) -> bool:
        """Whether it is meant for this data mover."""
        return _download(cr).spec.datamover in self.datamovers

    def queue_namespace(self, cr: Transfer) -> str:
        """The namespace of the claim that waits for the data."""
        return _download(cr).spec.target_volume.namespace

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        """Say whether the location can be used and the target claim waits for its volume."""
        admission = await check_location(reader, cr)
        if admission.verdict is not AdmissionState.READY:
            return admission
        target = _download(cr).spec.target_volume
        claim = await reader.read(PERSISTENT_VOLUME_CLAIMS, target.namespace, target.pvc)
        if claim is None:
            message = f"PersistentVolumeClaim {target.namespace}/{target.pvc} to restore into does not exist"
            return Admission(
                AdmissionState.PENDING, PendingReason.TARGET_CLAIM_MISSING, message, limit=_TARGET_PATIENCE
            )
        try:
            waiting = await self.exposer.check(self._request(cr), reader)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, "TargetClaimUnusable", str(e))
        if waiting is None:
            return READY
        return Admission(AdmissionState.PENDING, waiting.reason, waiting.message, blocked=waiting.blocked)

    async def ensure_exposed(self, cr: Transfer, guard: Guard) -> Exposed | Pending:
        """Bring a new volume one step nearer to a mover pod."""
        return await self.exposer.ensure(await fit_cache(self.client, cr, self._request(cr)), guard)

    async def keep(self, cr: Transfer, outcome: Outcome) -> Outcome:
        """Return `outcome` with the volume that was written."""
        kept = await self.exposer.read_volume(self._request(cr))
        return replace(outcome, pv_name=kept.pv_name, reclaim_policy=kept.reclaim_policy)

    async def complete(self, cr: Transfer, outcome: Outcome) -> Pending | None:
        """Hand the volume over to the target claim."""
        return await self.exposer.rebind(self._request(cr), _kept_volume(outcome))

    async def clean_up(self, cr: Transfer) -> Pending | None:
        """Remove pod and claims; and the volume, if it was kept but never handed over."""
        request = self._request(cr)
        outcome = read_outcome(cr)
        if outcome is not None and outcome.pv_name and cr.phase is not Phase.COMPLETED:
            waiting = await self.exposer.drop_volume(request, _kept_volume(outcome))
            if waiting is not None:
                return waiting
        return await self.exposer.clean_up(request)

    def _request(self, cr: Transfer) -> RestoreRequest:
        settings, spec = self.expose_settings(), _download(cr).spec
        target = spec.target_volume
        return RestoreRequest(
            owner=Owner.of(cr),
            target_namespace=target.namespace,
            target_claim=target.pvc,
            settings=settings,
            operation_timeout=cr.operation_timeout,
            cache=settings.cache_for(spec.snapshot_size),
            # What is not said to be for Windows is for Linux, as with the peer.
            node_os=WINDOWS if spec.node_os == WINDOWS else LINUX,
        )


def _kept_volume(outcome: Outcome) -> KeptVolume:
    return KeptVolume(outcome.pv_name, outcome.reclaim_policy)


def _download(cr: Transfer) -> DataDownload:
    """Return `cr` as what `DataDownloadKind.parse` made it."""
    return cast("DataDownload", cr)
