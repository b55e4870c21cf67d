"""Exposer of restores: a new or an existing volume for the data of a DataDownload.

Runs the steps and their cleanup in order. The objects are built by `exposer.claims` and
`exposer.pods`; `exposer.in_place` takes an existing volume; `exposer.rebind` binds the restored volume to the target
PVC, or gives an existing one back.
"""

from dataclasses import replace

from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
)
from core.kube.types import PersistentVolume, PersistentVolumeClaim, Pod, PodToleration
from core.models.attempts import Interruption
from core.models.names import SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer.cache_claims import CacheClaims
from exposer.causes import CauseFinder
from exposer.claims import build_restore_claim, cache_claim_name, claim_volume_mode
from exposer.copies import Copies
from exposer.expose_run import ExposeRun
from exposer.handover import delete_base
from exposer.in_place import check_existing, check_unused, ensure_taken
from exposer.model import Exposed, Guard, KeptVolume, Pending, Reader, RestoreRequest
from exposer.ownership import belongs, delete_owned
from exposer.placement import Placement
from exposer.pods import build_restore_pod
from exposer.rebind import Rebinder
from exposer.source_volume import WINDOWS_ONLY, binds_late, leave_to_velero
from exposer.storage_access import read_storage_access
from exposer.volumes import delete_claim, is_provisioned, original_policy, withdraw_mover
from exposer.workload import tolerations_of_consumers

__all__ = ["GenericRestoreExposer"]


