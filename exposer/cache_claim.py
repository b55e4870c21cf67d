"""Makes the claim of a restore's cache, where one is asked for and can be had.

Knows when a restore goes without: a cache only spares time and space on the node, and nothing
fails for it. Does not know how large a cache is or when it pays; its parameter says so.
Source: Velero v1.18, pkg/exposer/cache_volume.go and validateCachePVCConfig in
pkg/cmd/cli/nodeagent/server.go.
"""

import logging

from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, STORAGE_CLASSES
from core.logs import fields
from exposer.claims import build_cache_claim, cache_claim_name
from exposer.model import Owner, Waiting
from exposer.ownership import ExposeRun
from exposer.settings import CacheVolume
from exposer.volumes import DELETE

__all__ = ["CacheClaims"]

_log = logging.getLogger(__name__)


class CacheClaims:
    """The cache claims of restores."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, run: ExposeRun, owner: Owner, *, cache: CacheVolume | None, node: str) -> str | Waiting:
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
        return claim if isinstance(claim, Waiting) else cache_claim_name(owner)

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
