"""Gives a restored volume to the claim that waits for it.

Knows the steps of a rebind, each of which finds out by itself whether it is still to do.
Does not know how the volume was made or filled.

The steps: reclaim policy to Retain (with our owner label, so that a volume whose load vanishes
before it is the target's is found by the sweeper), delete the pod, delete the claim it used, point the
volume at the target claim (with the labels that claim selects by), point the target claim at
the volume, wait until they are bound, put the reclaim policy back and take the label off.
Source: Velero v1.18, pkg/exposer/generic_restore.go (the order, and the labels of the target's
selector); Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go (when a
volume and a claim are bound).
"""

from typing import Final

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.model import KeptVolume, Owner, Pending, RestoreRequest
from exposer.ownership import remove_owned
from exposer.volumes import DELETE, hand_out, keep_for, patch_volume, set_reclaim_policy

__all__ = ["Rebinder"]

_BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"


class Rebinder:
    """Moves one PersistentVolume from the restore's claim to the target claim."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Take the next steps; None once the target claim is bound to the volume.

        Raises:
            ExposeError: the target is gone or has another volume, or the volume is gone.
            KubeError: the API server refused.
        """
        target = await self._read_target(request, kept)
        volume = await self._client.read(PERSISTENT_VOLUMES, "", kept.pv_name)
        if volume is None or volume["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"PersistentVolume {kept.pv_name} with the restored data is gone")
        try:
            return await self._rebind(request, kept, target=target, volume=volume)
        except NotFoundError as e:
            raise ExposeError(f"the restored volume cannot be handed over: {e}") from e

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete the volume that cannot be handed over; None once it is gone.

        A volume that the target claim points at is left to it.
        """
        volume = await self._client.read(PERSISTENT_VOLUMES, "", kept.pv_name)
        if volume is None:
            return None
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, request.target_namespace, request.target_claim)
        if target is not None and target["spec"].get("volumeName") == kept.pv_name:
            await hand_out(self._client, volume, kept.reclaim_policy)
            return None
        if not _in_our_hands(request, volume):
            return None
        waiting = Pending(PendingReason.CLEANING_UP, f"PersistentVolume {kept.pv_name} is being deleted")
        try:
            volume = await set_reclaim_policy(self._client, volume, DELETE)
            left = await self._remove_pod_and_claim(request.owner)
            if left:
                return left
            if not volume["spec"].get("claimRef") or (target is not None and _claimed_by(volume, target)):
                await self._release(request.owner, volume)
        except NotFoundError:
            return None
        return waiting

    async def _rebind(
        self, request: RestoreRequest, kept: KeptVolume, *, target: JsonDict, volume: JsonDict
    ) -> Pending | None:
        if not _claimed_by(volume, target):
            if not _in_our_hands(request, volume):
                raise ExposeError(f"PersistentVolume {kept.pv_name} with the restored data belongs to another claim")
            volume = await keep_for(self._client, volume, request.owner)
            waiting = await self._remove_pod_and_claim(request.owner)
            if waiting:
                return waiting
            # Read anew: its controller has noted meanwhile that the claim is gone.
            volume = await self._client.get(PERSISTENT_VOLUMES, "", kept.pv_name)
            volume = await self._point_volume(volume, target)
        if not target["spec"].get("volumeName"):
            target = await self._point_target(target, kept)
        if not _bound(volume, target):
            place = f"{request.target_namespace}/{request.target_claim}"
            return Pending(
                PendingReason.BINDING, f"target claim {place} is being bound to PersistentVolume {kept.pv_name}"
            )
        await hand_out(self._client, volume, kept.reclaim_policy)
        return None

    async def _release(self, owner: Owner, volume: JsonDict) -> None:
        """Point the volume at a claim that is gone: its controller reclaims it for that.

        A volume that was just deleted would stay: a provisioner waits until it is Released.
        Source: sig-storage-lib-external-provisioner v11, controller/controller.go.
        """
        reference = {"namespace": owner.namespace, "name": owner.name, "uid": owner.uid, "resourceVersion": None}
        claim = {"apiVersion": "v1", "kind": PERSISTENT_VOLUME_CLAIMS.kind} | reference
        await patch_volume(self._client, volume, {"spec": {"claimRef": claim}})

    async def _remove_pod_and_claim(self, owner: Owner) -> Pending | None:
        waiting = await remove_owned(self._client, owner, PODS, owner.name)
        return waiting or await remove_owned(self._client, owner, PERSISTENT_VOLUME_CLAIMS, owner.name)

    async def _read_target(self, request: RestoreRequest, kept: KeptVolume) -> JsonDict:
        namespace, name = request.target_namespace, request.target_claim
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None or target["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"target claim {namespace}/{name} is gone")
        other = target["spec"].get("volumeName") or kept.pv_name
        if other != kept.pv_name:
            raise ExposeError(f"target claim {namespace}/{name} was bound to PersistentVolume {other} meanwhile")
        if (target.get("status") or {}).get("phase") == "Lost":
            raise ExposeError(f"target claim {namespace}/{name} has lost its volume")
        return target

    async def _point_volume(self, volume: JsonDict, target: JsonDict) -> JsonDict:
        meta = target["metadata"]
        labels = (target["spec"].get("selector") or {}).get("matchLabels") or {}
        patch: JsonDict = {
            "metadata": {"labels": labels, "annotations": {_BOUND_BY_CONTROLLER: None}},
            "spec": {
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": PERSISTENT_VOLUME_CLAIMS.kind,
                    "namespace": meta["namespace"],
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "resourceVersion": None,
                }
            },
        }
        return await patch_volume(self._client, volume, patch)

    async def _point_target(self, target: JsonDict, kept: KeptVolume) -> JsonDict:
        meta = target["metadata"]
        patch: JsonDict = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "spec": {"volumeName": kept.pv_name},
        }
        return await self._client.patch(PERSISTENT_VOLUME_CLAIMS, meta["namespace"], meta["name"], patch)


def _in_our_hands(request: RestoreRequest, volume: JsonDict) -> bool:
    """Whether the volume was the restore's or is meant for the target, and nobody else's."""
    reference = volume["spec"].get("claimRef") or {}
    ours = (
        (request.owner.namespace, request.owner.name),
        (request.target_namespace, request.target_claim),
    )
    return not reference or (reference.get("namespace"), reference.get("name")) in ours


def _claimed_by(volume: JsonDict, claim: JsonDict) -> bool:
    reference = volume["spec"].get("claimRef") or {}
    return bool(reference.get("uid") == claim["metadata"]["uid"])


def _bound(volume: JsonDict, target: JsonDict) -> bool:
    """Whether the controller has bound both sides."""
    phases = {(volume.get("status") or {}).get("phase"), (target.get("status") or {}).get("phase")}
    return phases == {"Bound"} and target["spec"].get("volumeName") == volume["metadata"]["name"]
