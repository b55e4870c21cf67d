"""The backups, and the restores, of a namespace: listed, found by name, waited for and canceled.

A group is a backup or a restore: the transfers of one name. With a canceled restore go the pods of `--method
restore-wait`, once their data has arrived or will not.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from client.backups.manifests import BackupError
from client.collections.models import (
    Backup,
    BackupList,
    BackupOrigin,
    BackupTransfer,
    BackupVolume,
    Restore,
    RestoreList,
    RestoreTransfer,
    Volume,
    build_backup,
    build_restore,
)
from client.session import Session
from client.text import MOST_SECONDS, missing
from core.clock import Clock, Deadline
from core.errors import ContractError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import InvalidError, KubeError, NotFoundError, UnauthorizedError, UnreachableError
from core.kube.types import Pod, UncheckedObject
from core.models import names as wire
from core.models.backups import velero_backup_of
from core.models.base import ObjectMeta, WireModel
from core.models.phases import FINAL_PHASES, Phase
from core.models.transfers import PLAIN_RESTORE, DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore

_SHORTEST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
_PAUSE_SHARE: Final = 0.1
"""Of the time that has passed, between two lists of the transfers: a short wait ends promptly, a long one asks less."""

_VOLUMES_PER_SECOND: Final = 100
"""That a long wait lists at most: 5,000 transfers are some 15 MB, which the API server reads from etcd each time."""

_WINDOW_SECONDS: Final = 30.0
"""Movers report every few seconds, and by leaps: a rate over less time would jump."""

_Group = TypeVar("_Group", bound=Backup | Restore)
_Transfer = TypeVar("_Transfer", BackupTransfer, RestoreTransfer)
_Volume = TypeVar("_Volume", bound=Volume)
_Key = tuple[BackupOrigin, str]
_Listed = tuple[kube.Resource[UncheckedObject], UncheckedObject]


@dataclass(frozen=True)
class VolumeProgress:
    """One volume, with its rate over the last seconds; None: it is not known."""

    volume: Volume
    bytes_per_second: float | None = None

    @property
    def remaining(self) -> timedelta | None:
        """How long it still takes at that rate; None: that is not known."""
        left = self.volume.total_bytes - self.volume.bytes_done
        if not self.bytes_per_second or left <= 0:
            return None
        return timedelta(seconds=min(left / self.bytes_per_second, MOST_SECONDS))


@dataclass
class ProgressMeter:
    """Remembers the readings of volumes, by their transfers; times are of a monotonic clock."""

    _readings: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def read(self, group: Backup | Restore, at: float) -> list[VolumeProgress]:
        """Return the progress of each volume as it was at `at`."""
        return [VolumeProgress(volume, self._rate(volume, at)) for volume in group.volumes]

    def _rate(self, volume: Volume, at: float) -> float | None:
        if volume.phase is not Phase.IN_PROGRESS:
            self._readings.pop(volume.transfer, None)
            return None
        readings = self._readings.setdefault(volume.transfer, deque())
        if readings and volume.bytes_done < readings[-1][1]:
            # Another attempt began.
            readings.clear()
        readings.append((at, volume.bytes_done))
        while len(readings) > 2 and at - readings[1][0] >= _WINDOW_SECONDS:  # noqa: PLR2004 - two make a rate
            readings.popleft()
        began, first = readings[0]
        return (volume.bytes_done - first) / (at - began) if at > began else None


@dataclass(frozen=True)
class Found(Generic[_Group]):
    """Groups, the newest first, and notes about what could not be read."""

    groups: list[_Group]
    notes: list[str] = field(default_factory=list)


class Collection(ABC, Generic[_Transfer, _Group]):
    """The groups of one sort whose transfers are in a namespace."""

    word: str
    """What a group is called in messages and commands."""

    models: Mapping[kube.Resource[UncheckedObject], type[_Transfer]]
    labels: tuple[str, ...]
    """Each of them has the name of a group; the first one is ours."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    @abstractmethod
    def identify(self, meta: ObjectMeta) -> _Key | None:
        """Return who made the group of the transfer with this metadata, and its name; None: it is of no group."""

    @abstractmethod
    def build(self, key: _Key, transfers: Sequence[_Transfer], unreadable: int) -> _Group:
        """Return the group that has these transfers, and others that cannot be read."""

    @abstractmethod
    def document(self, found: Found[_Group]) -> WireModel:
        """Return what was found as programs see it."""

    def gather(self, listed: Iterable[_Listed]) -> Found[_Group]:
        """Return the groups that have these transfers, and a note for each transfer that is invalid."""
        transfers, notes, unreadable = dict[_Key, list[_Transfer]](), list[str](), Counter[_Key]()
        for resource, raw in listed:
            try:
                transfer = self.models[resource].parse(raw)
            except ContractError as e:
                notes.append(str(e))
                with suppress(ContractError):
                    if key := self.identify(ObjectMeta.from_wire(raw["metadata"])):
                        unreadable[key] += 1
                continue
            if key := self.identify(transfer.metadata):
                transfers.setdefault(key, []).append(transfer)
        return Found(_sort(self.build(key, some, unreadable[key]) for key, some in transfers.items()), notes)

    async def list_all(self) -> Found[_Group]:
        """Return all groups."""
        return self.gather(await self._list(self.labels[0] if len(self.labels) == 1 else ""))

    async def list_named(self, name: str, *, only_own: bool = False) -> Found[_Group]:
        """Return the groups of that name, ours and Velero's; other transfers are not listed."""
        listed: dict[tuple[str, str], _Listed] = {}
        value = wire.label_value(name)
        # The API server rejects what no label can have.
        labels = self.labels if re.fullmatch(wire.LABEL_VALUE, value) else ()
        for label in labels[:1] if only_own else labels:
            some = await self._list(select_labels({label: value}))
            listed |= {(resource.kind, raw["metadata"]["name"]): (resource, raw) for resource, raw in some}
        found = self.gather(listed.values())
        # Long names may share the value of a label.
        groups = [one for one in found.groups if one.name == name and (_is_own(one) or not only_own)]
        return Found(groups, found.notes)

    async def find_existing(self, name: str) -> _Group | None:
        """Return our group of that name; None: it has no transfer that can be read. Other transfers are not listed."""
        found: Found[_Group] = await self.list_named(name, only_own=True)
        return next(iter(found.groups), None)

    async def find(self, names: Sequence[str] = ()) -> Found[_Group]:
        """Return the groups of these names, ours and Velero's; all of them if there are no names.

        Raises:
            NotFoundError: one does not exist; the message suggests the closest name.
        """
        if not names:
            return await self.list_all()
        found = [await self._find_named(name) for name in dict.fromkeys(names)]
        notes = dict.fromkeys(note for one in found for note in one.notes)
        return Found(_sort(group for one in found for group in one.groups), list(notes))

    async def _find_named(self, name: str) -> Found[_Group]:
        found: Found[_Group] = await self.list_named(name)
        if not found.groups:
            known = [one.name for one in (await self.list_all()).groups]
            text = f"there is no {self.word} {name} in namespace {self._namespace}"
            raise missing("; ".join([text, *found.notes]), name, known)
        return found

    async def find_one(self, name: str) -> tuple[_Group, list[str]]:
        """Return the group of the name, ours if Velero has one too, and notes; NotFoundError: it has a similar name."""
        found: Found[_Group] = await self._find_named(name)
        group, *others = sorted(found.groups, key=_is_own, reverse=True)
        return group, [*found.notes, *(f"velero has another {self.word} of this name" for _ in others)]

    async def find_own(self, name: str) -> _Group:
        """Return our group of that name.

        Raises:
            NotFoundError: there is none; the message suggests the closest name.
            BackupError: it is Velero's.
        """
        group, _ = await self.find_one(name)
        if not _is_own(group):
            raise BackupError(f"{self.word} {name} is Velero's: use the command velero {self.word} for it")
        return group

    async def get_own(self, name: str) -> _Group:
        """Return our group of that name, which was created before; NotFoundError: it has no transfer any more."""
        found: Found[_Group] = await self.list_named(name, only_own=True)
        if not found.groups:
            faults = "; ".join(found.notes)
            why = f"that can be read: {faults}" if faults else "any more: they were deleted"
            text = f"{self.word} {name} has no transfer in namespace {self._namespace} {why}"
            raise missing(text, name, ())
        return found.groups[0]

    async def wait(self, name: str, clock: Clock, show: Callable[[list[VolumeProgress]], None]) -> _Group:
        """Return our group once all its transfers are final; `show` gets the progress every few seconds.

        Raises:
            NotFoundError: it has no transfer any more.
        """
        patient = type(self)(self._client.patiently(), self._namespace)
        meter, began = ProgressMeter(), clock.monotonic()
        while True:
            group = await patient.get_own(name)
            show(meter.read(group, clock.monotonic()))
            if all(one.phase.final for one in group.volumes):
                return group
            longest = max(_LONGEST_PAUSE_SECONDS, len(group.volumes) / _VOLUMES_PER_SECOND)
            pause = (clock.monotonic() - began) * _PAUSE_SHARE
            await clock.sleep(min(longest, max(_SHORTEST_PAUSE_SECONDS, pause)))

    async def cancel(self, name: str) -> tuple[_Group, list[Volume], list[str]]:
        """Request the cancellation of the transfers of our group that have not ended.

        Returns the group, the volumes whose transfers got the request, and why others did not.

        Raises:
            NotFoundError: there is no group of that name.
            BackupError: it is Velero's.
        """
        found: Found[_Group] = await self.list_named(name, only_own=True)
        group = found.groups[0] if found.groups else await self.find_own(name)
        steps: list[tuple[Volume, Callable[[], Awaitable[None]]]] = [
            (one, partial(cancel_transfer, self._client, kube.BY_KIND[one.kind], self._namespace, one.transfer))
            for one in group.volumes
            if not one.phase.final
        ]
        changed: tuple[list[Volume], list[str]] = await _change(steps)
        return group, changed[0], [*found.notes, *changed[1]]

    async def _list(self, selector: str) -> list[_Listed]:
        return [
            (resource, raw)
            for resource in self.models
            for raw in await self._client.list(Selection(resource, self._namespace, label_selector=selector))
        ]