class GenericRestoreExposer:
    """The `RestoreExposer` of DataDownloads."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client = client
        self._causes = causes
        self._caches = CacheClaims(client)
        self._copies = Copies(client)
        self._rebinder = Rebinder(client)

    async def check(self, request: RestoreRequest, reader: Reader) -> Pending | None:
        """Return why the expose cannot start yet; reads only.

        Raises:
            ExposeError: the target PVC is already bound, its StorageClass does not exist, or it requires a Windows
                node, and Velero has no agent there.
            KubeError: the API server rejected a read.
        """
        if request.for_windows:
            return leave_to_velero(request.settings.template)
        target = await self._read_target(request, reader)
        if isinstance(target, Pending):
            return target
        placement = await self._place(request, target, reader)
        if isinstance(placement, Pending):
            return placement
        existing = await self._check_existing(request, target, reader)
        if isinstance(existing, Pending):
            return existing
        return await self._copies.check(request.copies, reader)

    async def ensure(self, request: RestoreRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or why it is pending.

        Raises:
            ExposeError: the expose can never succeed.
            NotOwnerError: the DataDownload is no longer this agent's.
            KubeError: the API server rejected a request.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is created last: where it exists, all other objects were created before it.
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run)
            return await self._causes.inspect(pod)

    async def confirm(self, request: RestoreRequest) -> None:
        """Check that the existing volume is still used by nothing else; reads only.

        Raises:
            ExposeError: it is.
        """
        if request.volume:
            await check_unused(self._client, request.volume)

    async def read_volume(self, request: RestoreRequest) -> KeptVolume:
        """Return the restored volume, before its rebind starts.

        Raises:
            ExposeError: PVC or volume no longer exist.
        """
        owner = request.owner
        place = f"PersistentVolumeClaim {owner.namespace}/{owner.name} with the restored data"
        claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
        if claim is None or not belongs(claim, owner):
            raise ExposeError(f"{place} no longer exists")
        name = claim["spec"].get("volumeName", "")
        volume = await self._client.read(PERSISTENT_VOLUMES, "", name) if name else None
        if volume is None:
            raise ExposeError(f"PersistentVolume of {place} no longer exists")
        return KeptVolume(name, original_policy(volume), provisioned=is_provisioned(volume))

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Bind the volume to the target PVC; None once it is bound.

        Raises:
            ExposeError: it can never be bound; call `drop_volume`.
        """
        return await self._rebinder.rebind(request, kept)

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete a volume that cannot be rebound, if it was provisioned; None once it is deleted."""
        return await self._rebinder.drop_volume(request, kept)

    async def give_back(self, request: RestoreRequest) -> Pending | None:
        """Give the existing volume of an unfinished restore back to its PVC; None once that is done."""
        return await self._rebinder.give_back(request)

    async def withdraw(self, request: RestoreRequest, interruption: Interruption) -> Pending | None:
        """Delete the mover pod and, unless only the mover ended, its cache."""
        return await withdraw_mover(self._client, request.owner, interruption, claim=cache_claim_name(request.owner))

    async def clean_up(self, request: RestoreRequest) -> Pending | None:
        """Delete the expose objects; None once nothing is left. A rebound volume stays."""
        owner = request.owner
        pending = await delete_owned(self._client, owner, PODS, owner.name)
        pending = pending or await delete_claim(self._client, owner, owner.name)
        pending = pending or await delete_claim(self._client, owner, cache_claim_name(owner))
        pending = pending or await self._copies.delete(request.copies)
        return pending or await delete_base(self._client, request)

    async def _ensure_all(self, request: RestoreRequest, run: ExposeRun) -> Pod | Pending:
        target = await self._read_target(request, self._client)
        if isinstance(target, Pending):
            return target
        placement = await self._place(request, target, self._client)
        if isinstance(placement, Pending):
            return placement
        if pending := await self._copies.ensure(run, request.copies):
            return pending
        claim = await self._ensure_claim(request, run, target, node=placement.node)
        if isinstance(claim, Pending):
            return claim
        if request.owner.attempt > 1 and claim["spec"].get("volumeName"):
            # The volume is there: the scheduler knows which nodes can reach it, if the consumer's node is lost.
            placement = replace(placement, node="")
        elif placement.node:
            # The consumer's node may have changed since the PVC was created for the previous one.
            selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, "")
            placement = replace(placement, node=selected or placement.node)
        cache = await self._caches.ensure(run, request.owner, cache=request.cache, node=placement.node)
        if isinstance(cache, Pending):
            return cache
        storage = await read_storage_access(self._client, request.owner.namespace, request.location)
        if placement.node or request.volume:
            placement = replace(placement, tolerations=await self._read_tolerations(request))
        manifest = build_restore_pod(
            request, claim_volume_mode(target), placement=placement, storage=storage, cache=cache
        )
        return await run.ensure(PODS, manifest)

    async def _ensure_claim(
        self, request: RestoreRequest, run: ExposeRun, target: PersistentVolumeClaim, *, node: str
    ) -> PersistentVolumeClaim | Pending:
        """Return the restore PVC; an existing volume is taken for it first."""
        existing = await self._check_existing(request, target, self._client)
        if isinstance(existing, Pending):
            return existing
        if existing is not None:
            existing = await ensure_taken(self._client, run, request=request, volume=existing)
        excluded = request.settings.excluded_metadata
        manifest = build_restore_claim(request.owner, target, node=node, excluded=excluded, volume=existing)
        return await run.ensure(PERSISTENT_VOLUME_CLAIMS, manifest)

    async def _read_tolerations(self, request: RestoreRequest) -> tuple[PodToleration, ...]:
        """Return the tolerations of the target's consumer: the scheduler chose the node by them.

        A user who edits the PVC can name another node, but gets a mover no further than a pod.
        """
        pending = Selection(PODS, request.target_namespace, field_selector="status.phase=Pending")
        return tolerations_of_consumers(await self._client.list(pending), request.target_claim)

    async def _check_existing(
        self, request: RestoreRequest, target: PersistentVolumeClaim, reader: Reader
    ) -> PersistentVolume | Pending | None:
        """Return the existing volume that is restored into; None: a new one is."""
        return await check_existing(request, target=target, reader=reader) if request.volume else None

    async def _read_target(self, request: RestoreRequest, reader: Reader) -> PersistentVolumeClaim | Pending:
        """Return the target PVC, which has no volume yet but the existing one that is restored into.

        Raises:
            ExposeError: it is bound.
        """
        namespace, name = request.target_namespace, request.target_claim
        place = f"target PVC {namespace}/{name}"
        target = await reader.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None:
            return Pending(PendingReason.TARGET_CLAIM_ABSENT, f"{place} does not exist yet")
        if target["metadata"].get("deletionTimestamp"):
            return Pending(PendingReason.TARGET_CLAIM_ABSENT, f"{place} is being deleted")
        if (volume := target["spec"].get("volumeName")) and volume != request.volume:
            raise ExposeError(f"cannot restore into {place}: it is already bound to PersistentVolume {volume}")
        return target

    async def _place(
        self, request: RestoreRequest, target: PersistentVolumeClaim, reader: Reader
    ) -> Placement | Pending:
        """Return the nodes for the volume and its mover, once they are known.

        With late binding, the consumer's node is the only one; otherwise the rules apply. To an existing volume the
        scheduler adds the nodes that can reach it.

        Raises:
            ExposeError: the StorageClass of the target PVC does not exist, or the volume requires a Windows node.
        """
        if request.for_windows:
            # Velero's agent accepted it.
            raise ExposeError(WINDOWS_ONLY)
        class_name = target["spec"].get("storageClassName") or ""
        if class_name and not request.volume and not request.settings.ignore_delay_binding:
            place = f"target PVC {request.target_namespace}/{request.target_claim}"
            storage_class = await reader.read(STORAGE_CLASSES, "", class_name)
            if storage_class is None:
                raise ExposeError(f"StorageClass {class_name} of {place} does not exist")
            if binds_late(storage_class):
                node = str((target["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, ""))
                if node:
                    return Placement(node=node)
                return Pending(PendingReason.TARGET_CLAIM_UNCONSUMED, f"{place} is not used by a pod yet")
        return Placement(alternatives=request.settings.nodes.choose(class_name))
