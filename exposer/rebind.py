"""Rebind: binding a restored volume to the target PVC.

Each step checks whether it is still to be done. The steps: set reclaim policy Retain (with our owner
label, so that garbage collection finds a provisioned volume if its transfer is deleted before it is
bound), delete the pod, wait until the volume is detached, delete its PVC, point the volume at the
target PVC (with those labels that the target PVC selects by and the volume lacks), point the target
PVC at the volume, wait until they are bound, restore the reclaim policy and remove the label.
Source: Velero v1.18, pkg/exposer/generic_restore.go (the order, and the labels of the target's
selector), and main at d2241adba (the detachment); Kubernetes v1.34,
pkg/controller/volume/persistentvolume/pv_controller.go (when a volume and a PVC are bound).
"""

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.kube.types import Manifest, PersistentVolume, PersistentVolumeClaim
from core.models.reasons import PendingReason
from exposer.in_place import give_back, is_released, is_taken_by
from exposer.model import KeptVolume, Owner, Pending, RestoreRequest
from exposer.ownership import delete_owned
from exposer.volumes import (
    BOUND_BY_CONTROLLER,
    DELETE,
    attached_nodes,
    explain_deletion,
    restore_reclaim_policy,
    retain_for,
    set_reclaim_policy,
)

__all__ = ["Rebinder"]


