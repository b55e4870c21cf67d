"""PersistentVolumes of exposes: whether they were provisioned for them, reclaim policies, deletion with their PVCs.

Kubernetes binds a PVC to any Available volume that matches class, size and mode, whatever its data
source: a static volume, or a released one that was made Available again.
Source: Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go (FindMatchingVolume),
pkg/controller/volume/persistentvolume/pv_controller.go (syncUnboundClaim).
"""

from contextlib import suppress
from typing import Final

from core.kube.client import KubeClient, Selection
from core.kube.errors import NotFoundError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, STORAGE_CLASSES, VOLUME_ATTACHMENTS
from core.kube.types import Manifest, PersistentVolume, PersistentVolumeClaim
from core.models.attempts import Interruption
from core.models.names import (
    IN_PLACE_CLAIM_ANNOTATION,
    IN_PLACE_LABEL,
    OWNER_UID_LABEL,
    RECLAIM_POLICY_ANNOTATION,
    RELEASED_CLAIM_ANNOTATION,
)
from core.models.reasons import PendingReason
from exposer.model import Owner, Pending, Reader
from exposer.ownership import belongs, delete_object, delete_owned, describe_object

__all__ = [
    "BOUND_BY_CONTROLLER",
    "DELETE",
    "RETAIN",
    "attached_nodes",
    "delete_claim",
    "delete_with_volume",
    "explain_deletion",
    "is_being_provisioned",
    "is_provisioned",
    "original_policy",
    "restore_reclaim_policy",
    "retain_for",
    "set_reclaim_policy",
    "withdraw_mover",
    "without_marks",
]


DELETE = "Delete"


RETAIN = "Retain"


_PROVISIONER_ANNOTATIONS: Final = frozenset(
    {"volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner"}
)


_LABELS: Final = (OWNER_UID_LABEL, IN_PLACE_LABEL)
_ANNOTATIONS: Final = (IN_PLACE_CLAIM_ANNOTATION, RECLAIM_POLICY_ANNOTATION, RELEASED_CLAIM_ANNOTATION)
"""Ours on a volume while a transfer owns it."""


_PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"
BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"


def is_provisioned(volume: PersistentVolume) -> bool:
    """Return whether `volume` was created for the PVC that it refers to, and did not exist before.

    A provisioner names a volume after the UID of the PVC, unless it is configured to use a part of it.
    It also creates the volume with its reference; a volume that gets the reference later is annotated
    in the same write, except one that already referred to a PVC of that name.
    Source: sig-storage-lib-external-provisioner v11, controller/controller.go (provisionClaimOperation);
    external-provisioner v5, pkg/controller/controller.go (makeVolumeName); Kubernetes v1.34,
    component-helpers/storage/volume/pv_helpers.go (GetBindVolumeToClaim).
    """
    meta, uid = volume["metadata"], (volume["spec"].get("claimRef") or {}).get("uid")
    if not uid or IN_PLACE_LABEL in (meta.get("labels") or {}):
        return False
    annotations = meta.get("annotations") or {}
    return uid in meta["name"] or (_PROVISIONED_BY in annotations and BOUND_BY_CONTROLLER not in annotations)


async def attached_nodes(reader: Reader, volume: str) -> tuple[str, ...]:
    """Return the nodes to which the PersistentVolume of that name is attached, or being detached from, in their order.

    A VolumeAttachment cannot be selected by its volume, so all of them are listed.
    """
    specs = [attachment["spec"] for attachment in await reader.list(Selection(VOLUME_ATTACHMENTS))]
    return tuple(sorted({s["nodeName"] for s in specs if s["source"].get("persistentVolumeName") == volume}))


async def set_reclaim_policy(client: KubeClient, volume: PersistentVolume, policy: str) -> PersistentVolume:
    """Return `volume` with that reclaim policy."""
    if volume["spec"].get("persistentVolumeReclaimPolicy") == policy:
        return volume
    return await client.patch_if_unchanged(
        PERSISTENT_VOLUMES, volume, {"spec": {"persistentVolumeReclaimPolicy": policy}}
    )


async def retain_for(client: KubeClient, volume: PersistentVolume, labels: dict[str, str]) -> PersistentVolume:
    """Return `volume` with reclaim policy Retain and `labels`."""
    present = volume["metadata"].get("labels") or {}
    if volume["spec"].get("persistentVolumeReclaimPolicy") == RETAIN and present.items() >= labels.items():
        return volume
    patch: Manifest = {"metadata": {"labels": labels}, "spec": {"persistentVolumeReclaimPolicy": RETAIN}}
    return await client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)


