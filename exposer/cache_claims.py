"""Cache PVCs of restores.

A restore without a cache volume keeps its cache on the node: a cache volume only saves time and
space there, and no restore fails for lack of one.
Source: Velero v1.18, pkg/exposer/cache_volume.go and validateCachePVCConfig in
pkg/cmd/cli/nodeagent/server.go.
"""

import logging

from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, STORAGE_CLASSES
from core.logs import fields
from exposer.claims import build_cache_claim, claim_size_gib
from exposer.expose_run import ExposeRun
from exposer.model import Owner, Pending
from exposer.settings import CacheVolume
from exposer.volumes import DELETE

__all__ = ["CacheClaims"]

_log = logging.getLogger(__name__)


class CacheClaims:
    """The cache PVCs of restores."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(
        self, run: ExposeRun, owner: Owner, *, cache: CacheVolume | None, node: str
    ) -> CacheVolume | Pending | None:
        """Return the cache that the owner's PVC holds, created where needed; None where there is none.

        A PVC that was created before an edit of the configuration holds what it was created for.
        `node`: where the cache must be reachable; empty: anywhere.

        Raises:
            ExposeError: another PVC has the name.
            NotOwnerError: from the run's guard; nothing was created.
        """
        if cache is None:
            return None
        problem = await self._problem_of(cache)
        if problem:
            extra = fields(kind=owner.kind, namespace=owner.namespace, name=owner.name, reason=problem)
            _log.warning("cannot create a cache volume, using the node's disk for the cache", extra=extra)
            return None
        claim = await run.ensure(PERSISTENT_VOLUME_CLAIMS, build_cache_claim(owner, cache, node=node))
        return claim if isinstance(claim, Pending) else cache.within(claim_size_gib(claim))

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