class Rebinder:
    """Moves one PersistentVolume from the restore PVC to the target PVC."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Take the next steps; None once the target PVC is bound to the volume.

        Raises:
            ExposeError: target PVC or volume were deleted, or the target PVC has another volume.
            KubeError: the API server rejected a request.
        """
        target = await self._read_target(request, kept)
        volume = await self._client.read(PERSISTENT_VOLUMES, "", kept.pv_name)
        if volume is None or volume["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"PersistentVolume {kept.pv_name} with the restored data was deleted")
        try:
            return await self._rebind(request, kept, target=target, volume=volume)
        except NotFoundError as e:
            raise ExposeError(f"cannot bind the restored volume to the target PVC: {e}") from e

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete a volume that cannot be rebound; None once it is deleted.

        A volume that the target PVC points at is kept for it. One that was not provisioned for the restore is
        released, with the reclaim policy that it came with.
        """
        volume = await self._client.read(PERSISTENT_VOLUMES, "", kept.pv_name)
        if volume is None:
            return None
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, request.target_namespace, request.target_claim)
        if target is not None and target["spec"].get("volumeName") == kept.pv_name:
            await restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
            return None
        if not _owned_by_restore(request, volume):
            return None
        message = f"PersistentVolume {kept.pv_name} is being deleted{explain_deletion(volume)}"
        pending = Pending(PendingReason.CLEANING_UP, message)
        try:
            if kept.provisioned:
                volume = await set_reclaim_policy(self._client, volume, DELETE)
            else:
                volume = await restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
            deleting = await self._delete_pod_and_claim(request.owner)
            if deleting:
                return deleting
            if not volume["spec"].get("claimRef") or (target is not None and _claimed_by(volume, target)):
                await self._release(request.owner, volume)
        except NotFoundError:
            return None
        return pending if kept.provisioned else None

    async def give_back(self, request: RestoreRequest) -> Pending | None:
        """Give the existing volume of an unfinished restore back to its PVC; None once that is done.

        Also one that was not taken yet, if it was released for this restore.
        """
        volume = await self._client.read(PERSISTENT_VOLUMES, "", request.volume)
        if volume is not None and is_taken_by(volume, request.owner):
            pending = await self._delete_pod_and_claim(request.owner, attached=request.volume)
            if pending:
                return pending
            volume = await self._client.read(PERSISTENT_VOLUMES, "", request.volume)
        if volume is None:
            return None
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, request.target_namespace, request.target_claim)
        if is_taken_by(volume, request.owner) or is_released(volume, request, target):
            await give_back(self._client, volume, namespace=request.target_namespace, name=request.target_claim)
        return None

    async def _rebind(
        self, request: RestoreRequest, kept: KeptVolume, *, target: PersistentVolumeClaim, volume: PersistentVolume
    ) -> Pending | None:
        if not _claimed_by(volume, target):
            if not _owned_by_restore(request, volume):
                owner = "belongs to another PersistentVolumeClaim" if volume["spec"].get("claimRef") else "was freed"
                raise ExposeError(f"PersistentVolume {kept.pv_name} with the restored data {owner}")
            # The label lets garbage collection delete it.
            labels = request.owner.labels if kept.provisioned else {}
            volume = await retain_for(self._client, volume, labels)
            pending = await self._delete_pod_and_claim(request.owner, attached=kept.pv_name)
            if pending:
                return pending
            # Read again: its controller has recorded meanwhile that the PVC was deleted.
            volume = await self._client.get(PERSISTENT_VOLUMES, "", kept.pv_name)
            await self._point_volume(volume, target)
            # Its controller is to see that first. If it sees the PVC point at a volume that is another PVC's, it looks
            # at the PVC again only 15 seconds later.
            return _binding(request, kept)
        if not target["spec"].get("volumeName"):
            target = await self._point_target(target, kept)
        if not _bound(volume, target):
            return _binding(request, kept)
        await restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
        return None

    async def _release(self, owner: Owner, volume: PersistentVolume) -> None:
        """Point the volume at a deleted PVC, so that its controller reclaims it.

        Deleting only the volume object is not enough: a provisioner acts once the volume is Released.
        Source: sig-storage-lib-external-provisioner v11, controller/controller.go.
        """
        reference = {"namespace": owner.namespace, "name": owner.name, "uid": owner.uid, "resourceVersion": None}
        claim = {"apiVersion": "v1", "kind": PERSISTENT_VOLUME_CLAIMS.kind} | reference
        await self._client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, {"spec": {"claimRef": claim}})

    async def _delete_pod_and_claim(self, owner: Owner, *, attached: str = "") -> Pending | None:
        """Delete both, the PVC once the PersistentVolume `attached` is on no node; None once they are gone."""
        pending = await delete_owned(self._client, owner, PODS, owner.name)
        if pending is None and attached and (nodes := await attached_nodes(self._client, attached)):
            text = f"PersistentVolume {attached} is being detached from node {', '.join(nodes)}"
            return Pending(PendingReason.DETACHING, text)
        return pending or await delete_owned(self._client, owner, PERSISTENT_VOLUME_CLAIMS, owner.name)

    async def _read_target(self, request: RestoreRequest, kept: KeptVolume) -> PersistentVolumeClaim:
        namespace, name = request.target_namespace, request.target_claim
        place = f"target PVC {namespace}/{name}"
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None or target["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"{place} was deleted")
        other = target["spec"].get("volumeName") or kept.pv_name
        if other != kept.pv_name:
            raise ExposeError(f"{place} was bound to PersistentVolume {other} meanwhile")
        if (target.get("status") or {}).get("phase") == "Lost":
            raise ExposeError(f"{place} has phase Lost")
        return target

    async def _point_volume(self, volume: PersistentVolume, target: PersistentVolumeClaim) -> PersistentVolume:
        meta = target["metadata"]
        selected = (target["spec"].get("selector") or {}).get("matchLabels") or {}
        present = volume["metadata"].get("labels") or {}
        labels = {key: value for key, value in selected.items() if key not in present}
        patch: Manifest = {
            "metadata": {"labels": labels, "annotations": {BOUND_BY_CONTROLLER: None}},
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
        return await self._client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)

    async def _point_target(self, target: PersistentVolumeClaim, kept: KeptVolume) -> PersistentVolumeClaim:
        change: Manifest = {"spec": {"volumeName": kept.pv_name}}
        return await self._client.patch_if_unchanged(PERSISTENT_VOLUME_CLAIMS, target, change)


def _binding(request: RestoreRequest, kept: KeptVolume) -> Pending:
    place = f"{request.target_namespace}/{request.target_claim}"
    return Pending(PendingReason.BINDING, f"target PVC {place} is being bound to PersistentVolume {kept.pv_name}")


def _owned_by_restore(request: RestoreRequest, volume: PersistentVolume) -> bool:
    """Return whether the volume is bound to the restore PVC, reserved for the target PVC, or unbound with our label.

    An unbound volume without the label was freed by an administrator.
    """
    reference = volume["spec"].get("claimRef") or {}
    if not reference:
        return request.owner.labels.items() <= (volume["metadata"].get("labels") or {}).items()
    claims = (
        (request.owner.namespace, request.owner.name),
        (request.target_namespace, request.target_claim),
    )
    return (reference.get("namespace"), reference.get("name")) in claims


def _claimed_by(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    reference = volume["spec"].get("claimRef") or {}
    return bool(reference.get("uid") == claim["metadata"]["uid"])


def _bound(volume: PersistentVolume, target: PersistentVolumeClaim) -> bool:
    """Return whether the controller has bound volume and PVC."""
    phases = {(volume.get("status") or {}).get("phase"), (target.get("status") or {}).get("phase")}
    return phases == {"Bound"} and target["spec"].get("volumeName") == volume["metadata"]["name"]
