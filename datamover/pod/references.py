"""What refers to kopia snapshots in the cluster: transfers by ID, and Backups by UID.

Only reads. Source: Velero v1.18, pkg/apis/velero/v1 and v2alpha1; the CRDs in tests/recordings/velero-1.18.2.
"""

import logging
from collections.abc import AsyncIterator, Collection
from typing import Final

from core.contract import MoverVerb
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, NotFoundError
from core.kube.resources import BACKUPS, Resource
from core.kube.types import UncheckedObject
from core.models.names import VELERO_BACKUP_LABEL
from core.models.phases import FINAL_PHASES, Attempts, Phase
from core.models.storage import RepositoryKey
from datamover.kinds import TRANSFER_KINDS, MoverKind
from datamover.kopia.references import CompletedTransfer, References

__all__ = ["read_backup_snapshots", "read_cluster_references", "read_named_snapshots"]

_logger = logging.getLogger(__name__)

_DELETING: Final = "Deleting"
"""The phase of a Backup."""


async def read_cluster_references(client: KubeClient, namespace: str) -> References:
    """Return what the transfers and Backups of `namespace` refer to; what cannot be read is in `unread`.

    A backup refers to its snapshot as long as its resource exists, a restore until it has ended.
    """
    snapshot_ids: dict[str, str] = {}
    completed: dict[str, CompletedTransfer] = {}
    uids: set[str] = set()
    try:
        async for kind, raw, found in _list_named(client, namespace):
            snapshot_ids[found] = name = f"{kind.resource.kind} {namespace}/{raw['metadata']['name']}"
            if kind.verb is MoverVerb.BACKUP and raw["status"].get("phase") == Phase.COMPLETED:
                number = Attempts.of(raw["metadata"].get("annotations") or {}).number
                completed[raw["metadata"]["uid"]] = CompletedTransfer(name, number)
        async for raw in _list(client, BACKUPS, namespace):
            uids.add(raw["metadata"]["uid"])
    except NotFoundError as e:
        return References(snapshot_ids, completed, unread=f"a resource of Velero is not defined in this cluster: {e}")
    except (KubeError, ContractError) as e:
        return References(snapshot_ids, completed, unread=str(e))
    return References(snapshot_ids, completed, frozenset(uids))


async def read_named_snapshots(
    client: KubeClient, namespace: str, without: Collection[str] = frozenset()
) -> dict[str, str]:
    """Return the snapshots that transfers of `namespace` refer to, by ID, but for the transfers with those UIDs.

    The text is a transfer that refers to it.

    Raises:
        ContractError: a transfer is malformed: what it refers to is not known.
        KubeError: they cannot be listed.
    """
    return {
        found: f"{kind.resource.kind} {namespace}/{raw['metadata']['name']}"
        async for kind, raw, found in _list_named(client, namespace)
        if raw["metadata"]["uid"] not in without
    }


async def read_backup_snapshots(client: KubeClient, namespace: str, key: RepositoryKey) -> set[str]:
    """Return the IDs of the snapshots in a repository that completed backups of `namespace` refer to.

    Those of a Backup that is being deleted do not count: a Velero server deletes its snapshots before its transfers.
    Source: Velero v1.18, pkg/controller/backup_deletion_controller.go.

    Raises:
        ContractError: what a transfer refers to is not known.
        KubeError: they cannot be listed.
    """
    found = {
        snapshot: raw
        async for kind, raw, snapshot in _list_named(client, namespace)
        if kind.verb is MoverVerb.BACKUP and _is_complete_in(kind, raw, key)
    }
    deleting = await _list_deleting(client, namespace)
    return {snapshot for snapshot, raw in found.items() if not deleting.intersection(_backups_of(raw))}


async def _list_deleting(client: KubeClient, namespace: str) -> set[str]:
    """Return the names of the Backups that are being deleted; none if they cannot be listed."""
    try:
        return {
            raw["metadata"]["name"]
            async for raw in _list(client, BACKUPS, namespace)
            if raw["metadata"].get("deletionTimestamp") or (raw.get("status") or {}).get("phase") == _DELETING
        }
    except (KubeError, ContractError) as e:
        _logger.warning("a backup that is being deleted counts as one that is kept: %s", e)
        return set()


def _backups_of(raw: UncheckedObject) -> set[str]:
    meta = raw["metadata"]
    owners = {one["name"] for one in meta.get("ownerReferences") or [] if one.get("kind") == BACKUPS.kind}
    return owners | {name for name in [(meta.get("labels") or {}).get(VELERO_BACKUP_LABEL)] if name}


def _is_complete_in(kind: MoverKind, raw: UncheckedObject, key: RepositoryKey) -> bool:
    try:
        cr = kind.model.parse(raw)
    except ContractError as e:
        _logger.warning("its snapshot is not verified: %s", e)
        return False
    place = RepositoryKey(cr.repository_namespace, cr.spec.backup_storage_location)
    return cr.phase is Phase.COMPLETED and place == key and not cr.deleting


async def _list_named(client: KubeClient, namespace: str) -> AsyncIterator[tuple[MoverKind, UncheckedObject, str]]:
    """Yield all transfers that refer to a snapshot, with its ID."""
    for kind in TRANSFER_KINDS.values():
        async for raw in _list(client, kind.resource, namespace):
            if found := _named_snapshot(raw, kind.verb):
                yield kind, raw, found


async def _list(
    client: KubeClient, resource: Resource[UncheckedObject], namespace: str
) -> AsyncIterator[UncheckedObject]:
    """Yield all objects of a kind.

    Raises:
        ContractError: one is malformed: what it refers to is not known.
        KubeError: they cannot be listed.
    """
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise ContractError(f"a {resource.kind} in namespace {namespace} is malformed")
        for raw in page.items:
            yield raw


def _named_snapshot(raw: UncheckedObject, verb: MoverVerb) -> str:
    """Return the ID of the kopia snapshot that the transfer refers to; empty if it does not.

    Raises:
        ContractError: the transfer is malformed.
    """
    status, spec = raw.get("status") or {}, raw.get("spec") or {}
    try:
        found = status.get("snapshotID") if verb is MoverVerb.BACKUP else spec.get("snapshotID")
        ended = verb is MoverVerb.RESTORE and status.get("phase") in FINAL_PHASES
    except (AttributeError, TypeError) as e:
        raise _malformed(raw) from e
    if not isinstance(found or "", str):
        raise _malformed(raw)
    return "" if ended else found or ""


def _malformed(raw: UncheckedObject) -> ContractError:
    return ContractError(f"{raw['kind']} {raw['metadata']['name']} is malformed")
