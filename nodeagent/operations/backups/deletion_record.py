"""The record of deletions that have begun: a ConfigMap has the transfers of each backup until their snapshots are gone.

It is written before the first transfer is deleted. Without it nothing would tell a snapshot whose deletion was
interrupted from one whose custom resource was lost, and which may be the only copy of a volume.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from core.errors import ContractError
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, NotFoundError
from core.kube.resources import CONFIG_MAPS, LEASES
from core.models.base import JsonDict
from core.models.names import DELETIONS_CONFIGMAP, DELETIONS_LEASE
from core.snapshot_contract import TransferToDelete
from nodeagent.operations.install.objects import build_object

__all__ = ["DeletionRecord", "build_lease", "build_record"]

_Entry = dict[str, list[str]]
"""Transfers as `TransferToDelete` writes them, by the BackupStorageLocation."""


def build_record(namespace: str) -> JsonDict:
    """Return the ConfigMap without an entry: without `data`, so that applying it again keeps what there is."""
    return build_object("v1", CONFIG_MAPS.kind, DELETIONS_CONFIGMAP, namespace)


def build_lease(namespace: str) -> JsonDict:
    """Return the Lease of deletions without a holder: without `spec`, so that applying it again keeps what there is."""
    return build_object(LEASES.api_version, LEASES.kind, DELETIONS_LEASE, namespace)


@dataclass
class DeletionRecord:
    """The record in a namespace; `entries` are as read and written by this process: location and transfer, by backup.

    Two commands may write at the same time: each writes the entries of its own backups alone.
    """

    client: KubeClient
    namespace: str
    entries: dict[str, set[tuple[str, TransferToDelete]]] = field(default_factory=dict)

    async def read(self) -> None:
        """Read it; a ConfigMap that does not exist has no entries.

        Raises:
            ContractError: an entry is invalid: only these commands should write it.
            KubeError: it cannot be read.
        """
        stored = await self.client.read(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP)
        data: Mapping[str, str] = (stored or {}).get("data") or {}
        self.entries = {backup: _parse(self.namespace, backup, text) for backup, text in data.items()}

    async def add(self, backup: str, transfers: Iterable[tuple[str, TransferToDelete]]) -> None:
        """Note that the snapshots of these transfers of the backup, each with its location, are to be deleted.

        Raises:
            KubeError: it cannot be written.
        """
        entry = self.entries.get(backup, set()) | set(transfers)
        await self._write({backup: _format(entry)})
        self.entries[backup] = entry

    async def drop(self, transfers: Collection[TransferToDelete]) -> None:
        """Note that nothing is to be deleted any more of these transfers.

        Raises:
            KubeError: it cannot be written.
        """
        left = {
            backup: {(location, one) for location, one in entry if one not in transfers}
            for backup, entry in self.entries.items()
        }
        changes = {
            name: _format(entry) if entry else None for name, entry in left.items() if entry != self.entries[name]
        }
        if changes:
            await self._write(changes)
        self.entries = {name: entry for name, entry in left.items() if entry}

    async def _write(self, data: Mapping[str, str | None]) -> None:
        try:
            await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})
        except NotFoundError:
            kept = {key: text for key, text in data.items() if text is not None}
            try:
                await self.client.create(CONFIG_MAPS, build_record(self.namespace) | {"data": kept})
            except AlreadyExistsError:
                await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})


def _format(entry: Iterable[tuple[str, TransferToDelete]]) -> str:
    found: _Entry = {}
    for location, one in sorted(entry):
        found.setdefault(location, []).append(str(one))
    return msgspec.json.encode(found).decode()


def _parse(namespace: str, backup: str, text: str) -> set[tuple[str, TransferToDelete]]:
    try:
        found = msgspec.json.decode(text, type=_Entry)
        return {(location, TransferToDelete.parse(one)) for location, all_ in found.items() for one in all_}
    except ValueError as e:
        raise ContractError(f"ConfigMap {namespace}/{DELETIONS_CONFIGMAP}: invalid entry {backup}: {e}") from e
