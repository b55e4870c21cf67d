"""What exposers do to PersistentVolumes, and to claims together with theirs.

Knows reclaim policies and preconditions. Does not know why a volume is kept or given up.

Makes the claim of a restore's cache, where one is asked for and can be had.

Knows when a restore goes without: a cache only spares time and space on the node, and nothing
fails for it. Does not know how large a cache is or when it pays; its parameter says so.
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
from exposer.ownership import ExposeRun, belongs, remove
from exposer.settings import CacheVolume

__all__ = [
    "DELETE",
    "RETAIN",
    "CacheClaims",
    "condemn_volume_of",
    "hand_out",
    "keep_for",
    "patch_volume",
    "remove_claim",
    "set_reclaim_policy",
]


_log = logging.getLogger(__name__)


DELETE = "Delete"


RETAIN = "Retain"


async def patch_volume(client: KubeClient, volume: JsonDict, patch: JsonDict) -> JsonDict:
    """Apply `patch` to `volume` as it was just read; the UID and version must still hold.

    Raises:
        ConflictError: somebody wrote to it meanwhile; read again.
        NotFoundError: it is gone.
    """
    meta = volume["metadata"]
    held = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    return await client.patch(
        PERSISTENT_VOLUMES, "", meta["name"], patch | {"metadata": patch.get("metadata", {}) | held}
    )


async def set_reclaim_policy(client: KubeClient, volume: JsonDict, policy: str) -> JsonDict:
    """Return `volume` with that reclaim policy."""
    if volume["spec"].get("persistentVolumeReclaimPolicy") == policy:
        return volume
    return await patch_volume(client, volume, {"spec": {"persistentVolumeReclaimPolicy": policy}})


async def keep_for(client: KubeClient, volume: JsonDict, owner: Owner) -> JsonDict:
    """Return `volume` kept whatever becomes of its claim, and marked as one that `owner` hands over."""
    labels = volume["metadata"].get("labels") or {}
    if volume["spec"].get("persistentVolumeReclaimPolicy") == RETAIN and labels.items() >= owner.labels.items():
        return volume
    patch: JsonDict = {"metadata": {"labels": owner.labels}, "spec": {"persistentVolumeReclaimPolicy": RETAIN}}
    return await patch_volume(client, volume, patch)


async def hand_out(client: KubeClient, volume: JsonDict, policy: str) -> None:
    """Give `volume` the reclaim policy that it came with; from then on it is no load's."""
    labelled = OWNER_UID_LABEL in (volume["metadata"].get("labels") or {})
    if labelled or volume["spec"].get("persistentVolumeReclaimPolicy") != policy:
        labels: JsonDict = {"labels": {OWNER_UID_LABEL: None}} if labelled else {}
        patch: JsonDict = {"metadata": labels, "spec": {"persistentVolumeReclaimPolicy": policy}}
        await patch_volume(client, volume, patch)


async def condemn_volume_of(client: KubeClient, claim: JsonDict) -> None:
    """Have the volume of `claim` go with it, whatever its class says about reclaiming.

    A volume that is bound to another claim by now is left alone.
    """
    name = claim["spec"].get("volumeName")
    volume = await client.read(PERSISTENT_VOLUMES, "", name) if name else None
    if volume is None or (volume["spec"].get("claimRef") or {}).get("uid") != claim["metadata"]["uid"]:
        return
    try:
        await set_reclaim_policy(client, volume, DELETE)
    except NotFoundError:
        return


async def remove_claim(client: KubeClient, owner: Owner, name: str) -> Pending | None:
    """Have the owner's claim of that name deleted with its volume; None once it is gone or never was."""
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, name)
    if claim is None or not belongs(claim, owner):
        return None
    await condemn_volume_of(client, claim)
    return await remove(client, PERSISTENT_VOLUME_CLAIMS, claim)


class CacheClaims:
    """The cache claims of restores."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, run: ExposeRun, owner: Owner, *, cache: CacheVolume | None, node: str) -> str | Pending:
        """Return the name of the owner's cache claim, made if need be; empty where there is none.

        `node`: where the cache must be reachable; empty: anywhere.

        Raises:
            ExposeError: the name is taken by somebody else's claim.
            NotOwnerError: from the run's guard; nothing was made.
        """
        if cache is None:
            return ""
        problem = await self._problem_of(cache)
        if problem:
            extra = fields(kind=owner.kind, namespace=owner.namespace, name=owner.name, reason=problem)
            _log.warning("no cache volume, the cache is kept on the node", extra=extra)
            return ""
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, build_cache_claim(owner, cache, node=node))
        return claim if isinstance(claim, Pending) else cache_claim_name(owner)

    async def _problem_of(self, cache: CacheVolume) -> str:
        """Return why no cache volume can be had of that class; empty where one can."""
        if not cache.storage_class:
            return "cachePVC names no storage class"
        found = await self._client.read(STORAGE_CLASSES, "", cache.storage_class)
        if found is None:
            return f"StorageClass {cache.storage_class} does not exist"
        policy = found.get("reclaimPolicy") or DELETE
        if policy != DELETE:
            return f"StorageClass {cache.storage_class} reclaims by {policy}: every cache would leave its volume behind"
        return ""