async def _change(steps: Iterable[tuple[_Volume, Callable[[], Awaitable[object]]]]) -> tuple[list[_Volume], list[str]]:
    """Take the step of each volume, if its transfer still exists; return the changed volumes, and why others are not.

    Raises:
        UnreachableError: the API server does not respond; it is not asked about other volumes.
        UnauthorizedError: the same.
    """
    changed, failures = list[_Volume](), list[str]()
    for one, step in steps:
        try:
            await step()
        except NotFoundError:
            continue
        except (UnreachableError, UnauthorizedError):
            raise
        except KubeError as e:
            failures.append(f"PVC {one.namespace}/{one.claim}: {e}")
        else:
            changed.append(one)
    return changed, failures


async def cancel_transfer(
    client: KubeClient, resource: kube.Resource[UncheckedObject], namespace: str, name: str
) -> None:
    """Request a cancel, also of a restore that is older than its definition; NotFoundError: it does not exist."""
    try:
        await client.patch(resource, namespace, name, {"spec": {"cancel": True}})
    except InvalidError:
        # The definitions of Velero 1.19 reject each change of a restore that was created before them.
        found = await client.get(resource, namespace, name)
        if "restoreType" in found["spec"]:
            raise
        await client.patch_if_unchanged(resource, found, {"spec": {"cancel": True, **PLAIN_RESTORE}})


