"""What a mover pod must inherit to reach the bucket, read from the BackupStorageLocation.

Knows which locations depend on credentials or directories of the agent's own pod. Does not read
credentials: the mover does.
"""

from typing import Final

from core.errors import ContractError
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.models.storage import BackupStorageLocation
from exposer.settings import StorageAccess

__all__ = ["access_of", "is_in_directory", "read_storage_access"]

_DIRECTORY_PROVIDER: Final = "fs"
_DIRECTORY_KEY: Final = "fspath"
"""Source: Velero v1.18, GetBackendType in pkg/repository/config/config.go; its file system backend."""


async def read_storage_access(client: KubeClient, namespace: str, location: str) -> StorageAccess:
    """Return what the movers of that location need; nothing, if it is missing or invalid: they will fail.

    Raises:
        KubeError: the API server rejected the read.
    """
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, location)
    if raw is None:
        return StorageAccess()
    try:
        found = BackupStorageLocation.parse(raw)
    except ContractError:
        return StorageAccess()
    return access_of(found)


def access_of(location: BackupStorageLocation) -> StorageAccess:
    """Return what the movers of the location need."""
    spec, in_directory = location.spec, is_in_directory(location)
    return StorageAccess(
        inherits_credentials=spec.credential is None and not in_directory,
        directory=spec.config.get(_DIRECTORY_KEY) or None if in_directory else None,
        read_only=location.read_only,
    )


def is_in_directory(location: BackupStorageLocation) -> bool:
    """Return whether the location is a directory in the file system of its movers."""
    return location.spec.provider.removeprefix("velero.io/") == _DIRECTORY_PROVIDER
