"""PersistentVolumes of exposes: reclaim policies, deletion with their PVCs, and cache PVCs.

A restore without a cache volume keeps its cache on the node: a cache volume only saves time and
space there, and no restore fails for want of one.
Source: Velero v1.18, pkg/exposer/cache_volume.go and validateCachePVCConfig in
pkg/cmd/cli/nodeagent/server.go.
"""

import logging

from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, STORAGE_CLASSES
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.claims import build_cache_claim, cache_claim_name
from exposer.model import Owner, Pending
from exposer.ownership import ExposeRun, belongs, delete_object
from exposer.settings import CacheVolume

__all__ = [
    "DELETE",
    "RETAIN",
    "CacheClaims",
    "delete_claim",
    "patch_volume",
    "reclaim_with_claim",
    "restore_reclaim_policy",
    "retain_for",
    "set_reclaim_policy",
]


_log = logging.getLogger(__name__)


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


class CacheClaims:
    """The cache PVCs of restores."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, run: ExposeRun, owner: Owner, *, cache: CacheVolume | None, node: str) -> str | Pending:
        """Return the name of the owner's cache PVC, created where needed; empty where there is none.

        `node`: where the cache must be reachable; empty: anywhere.

        Raises:
            ExposeError: another PVC has the name.
            NotOwnerError: from the run's guard; nothing was created.
        """
        if cache is None:
            return ""
        problem = await self._problem_of(cache)
        if problem:
            extra = fields(kind=owner.kind, namespace=owner.namespace, name=owner.name, reason=problem)
            _log.warning("cannot create a cache volume, using the node's disk for the cache", extra=extra)
            return ""
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, build_cache_claim(owner, cache, node=node))
        return claim if isinstance(claim, Pending) else cache_claim_name(owner)

    async def _problem_of(self, cache: CacheVolume) -> str:
        """Return why the class cannot be used for a cache volume; empty where it can."""
        if not cache.storage_class:
            return "cachePVC has no storageClass"
        found = await self._client.read(STORAGE_CLASSES, "", cache.storage_class)
        if found is None:
            return f"StorageClass {cache.storage_class} does not exist"
        policy = found.get("reclaimPolicy") or DELETE
        if policy != DELETE:
            return f"StorageClass {cache.storage_class} has reclaimPolicy {policy}: cache volumes would not be deleted"
        return ""