def _is_own(group: Backup | Restore) -> bool:
    return isinstance(group, Restore) or group.origin is BackupOrigin.NODEAGENT


def _sort(groups: Iterable[_Group]) -> list[_Group]:
    return sorted(groups, key=lambda one: (-(one.created.timestamp() if one.created else 0.0), one.name))


class Backups(Collection[BackupTransfer, Backup]):
    """Backups, ours and Velero's."""

    word = "backup"
    models: Mapping[kube.Resource[UncheckedObject], type[BackupTransfer]] = {
        kube.DATA_UPLOADS: DataUpload,
        kube.POD_VOLUME_BACKUPS: PodVolumeBackup,
    }
    labels = (wire.BACKUP_LABEL, wire.VELERO_BACKUP_LABEL)

    def identify(self, meta: ObjectMeta) -> _Key | None:
        """Return who made the backup of the transfer, and its name."""
        if wire.BACKUP_LABEL in meta.labels and (name := meta.annotations.get(wire.BACKUP_ANNOTATION)):
            return BackupOrigin.NODEAGENT, name
        if name := velero_backup_of(meta):
            return BackupOrigin.VELERO, name
        return None

    def build(self, key: _Key, transfers: Sequence[BackupTransfer], unreadable: int) -> Backup:
        """Return the backup that has these transfers."""
        return build_backup(*key, transfers, unreadable)

    def document(self, found: Found[Backup]) -> BackupList:
        """Return the backups as programs see them."""
        return BackupList(backups=found.groups, notes=found.notes)

    async def acknowledge(self, name: str, at: datetime) -> tuple[list[BackupVolume], list[str], list[str]]:
        """Record on the Shrunk volumes of a backup, ours or Velero's, that it was acknowledged.

        Returns these volumes, notes about the backup, and why it is not recorded on others.

        Raises:
            NotFoundError: there is no backup of that name.
        """
        backup, notes = await self.find_one(name)
        steps = []
        for one in backup.volumes:
            if one.shrunk is not None and one.shrunk.acknowledged is None:
                text = replace(one.shrunk, acknowledged=at).to_json()
                patch = {"metadata": {"annotations": {wire.SHRUNK_ANNOTATION: text}}}
                resource = kube.BY_KIND[one.kind]
                steps.append((one, partial(self._client.patch, resource, self._namespace, one.transfer, patch)))
        acknowledged, failures = await _change(steps)
        return acknowledged, notes, failures