async def restore_reclaim_policy(client: KubeClient, volume: PersistentVolume, policy: str) -> PersistentVolume:
    """Return `volume` with its original reclaim policy and without our marks: no transfer owns it any more."""
    patch = without_marks(volume, policy)
    if patch["metadata"] or volume["spec"].get("persistentVolumeReclaimPolicy") != policy:
        return await client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)
    return volume


def original_policy(volume: PersistentVolume) -> str:
    """Return the reclaim policy that the volume had before it was retained for a restore in place."""
    recorded = (volume["metadata"].get("annotations") or {}).get(RECLAIM_POLICY_ANNOTATION)
    return recorded or volume["spec"].get("persistentVolumeReclaimPolicy", RETAIN)


def without_marks(volume: PersistentVolume, policy: str = "") -> Manifest:
    """Return the patch that removes our labels and annotations, and restores the reclaim policy.

    `policy`: the one that is recorded elsewhere; empty: the one that the volume itself records, or has.
    """
    meta = volume["metadata"]
    found = {
        "labels": {key: None for key in _LABELS if key in (meta.get("labels") or {})},
        "annotations": {key: None for key in _ANNOTATIONS if key in (meta.get("annotations") or {})},
    }
    marks = {field: keys for field, keys in found.items() if keys}
    return {"metadata": marks, "spec": {"persistentVolumeReclaimPolicy": policy or original_policy(volume)}}


async def withdraw_mover(
    client: KubeClient, owner: Owner, interruption: Interruption, *, claim: str, forced: bool = False
) -> Pending | None:
    """Delete what an interrupted attempt leaves: its mover pod and, unless only the mover ended, the PVC `claim`.

    The node of that pod may be the only one that reaches the volume of the PVC. `forced`: as for `delete_owned`, of the
    pod. None once both are gone.
    """
    if pending := await delete_owned(client, owner, PODS, owner.name, forced=forced):
        return pending
    return None if interruption.in_place else await delete_claim(client, owner, claim)


async def delete_with_volume(client: KubeClient, claim: PersistentVolumeClaim) -> Pending | None:
    """Delete `claim`, as it was just read, and have its volume reclaimed, whatever its class specifies.

    A claim that is still being provisioned is waited for if its class retains volumes: the volume would
    be created without it, and nothing would name it. A volume that is bound to another PVC, or that was
    not provisioned for this one, is left alone.
    """
    name = claim["spec"].get("volumeName")
    if await is_being_provisioned(client, claim):
        place = describe_object(PERSISTENT_VOLUME_CLAIMS, claim)
        return Pending(PendingReason.CLEANING_UP, f"{place} is being provisioned, will be deleted with its volume")
    volume = await client.read(PERSISTENT_VOLUMES, "", name) if name else None
    claimed = volume is not None and (volume["spec"].get("claimRef") or {}).get("uid") == claim["metadata"]["uid"]
    if volume is not None and claimed and is_provisioned(volume):
        with suppress(NotFoundError):
            await set_reclaim_policy(client, volume, DELETE)
    # Its provisioning may have begun since it was read.
    return await delete_object(client, PERSISTENT_VOLUME_CLAIMS, claim, unchanged=not name)


def explain_deletion(volume: PersistentVolume) -> str:
    """Return why a PersistentVolume could not be deleted, to be appended to a text; empty: it does not say.

    Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go (reclaimVolume).
    """
    error = " ".join(str((volume.get("status") or {}).get("message") or "").split())
    return f": {error}" if error else ""


async def is_being_provisioned(client: KubeClient, claim: PersistentVolumeClaim) -> bool:
    """Return whether a provisioner may create a volume for `claim` that would be retained.

    The volume controller names the provisioner when it asks for a volume, not before.
    Source: Kubernetes v1.34, pkg/controller/volume/persistentvolume/pv_controller.go
    (provisionClaimOperationExternal).
    """
    annotations = claim["metadata"].get("annotations") or {}
    if claim["spec"].get("volumeName") or not annotations.keys() & _PROVISIONER_ANNOTATIONS:
        return False
    class_name = claim["spec"].get("storageClassName") or ""
    found = await client.read(STORAGE_CLASSES, "", class_name) if class_name else None
    return found is not None and found.get("reclaimPolicy", DELETE) != DELETE


async def delete_claim(client: KubeClient, owner: Owner, name: str) -> Pending | None:
    """Delete the owner's PVC of that name with its volume; None once there is no such PVC."""
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, name)
    if claim is None or not belongs(claim, owner):
        return None
    return await delete_with_volume(client, claim)
