"""How large kopia's cache may become in the restore of one load: its repository says so.

Knows where a BackupRepository keeps the limit. Does not know when a cache has a volume of its
own, nor how large that is for a limit (`exposer.settings`).
"""

from dataclasses import replace
from typing import Final, TypeVar

from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.base import JsonDict
from core.models.storage import CACHE_LIMIT_KEY, RepositoryKey, repository_labels
from core.models.transfers import Load
from exposer.model import PodVolumeRequest, RestoreRequest

__all__ = ["DEFAULT_CACHE_LIMIT_MIB", "fit_cache"]

DEFAULT_CACHE_LIMIT_MIB: Final = 5000
"""What a mover takes where its repository says nothing.

Source: Velero v1.18, pkg/repository/udmrepo/kopialib/backend/common.go (MB there are MiB).
"""

_Request = TypeVar("_Request", RestoreRequest, PodVolumeRequest)


async def fit_cache(client: KubeClient, cr: Load, request: _Request) -> _Request:
    """Return `request` with room in its cache, if it has one, for what the mover will keep there.

    A repository keeps the limit that it was made with; configuration is for those to come. A
    volume for a smaller limit would be full before kopia drops anything, and the restore fail.
    """
    if request.cache is None:
        return request
    wanted = RepositoryKey(cr.repository_namespace, cr.spec.backup_storage_location)
    selector = select_labels(repository_labels(wanted.volume_namespace, wanted.location))
    found = await client.list(Selection(BACKUP_REPOSITORIES, cr.metadata.namespace, label_selector=selector))
    limits = [_limit_of(raw) for raw in found if RepositoryKey.of(raw) == wanted]
    return replace(request, cache=replace(request.cache, limit_mib=max(limits))) if limits else request


def _limit_of(repository: JsonDict) -> int:
    """Return the limit in a BackupRepository as JSON dict; whatever it holds, a cache is no reason to fail."""
    text = str((repository.get("spec", {}).get("repositoryConfig") or {}).get(CACHE_LIMIT_KEY, ""))
    return int(text) if text.isdecimal() and int(text) > 0 else DEFAULT_CACHE_LIMIT_MIB
