"""What backups and restores have in common: their transfers listed and put together, their end, canceling them."""

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, TypedDict, TypeVar

from client.backups.progress import Moving, MovingVolume, ProgressMeter, VolumeProgress
from client.status.kinds import TRANSFER_KINDS
from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import InvalidError, KubeError, NotFoundError, UnauthorizedError, UnreachableError
from core.kube.resources import Resource
from core.kube.velero_server import has_velero_server
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.transfers import PLAIN_RESTORE, Transfer
from core.models.units import parse_count

__all__ = [
    "Found",
    "Totals",
    "cancel_transfers",
    "count_completed",
    "explain_end",
    "explain_velero_server",
    "group_transfers",
    "list_transfers",
    "sort_newest_first",
    "sum_up",
    "wait_for_end",
]

_SHORTEST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
_PAUSE_SHARE: Final = 0.1
"""Of the time that has passed, between two lists of the transfers: a short wait ends promptly, a long one asks less."""

_RESOURCES: Final = {kind.name: kind.resource for kind in TRANSFER_KINDS}

Found = tuple[Resource, JsonDict]
"""A transfer as JSON dict, with its kind."""

_Whole = TypeVar("_Whole", bound=Moving)
_Volume = TypeVar("_Volume", bound=MovingVolume)
_Transfer = TypeVar("_Transfer", bound=Transfer)
_Key = TypeVar("_Key", bound=Hashable)


async def explain_velero_server(client: KubeClient, namespace: str, what: str, benefit: str) -> str:
    """Return why a `what` (backup, restore) is refused beside a Velero server, or if there may be one; else empty."""
    advice = f"--ignore-velero-server creates the {what} nevertheless"
    try:
        found = await has_velero_server(client, namespace)
    except (UnreachableError, UnauthorizedError):
        raise
    except KubeError as e:
        return f"cannot find out whether a Velero server is in namespace {namespace}: {e}: {advice}"
    if not found:
        return ""
    return f"a Velero server is in namespace {namespace}: ask it (velero {what} create), {benefit}; {advice}"


async def list_transfers(
    client: KubeClient, resources: Iterable[Resource], namespace: str, selector: str = ""
) -> list[Found]:
    """Return the transfers of these kinds whose labels match.

    Raises:
        KubeError: they cannot be listed.
    """
    found: list[Found] = []
    for resource in resources:
        listed = await client.list(Selection(resource, namespace, label_selector=selector))
        found += [(resource, raw) for raw in listed]
    return found


def group_transfers(
    models: Mapping[Resource, type[_Transfer]], found: Iterable[Found], key_of: Callable[[_Transfer], _Key | None]
) -> tuple[dict[_Key, list[_Transfer]], list[str]]:
    """Return the transfers by their key, and a note for each that is invalid; those without a key are left out."""
    notes, groups = list[str](), dict[_Key, list[_Transfer]]()
    for resource, raw in found:
        try:
            transfer = models[resource].parse(raw)
        except ContractError as e:
            notes.append(str(e))
            continue
        if key := key_of(transfer):
            groups.setdefault(key, []).append(transfer)
    return groups, notes


def sort_newest_first(wholes: list[_Whole]) -> None:
    """Sort by the time of creation, and then by name."""
    wholes.sort(key=lambda one: (-(one.created.timestamp() if one.created else 0.0), one.name))


class Totals(TypedDict):
    """What follows from the volumes of a backup or of a restore; see `Backup`."""

    created: datetime | None
    completed: datetime | None
    expected: int | None
    missing: int
    bytes_done: int
    total_bytes: int


def sum_up(volumes: Sequence[MovingVolume], transfers: Sequence[Transfer], annotation: str) -> Totals:
    """Return the totals; `annotation` of the transfers says how many volumes there should be, empty: none does."""
    counts = (parse_count(one.metadata.annotations.get(annotation, "")) for one in transfers)
    expected = max((count for count in counts if count is not None), default=None)
    ended = all(one.phase.final for one in volumes)
    return Totals(
        created=min((one.created for one in volumes if one.created), default=None),
        completed=max((one.completed for one in volumes if one.completed), default=None) if ended else None,
        expected=expected,
        missing=max(0, (expected or 0) - len(volumes)),
        bytes_done=sum(one.bytes_done for one in volumes),
        total_bytes=sum(one.total_bytes for one in volumes),
    )


def count_completed(whole: Moving) -> str:
    """Return how many of the volumes are completed, such as `2/3`."""
    completed = sum(one.phase is Phase.COMPLETED for one in whole.volumes)
    return f"{completed}/{len(whole.volumes) + whole.missing}"


def explain_end(whole: Moving) -> str:
    """Return which volume of one that has ended did not complete, and why; empty: all did."""
    lost = [one for one in whole.volumes if one.phase is not Phase.COMPLETED]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    if lost:
        first = lost[0]
        return f"PVC {first.namespace}/{first.claim} is {first.phase}: {first.message or 'no message'}{more}"
    return f"{whole.missing} of {whole.expected} volumes have no transfer: it was deleted" if whole.missing else ""


async def wait_for_end(
    clock: Clock, read: Callable[[], Awaitable[_Whole]], show: Callable[[list[VolumeProgress]], None]
) -> _Whole:
    """Return what `read` returns once all its transfers are final; `show` gets the progress every few seconds."""
    meter, began = ProgressMeter(), clock.monotonic()
    while True:
        whole = await read()
        show(meter.read(whole, clock.monotonic()))
        if all(one.phase.final for one in whole.volumes):
            return whole
        pause = (clock.monotonic() - began) * _PAUSE_SHARE
        await clock.sleep(min(_LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, pause)))


async def _cancel(client: KubeClient, resource: Resource, namespace: str, name: str) -> None:
    try:
        await client.patch(resource, namespace, name, {"spec": {"cancel": True}})
    except InvalidError:
        # The definitions of Velero 1.19 reject each change of a restore that was created before them.
        found = await client.get(resource, namespace, name)
        if "restoreType" in found["spec"]:
            raise
        same = {"resourceVersion": found["metadata"]["resourceVersion"]}
        await client.patch(resource, namespace, name, {"metadata": same, "spec": {"cancel": True, **PLAIN_RESTORE}})


async def cancel_transfers(client: KubeClient, namespace: str, volumes: Iterable[_Volume]) -> list[_Volume]:
    """Request the cancellation of the transfers that have not ended, and return their volumes.

    Raises:
        KubeError: the API server rejected a request.
    """
    canceled = []
    for volume in volumes:
        if volume.phase.final:
            continue
        try:
            await _cancel(client, _RESOURCES[volume.kind], namespace, volume.transfer)
        except NotFoundError:
            continue
        canceled.append(volume)
    return canceled
