"""Exposes a new volume for a restore: a DataDownload's data gets a place to go.

Knows the order of the steps and what each waits for. Does not know how the volume is given
to the target claim afterwards (`exposer.rebind`), what the objects look like
(`exposer.claims`, `exposer.pods`), or who owns the DataDownload.
"""

from dataclasses import replace

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
)
from core.models.base import JsonDict
from core.models.names import SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer.causes import CauseFinder
from exposer.claims import build_restore_claim, cache_claim_name, claim_volume_mode
from exposer.model import Exposed, Guard, KeptVolume, Pending, Reader, RestoreRequest
from exposer.ownership import ExposeRun, belongs, remove_owned
from exposer.placement import Placement
from exposer.pods import build_restore_pod
from exposer.rebind import Rebinder
from exposer.source_volume import waits_for_consumer
from exposer.volumes import CacheClaims, remove_claim

__all__ = ["GenericRestoreExposer"]


class GenericRestoreExposer:
    """The `RestoreExposer` of DataDownloads."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client = client
        self._causes = causes
        self._caches = CacheClaims(client)
        self._rebinder = Rebinder(client)

    async def check(self, request: RestoreRequest, reader: Reader) -> Pending | None:
        """Say what the expose still has to wait for; reads only.

        Raises:
            ExposeError: the target claim has a volume already, or no agent runs on nodes of its system.
            KubeError: the API server refused a read.
        """
        request.settings.template.for_os(request.node_os)
        target = await self._read_target(request, reader)
        if isinstance(target, Pending):
            return target
        placement = await self._place(request, target, reader)
        return placement if isinstance(placement, Pending) else None

    async def ensure(self, request: RestoreRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or what has to be waited for.

        Raises:
            ExposeError: it can never be done.
            NotOwnerError: the DataDownload is somebody else's by now.
            KubeError: the API server refused.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is made last: where it exists, all else was made before it.
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run)
            return await self._causes.judge(pod)

    async def read_volume(self, request: RestoreRequest) -> KeptVolume:
        """Return the volume that was written, before anything is done to it.

        Raises:
            ExposeError: claim or volume are gone.
        """
        owner = request.owner
        claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
        if claim is None or not belongs(claim, owner):
            raise ExposeError(f"claim {owner.namespace}/{owner.name} with the restored data is gone")
        name = claim["spec"].get("volumeName", "")
        volume = await self._client.read(PERSISTENT_VOLUMES, "", name) if name else None
        if volume is None:
            raise ExposeError(f"claim {owner.namespace}/{owner.name} with the restored data has lost its volume")
        return KeptVolume(name, volume["spec"].get("persistentVolumeReclaimPolicy", "Retain"))

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Give the volume to the target claim; None once it is bound.

        Raises:
            ExposeError: that can never be; call `drop_volume`.
        """
        return await self._rebinder.rebind(request, kept)

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete the volume that cannot be handed over; None once it is gone."""
        return await self._rebinder.drop_volume(request, kept)

    async def clean_up(self, request: RestoreRequest) -> Pending | None:
        """Delete what was made; None once nothing is left. A handed-over volume stays."""
        owner = request.owner
        waiting = await remove_owned(self._client, owner, PODS, owner.name)
        waiting = waiting or await remove_claim(self._client, owner, owner.name)
        return waiting or await remove_claim(self._client, owner, cache_claim_name(owner))

    async def _ensure_all(self, request: RestoreRequest, run: ExposeRun) -> JsonDict | Pending:
        target = await self._read_target(request, self._client)
        if isinstance(target, Pending):
            return target
        placement = await self._place(request, target, self._client)
        if isinstance(placement, Pending):
            return placement
        claim = await run.ensure(
            PERSISTENT_VOLUME_CLAIMS, build_restore_claim(request.owner, target, node=placement.node)
        )
        if isinstance(claim, Pending):
            return claim
        if placement.node:
            # The consumer's node may have changed since the claim was made for the one before it.
            made_for = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, "")
            placement = replace(placement, node=made_for or placement.node)
        cache = await self._caches.ensure(run, request.owner, cache=request.cache, node=placement.node)
        if isinstance(cache, Pending):
            return cache
        mode = claim_volume_mode(target)
        return await run.ensure(PODS, build_restore_pod(request, mode, placement=placement, cache_claim=cache))

    async def _read_target(self, request: RestoreRequest, reader: Reader) -> JsonDict | Pending:
        """Return the target claim, which has no volume yet.

        Raises:
            ExposeError: it has one.
        """
        namespace, name = request.target_namespace, request.target_claim
        place = f"target claim {namespace}/{name}"
        target = await reader.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None:
            return Pending(PendingReason.TARGET_CLAIM_ABSENT, f"{place} does not exist yet")
        if target["metadata"].get("deletionTimestamp"):
            return Pending(PendingReason.TARGET_CLAIM_ABSENT, f"{place} is being deleted")
        if volume := target["spec"].get("volumeName"):
            raise ExposeError(f"{place} is bound to PersistentVolume {volume} already; nothing can be restored into it")
        return target

    async def _place(self, request: RestoreRequest, target: JsonDict, reader: Reader) -> Placement | Pending:
        """Return where the new volume may be made and filled, once that is settled.

        Where it has to be near its consumer, that decides alone; else the rules do.
        """
        class_name = target["spec"].get("storageClassName") or ""
        if class_name and not request.settings.ignore_delay_binding:
            place = f"target claim {request.target_namespace}/{request.target_claim}"
            storage_class = await reader.read(STORAGE_CLASSES, "", class_name)
            if storage_class is None:
                text = f"StorageClass {class_name} of {place} does not exist"
                return Pending(PendingReason.STORAGE_CLASS_MISSING, text, blocked=True)
            if waits_for_consumer(storage_class):
                node = str((target["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, ""))
                if node:
                    return Placement(request.node_os, node=node)
                return Pending(PendingReason.TARGET_CLAIM_UNCONSUMED, f"{place} waits for the first pod that uses it")
        return Placement(request.node_os, alternatives=request.settings.nodes.choose(class_name))
