"""Restores as people see them: the transfers of one name, put together; waiting for one, and canceling it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec import field

from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import NotFoundError
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
from core.models.units import parse_count
from nodeagent.config.keys import guess
from nodeagent.operations.backups.progress import ProgressMeter, VolumeProgress
from nodeagent.operations.backups.view import BackupPhase, phase_of

__all__ = [
    "Restore",
    "RestoreList",
    "RestoreVolume",
    "cancel_restore",
    "explain_restore",
    "find_restores",
    "gather_restores",
    "wait_for_restore",
]

_POLL_SECONDS: Final = 1.0

_Transfer = DataDownload | PodVolumeRestore
_KINDS: Final[Mapping[Resource, type[DataDownload] | type[PodVolumeRestore]]] = {
    DATA_DOWNLOADS: DataDownload,
    POD_VOLUME_RESTORES: PodVolumeRestore,
}
_RESOURCES: Final = {resource.kind: resource for resource in _KINDS}


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
        completed = sum(one.phase is Phase.COMPLETED for one in self.volumes)
        return f"{completed}/{len(self.volumes) + self.missing}"


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
    found = gather_restores(await _list(client, namespace, RESTORE_LABEL))
    known = [one.name for one in found.restores]
    for name in names:
        if name not in known:
            hint = guess(name, known)
            text = f"there is no restore {name} in namespace {namespace}" + (f" ({hint})" if hint else "")
            raise NotFoundError(text, status=404, reason="NotFound")
    if not names:
        return found
    return RestoreList(restores=[one for one in found.restores if one.name in names], notes=found.notes)


async def _list(client: KubeClient, namespace: str, selector: str) -> list[tuple[Resource, JsonDict]]:
    found: list[tuple[Resource, JsonDict]] = []
    for resource in _KINDS:
        listed = await client.list(Selection(resource, namespace, label_selector=selector))
        found += [(resource, raw) for raw in listed]
    return found


def gather_restores(found: Sequence[tuple[Resource, JsonDict]]) -> RestoreList:
    """Return the restores of these transfers, each with its kind; those of no restore of ours are left out."""
    notes, by_name = [], dict[str, list[_Transfer]]()
    for resource, raw in found:
        try:
            transfer = _KINDS[resource].parse(raw)
        except ContractError as e:
            notes.append(str(e))
            continue
        if name := transfer.metadata.annotations.get(RESTORE_ANNOTATION):
            by_name.setdefault(name, []).append(transfer)
    restores = [_build(name, transfers) for name, transfers in by_name.items()]
    restores.sort(key=lambda one: (-(one.created.timestamp() if one.created else 0.0), one.name))
    return RestoreList(restores=restores, notes=notes)


def _build(name: str, transfers: Sequence[_Transfer]) -> Restore:
    volumes = sorted((_volume(one) for one in transfers), key=lambda one: (one.namespace, one.claim))
    counts = [parse_count(one.metadata.annotations.get(RESTORE_VOLUMES_ANNOTATION, "")) for one in transfers]
    expected = max((count for count in counts if count is not None), default=None)
    missing = max(0, (expected or 0) - len(volumes))
    canceling = any(one.cancel_requested and not one.phase.final for one in transfers)
    ended = all(one.phase.final for one in volumes)
    return Restore(
        name=name,
        phase=phase_of([one.phase for one in volumes], missing=missing, canceling=canceling),
        created=min((one.created for one in volumes if one.created), default=None),
        completed=max((one.completed for one in volumes if one.completed), default=None) if ended else None,
        expected=expected,
        missing=missing,
        bytes_done=sum(one.bytes_done for one in volumes),
        total_bytes=sum(one.total_bytes for one in volumes),
        volumes=volumes,
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
    """Return the restore once all its transfers are final; `show` gets the progress every second.

    Args:
        client: with the user's permissions.
        clock: for rates.
        place: the namespace of the transfers, and the name of the restore.
        show: is called with the volumes.

    Raises:
        NotFoundError: it has no transfer any more.
        KubeError: the transfers cannot be listed.
    """
    meter, (namespace, name) = ProgressMeter(), place
    selector = select_labels({RESTORE_LABEL: label_value(name)})
    while True:
        found = gather_restores(await _list(client, namespace, selector))
        named = [one for one in found.restores if one.name == name]
        if not named:
            text = f"restore {name} has no transfer in namespace {namespace} any more: they were deleted"
            raise NotFoundError(text, status=404, reason="NotFound")
        show(meter.read(named[0], clock.monotonic()))
        if all(one.phase.final for one in named[0].volumes):
            return named[0]
        await clock.sleep(_POLL_SECONDS)


def explain_restore(restore: Restore) -> str:
    """Return which volume is not restored, and why; empty: all are. The restore has ended."""
    lost = [one for one in restore.volumes if one.phase is not Phase.COMPLETED]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    if lost:
        first = lost[0]
        return f"PVC {first.namespace}/{first.claim} is {first.phase}: {first.message or 'no message'}{more}"
    return f"{restore.missing} of {restore.expected} volumes have no transfer" if restore.missing else ""


async def cancel_restore(client: KubeClient, namespace: str, name: str) -> list[RestoreVolume]:
    """Request the cancellation of all transfers of the restore that have not ended, and return these.

    Raises:
        NotFoundError: there is no restore of that name.
        KubeError: the API server rejected a request.
    """
    (restore,) = (await find_restores(client, namespace, (name,))).restores
    canceled = []
    for volume in restore.volumes:
        if volume.phase.final:
            continue
        try:
            await client.patch(_RESOURCES[volume.kind], namespace, volume.transfer, {"spec": {"cancel": True}})
        except NotFoundError:
            continue
        canceled.append(volume)
    return canceled
