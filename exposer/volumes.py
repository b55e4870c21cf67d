"""PersistentVolumes of exposes: reclaim policies, and deletion with their PVCs."""

from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.model import Owner, Pending
from exposer.ownership import belongs, delete_object

__all__ = [
    "DELETE",
    "RETAIN",
    "delete_claim",
    "patch_volume",
    "reclaim_with_claim",
    "restore_reclaim_policy",
    "retain_for",
    "set_reclaim_policy",
]


DELETE = "Delete"


RETAIN = "Retain"


async def patch_volume(client: KubeClient, volume: JsonDict, patch: JsonDict) -> JsonDict:
    """Apply `patch` to `volume` as it was just read; UID and resourceVersion are preconditions.

    Raises:
        ConflictError: it was changed meanwhile; read it again.
        NotFoundError: it does not exist.
    """
    meta = volume["metadata"]
    preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    return await client.patch(
        PERSISTENT_VOLUMES, "", meta["name"], patch | {"metadata": patch.get("metadata", {}) | preconditions}
    )


async def set_reclaim_policy(client: KubeClient, volume: JsonDict, policy: str) -> JsonDict:
    """Return `volume` with that reclaim policy."""
    if volume["spec"].get("persistentVolumeReclaimPolicy") == policy:
        return volume
    return await patch_volume(client, volume, {"spec": {"persistentVolumeReclaimPolicy": policy}})


async def retain_for(client: KubeClient, volume: JsonDict, owner: Owner) -> JsonDict:
    """Return `volume` with reclaim policy Retain, and labeled as being rebound for `owner`."""
    labels = volume["metadata"].get("labels") or {}
    if volume["spec"].get("persistentVolumeReclaimPolicy") == RETAIN and labels.items() >= owner.labels.items():
        return volume
    patch: JsonDict = {"metadata": {"labels": owner.labels}, "spec": {"persistentVolumeReclaimPolicy": RETAIN}}
    return await patch_volume(client, volume, patch)


async def restore_reclaim_policy(client: KubeClient, volume: JsonDict, policy: str) -> None:
    """Set the original reclaim policy of `volume` and remove the owner label: no transfer owns it any more."""
    labeled = OWNER_UID_LABEL in (volume["metadata"].get("labels") or {})
    if labeled or volume["spec"].get("persistentVolumeReclaimPolicy") != policy:
        labels: JsonDict = {"labels": {OWNER_UID_LABEL: None}} if labeled else {}
        patch: JsonDict = {"metadata": labels, "spec": {"persistentVolumeReclaimPolicy": policy}}
        await patch_volume(client, volume, patch)


async def reclaim_with_claim(client: KubeClient, claim: JsonDict) -> None:
    """Set reclaim policy Delete on the volume of `claim`, whatever its class specifies.

    A volume that is bound to another PVC is left alone.
    """
    name = claim["spec"].get("volumeName")
    volume = await client.read(PERSISTENT_VOLUMES, "", name) if name else None
    if volume is None or (volume["spec"].get("claimRef") or {}).get("uid") != claim["metadata"]["uid"]:
        return
    try:
        await set_reclaim_policy(client, volume, DELETE)
    except NotFoundError:
        return


async def delete_claim(client: KubeClient, owner: Owner, name: str) -> Pending | None:
    """Delete the owner's PVC of that name with its volume; None once there is no such PVC."""
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, name)
    if claim is None or not belongs(claim, owner):
        return None
    await reclaim_with_claim(client, claim)
    return await delete_object(client, PERSISTENT_VOLUME_CLAIMS, claim)
