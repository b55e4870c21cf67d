"""Reads what a deletion of backups is judged by: all transfers of backups, restores that have not ended, locations."""

from collections.abc import AsyncIterator

from client.backups.copies import Copy, build_copy, build_unreadable_copy
from client.backups.retention import DeletionError
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    Resource,
)
from core.models.base import JsonDict
from core.models.storage import BackupStorageLocation
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore

__all__ = ["read_copies", "read_locations", "read_restoring"]


async def read_copies(client: KubeClient, namespace: str) -> AsyncIterator[Copy]:
    """Yield the volumes of all backups of ours; one that cannot be read holds its backup, and is no copy of a volume.

    Raises:
        DeletionError: a transfer is no object at all: it may be of any backup.
        KubeError: the API server rejected a request.
    """
    for resource, model in ((DATA_UPLOADS, DataUpload), (POD_VOLUME_BACKUPS, PodVolumeBackup)):
        async for raw in _read_all(client, resource, namespace):
            try:
                copy = build_copy(model.parse(raw))
            except ContractError as e:
                copy = build_unreadable_copy(resource.kind, raw, str(e))
            if copy is not None:
                yield copy


async def read_restoring(client: KubeClient, namespace: str) -> AsyncIterator[tuple[str, str]]:
    """Yield the snapshots that restores name which have not ended, and the restores.

    Raises:
        DeletionError: a restore is no object at all.
        ContractError: one is invalid: it may name any snapshot.
        KubeError: the API server rejected a request.
    """
    async for raw in _read_all(client, DATA_DOWNLOADS, namespace):
        download = DataDownload.parse(raw)
        if not download.phase.final:
            yield download.spec.snapshot_id, f"DataDownload {download.name}"
    async for raw in _read_all(client, POD_VOLUME_RESTORES, namespace):
        restore = PodVolumeRestore.parse(raw)
        if not restore.phase.final:
            yield restore.spec.snapshot_id, f"PodVolumeRestore {restore.name}"


async def read_locations(client: KubeClient, namespace: str) -> dict[str, str]:
    """Return why nothing may be deleted in each location that exists, by its name; empty: something may.

    Raises:
        KubeError: the API server rejected a request.
    """
    found = {}
    for raw in await client.list(Selection(BACKUP_STORAGE_LOCATIONS, namespace)):
        name = raw["metadata"]["name"]
        try:
            location = BackupStorageLocation.parse(raw)
        except ContractError as e:
            why = f"cannot be read: {e}"
        else:
            why = f"is {location.status.phase}" if not location.available else "is read-only"
            why = "" if location.available and not location.read_only else why
        found[name] = f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{name} {why}" if why else ""
    return found


async def _read_all(client: KubeClient, resource: Resource, namespace: str) -> AsyncIterator[JsonDict]:
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise DeletionError(f"a {resource.kind} in namespace {namespace} is malformed: nothing is deleted")
        for raw in page.items:
            yield raw
