"""Restores as people see them: the transfers of one name, put together; waiting for one, and canceling it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import field

from client.backups.moving import (
    Found,
    cancel_transfers,
    count_completed,
    group_transfers,
    list_transfers,
    sort_newest_first,
    sum_up,
    wait_for_end,
)
from client.backups.progress import VolumeProgress
from client.backups.view import BackupPhase, phase_of
from client.restores.waiting_pods import RestoreTools, WaitingPod, delete_waiting_pods
from core.clock import Clock
from core.kube.client import KubeClient, select_labels
from core.kube.resources import DATA_DOWNLOADS, POD_VOLUME_RESTORES, Resource
from core.models.base import JsonDict, WireModel
from core.models.names import (
    PVC_NAME_ANNOTATION,
    RESTORE_ANNOTATION,
    RESTORE_LABEL,
    RESTORE_VOLUMES_ANNOTATION,
    label_value,
)
from core.models.phases import Phase
from core.models.transfers import DataDownload, PodVolumeRestore
from nodeagent.config.keys import missing

__all__ = [
    "Restore",
    "RestoreList",
    "RestoreVolume",
    "cancel_restore",
    "find_restores",
    "gather_restores",
    "read_restore",
    "wait_for_restore",
]

_Transfer = DataDownload | PodVolumeRestore
_KINDS: Final[Mapping[Resource, type[DataDownload] | type[PodVolumeRestore]]] = {
    DATA_DOWNLOADS: DataDownload,
    POD_VOLUME_RESTORES: PodVolumeRestore,
}


class RestoreVolume(WireModel):
    """One volume of a restore, by its transfer; `namespace` and `claim` are those of the new PVC.

    Sizes in bytes; `attempt` counts from 1. `reason` and `message` are what the transfer waits for, or why it failed.
    """

    namespace: str
    claim: str
    kind: str
    transfer: str
    snapshot_id: str
    location: str
    phase: Phase
    reason: str = ""
    message: str = ""
    attempt: int = 1
    node: str = ""
    bytes_done: int = 0
    total_bytes: int = 0
    created: datetime | None = None
    completed: datetime | None = None


class Restore(WireModel):
    """One restore; `expected` is how many volumes it has, `missing` how many of them have no transfer."""

    name: str
    phase: BackupPhase
    created: datetime | None
    completed: datetime | None
    expected: int | None
    missing: int
    bytes_done: int
    total_bytes: int
    volumes: list[RestoreVolume]

    @property
    def counted(self) -> str:
        """How many of its volumes are restored, such as `2/3`."""
        return count_completed(self)


class RestoreList(WireModel):
    """Restores, the newest first, and notes about what could not be read."""

    restores: list[Restore] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def find_restores(client: KubeClient, namespace: str, names: Sequence[str] = ()) -> RestoreList:
    """Return the restores of these names; all that `nodeagent restore create` made if there are no names.

    Raises:
        NotFoundError: there is none of such a name; the message has the one that may be meant.
        KubeError: the transfers cannot be listed.
    """
    if not names:
        return gather_restores(await list_transfers(client, _KINDS, namespace, RESTORE_LABEL))
    found: list[Found] = []
    for name in sorted(set(names)):
        listed = await list_transfers(client, _KINDS, namespace, select_labels({RESTORE_LABEL: label_value(name)}))
        of_name = [(resource, raw) for resource, raw in listed if _name_of(raw) == name]
        if not of_name:
            known = [one.name for one in (await find_restores(client, namespace)).restores]
            raise missing(f"there is no restore {name} in namespace {namespace}", name, known)
        found += of_name
    return gather_restores(found)


def _name_of(raw: JsonDict) -> str:
    return str((raw["metadata"].get("annotations") or {}).get(RESTORE_ANNOTATION, ""))


def gather_restores(found: Iterable[Found]) -> RestoreList:
    """Return the restores of these transfers, each with its kind; those of no restore of ours are left out."""
    by_name, notes = group_transfers(_KINDS, found, lambda one: one.metadata.annotations.get(RESTORE_ANNOTATION))
    restores = [_build(name, transfers) for name, transfers in by_name.items()]
    sort_newest_first(restores)
    return RestoreList(restores=restores, notes=notes)


def _build(name: str, transfers: Sequence[_Transfer]) -> Restore:
    volumes = sorted((_volume(one) for one in transfers), key=lambda one: (one.namespace, one.claim))
    totals = sum_up(volumes, transfers, RESTORE_VOLUMES_ANNOTATION)
    canceling = any(one.cancel_requested and not one.phase.final for one in transfers)
    return Restore(
        name=name,
        phase=phase_of([one.phase for one in volumes], missing=totals["missing"], canceling=canceling),
        volumes=volumes,
        **totals,
    )


def _volume(transfer: _Transfer) -> RestoreVolume:
    spec, status = transfer.spec, transfer.status
    if isinstance(transfer, DataDownload):
        namespace, claim = transfer.spec.target_volume.namespace, transfer.spec.target_volume.pvc
    else:
        namespace = transfer.spec.pod.namespace
        claim = transfer.metadata.annotations.get(PVC_NAME_ANNOTATION, "")
    return RestoreVolume(
        namespace=namespace,
        claim=claim,
        kind=transfer.kind_name,
        transfer=transfer.name,
        snapshot_id=transfer.spec.snapshot_id,
        location=spec.backup_storage_location,
        phase=transfer.phase,
        reason="" if transfer.phase is Phase.COMPLETED else transfer.pending_reason,
        message=status.message,
        attempt=transfer.attempts.number,
        node=status.node,
        bytes_done=status.progress.bytes_done,
        total_bytes=status.progress.total_bytes,
        created=transfer.metadata.creation_timestamp,
        completed=status.completion_timestamp,
    )


async def wait_for_restore(
    client: KubeClient, clock: Clock, place: tuple[str, str], show: Callable[[list[VolumeProgress]], None]
) -> Restore:
    """Return the restore once all its transfers are final; `show` gets the progress every few seconds.

    Args:
        client: with the user's permissions.
        clock: for rates.
        place: the namespace of the transfers, and the name of the restore.
        show: is called with the volumes.

    Raises:
        NotFoundError: it has no transfer any more.
        KubeError: the transfers cannot be listed.
    """
    patient = client.patiently()
    return await wait_for_end(clock, lambda: read_restore(patient, *place), show)


async def read_restore(client: KubeClient, namespace: str, name: str) -> Restore:
    """Return the restore of that name by its label: the other transfers are not listed.

    Raises:
        NotFoundError: it has no transfer.
        KubeError: the transfers cannot be listed.
    """
    selector = select_labels({RESTORE_LABEL: label_value(name)})
    found = gather_restores(await list_transfers(client, _KINDS, namespace, selector))
    named = [one for one in found.restores if one.name == name]
    if not named:
        raise missing(f"restore {name} has no transfer in namespace {namespace} any more: they were deleted", name, ())
    return named[0]


async def cancel_restore(tools: RestoreTools, namespace: str, name: str) -> list[RestoreVolume]:
    """Request the cancellation of all transfers of the restore that have not ended, and return these.

    The pods that waited for data are deleted once their transfers have ended, which is waited for.

    Raises:
        NotFoundError: there is no restore of that name.
        KubeError: the API server rejected a request.
    """
    (restore,) = (await find_restores(tools.client, namespace, (name,))).restores
    canceled = await cancel_transfers(tools.client, namespace, restore.volumes)
    await delete_waiting_pods(
        tools,
        namespace,
        [WaitingPod(one.namespace, one.transfer) for one in restore.volumes if one.kind == POD_VOLUME_RESTORES.kind],
    )
    return canceled