class Restores(Collection[RestoreTransfer, Restore]):
    """Restores of `nodeagent restore create`."""

    word = "restore"
    models: Mapping[kube.Resource[UncheckedObject], type[RestoreTransfer]] = {
        kube.DATA_DOWNLOADS: DataDownload,
        kube.POD_VOLUME_RESTORES: PodVolumeRestore,
    }
    labels = (wire.RESTORE_LABEL,)

    def identify(self, meta: ObjectMeta) -> _Key | None:
        """Return the name of the restore of the transfer."""
        name = meta.annotations.get(wire.RESTORE_ANNOTATION)
        return (BackupOrigin.NODEAGENT, name) if name else None

    def build(self, key: _Key, transfers: Sequence[RestoreTransfer], unreadable: int) -> Restore:
        """Return the restore that has these transfers."""
        return build_restore(key[1], transfers, unreadable)

    def document(self, found: Found[Restore]) -> RestoreList:
        """Return the restores as programs see them."""
        return RestoreList(restores=found.groups, notes=found.notes)


_END_TIMEOUT: Final = timedelta(minutes=1)
_POLL_SECONDS: Final = 1.0
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class WaitingPod(NamedTuple):
    """A pod in the namespace of its PVC; its PodVolumeRestore, in the agents' namespace, has the same name."""

    namespace: str
    name: str


async def cancel_restore(tools: Session, name: str) -> tuple[list[Volume], list[str]]:
    """Request the cancellation of the transfers of the restore that have not ended.

    Returns the volumes whose transfers got the request, and why others did not. The pods that waited for data are
    deleted once their transfers have ended, which is waited for.

    Raises:
        NotFoundError: there is no restore of that name.
    """
    restore, canceled, failures = await Restores(tools.client, tools.namespace).cancel(name)
    pods = [
        WaitingPod(one.namespace, one.transfer) for one in restore.volumes if one.kind == kube.POD_VOLUME_RESTORES.kind
    ]
    await delete_waiting_pods(tools, pods)
    return canceled, failures


async def delete_waiting_pods(tools: Session, pods: Iterable[WaitingPod], timeout: timedelta = _END_TIMEOUT) -> None:
    """Delete the pods whose PodVolumeRestores have ended or are gone.

    One whose data has arrived still removes the done file, and ends: it gets the time for that. One whose
    PodVolumeRestore has not ended by then stays, since a data mover may still write to its volume: a note says so. A
    pod that no restore of ours made is never deleted.
    """
    deadline = Deadline.after(tools.clock, timeout)
    for pod in pods:
        command = f"kubectl -n {pod.namespace} delete pod {pod.name}"
        try:
            if await _is_over(tools, pod, deadline):
                await tools.client.delete(kube.PODS, pod.namespace, pod.name)
            elif await _read_own(tools, pod) is not None:
                text = f"its PodVolumeRestore has not ended: delete it afterward ({command})"
                tools.on_note(f"Pod {pod.namespace}/{pod.name} stays: {text}")
        except KubeError as e:
            tools.on_note(f"Pod {pod.namespace}/{pod.name} could not be deleted ({command}): {e}")


async def _is_over(tools: Session, pod: WaitingPod, deadline: Deadline) -> bool:
    """Return whether the pod is to be deleted, at the latest at the deadline."""
    while True:
        found = await _read_own(tools, pod)
        if found is None:
            return False
        transfer = await tools.client.read(kube.POD_VOLUME_RESTORES, tools.namespace, pod.name)
        phase = "" if transfer is None else (transfer.get("status") or {}).get("phase")
        if transfer is None or (phase in FINAL_PHASES and phase != Phase.COMPLETED):
            return True
        if phase == Phase.COMPLETED and ((found.get("status") or {}).get("phase") in _ENDED or deadline.expired):
            return True
        if deadline.expired:
            return False
        await tools.clock.sleep(_POLL_SECONDS)


async def _read_own(tools: Session, pod: WaitingPod) -> Pod | None:
    found = await tools.client.read(kube.PODS, pod.namespace, pod.name)
    if found is None or wire.RESTORE_ANNOTATION not in (found["metadata"].get("annotations") or {}):
        return None
    return found
