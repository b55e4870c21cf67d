"""What commands about backups and about restores have in common: complete names, get, describe, cancel, pages.

With `--from-storage-location`, `backup get` and `restore create` list what a bucket holds, by a Job.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar

import click

from client.backups.manifests import BackupError
from client.cli.options import command_for, completing, working
from client.cli.output import BAD, GOOD, HEADING, NONE, WARN, Cell, LiveRow, OutputFormat, Printer, Styled
from client.collections.collection import Backups, Collection, Found, Restores, VolumeProgress
from client.collections.models import (
    Backup,
    BackupOrigin,
    BackupPhase,
    BackupTransfer,
    BackupVolume,
    Restore,
    RestoreTransfer,
    Volume,
)
from client.restores.sources import StoredList, list_location
from client.text import format_bytes, format_distance, format_moment, missing
from core.clock import SystemClock
from core.kube.errors import UnauthorizedError, UnreachableError
from core.models.base import format_time, parse_time
from core.models.names import DATA_UPLOAD_REQUESTER, SNAPSHOT_REQUESTERS
from core.models.phases import Phase
from core.snapshot_contract import StoredSnapshot
from core.text import format_age
from nodeagent.runtime.connection import ClusterAccess, Connection

VOLUMES_ONLY: Final = "the backup has the data of volumes only: no manifests, and no hooks run"

_BACKUP_HEADERS: Final = ("NAME", "PHASE", "VOLUMES", "SIZE", "LOCATION", "AGE", "EXPIRES")
_WIDE_BACKUP_HEADERS: Final = (*_BACKUP_HEADERS, "ORIGIN", "NAMESPACES", "METHODS", "COMPLETED")
_RESTORE_HEADERS: Final = ("NAME", "PHASE", "VOLUMES", "SIZE", "AGE")

_PHASE_STYLES: Final = {
    BackupPhase.COMPLETED: GOOD,
    BackupPhase.FAILED: BAD,
    BackupPhase.PARTIALLY_FAILED: BAD,
    BackupPhase.INCOMPLETE: BAD,
    BackupPhase.CANCELED: WARN,
    BackupPhase.CANCELING: WARN,
}
_VOLUME_STYLES: Final = {Phase.COMPLETED: GOOD, Phase.FAILED: BAD, Phase.CANCELED: WARN, Phase.CANCELING: WARN}

_STEP_PERCENT: Final = 10
"""Of progress, that are worth a line where no terminal is."""


def print_groups(printer: Printer, groups: Sequence[Backup | Restore], now: datetime, *, wide: bool) -> None:
    """Print a row for each of the backups, or of the restores; there is at least one."""
    headers: Sequence[str] = _RESTORE_HEADERS
    if isinstance(groups[0], Backup):
        headers = _WIDE_BACKUP_HEADERS if wide else _BACKUP_HEADERS
    rows = [_cells(one, now) for one in groups]
    printer.table(headers, [[cells[header] for header in headers] for cells in rows])


def _cells(one: Backup | Restore, now: datetime) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        "NAME": one.name,
        "PHASE": Styled(str(one.phase), _PHASE_STYLES.get(one.phase, "")),
        "VOLUMES": one.counted,
        "SIZE": format_bytes(one.total_bytes),
        "AGE": format_age(now - one.created) if one.created else NONE,
    }
    if isinstance(one, Backup):
        cells |= {
            "LOCATION": ", ".join(one.locations),
            "EXPIRES": format_distance(one.expires, now) if one.expires else "by schedule" if one.keep else NONE,
            "ORIGIN": str(one.origin),
            "NAMESPACES": ", ".join(sorted({volume.namespace for volume in one.volumes})),
            "METHODS": ", ".join(sorted({str(volume.method) for volume in one.volumes})),
            "COMPLETED": format_time(one.completed) if one.completed else NONE,
        }
    return cells


def print_group(printer: Printer, one: Backup | Restore, now: datetime) -> None:
    """Print everything about one backup or restore."""
    made_by = location = expires = ""
    if isinstance(one, Backup):
        made_by = "nodeagent backup create" if one.origin is BackupOrigin.NODEAGENT else "Velero"
        location = ", ".join(one.locations)
        expires = format_moment(one.expires, now) or (f"by its schedule: {one.keep}" if one.keep else "")
    facts: list[tuple[str, Cell]] = [
        ("Name", one.name),
        ("Made by", made_by),
        ("Phase", Styled(str(one.phase), _PHASE_STYLES.get(one.phase, ""))),
        ("Volumes", f"{one.counted} {'completed' if isinstance(one, Backup) else 'restored'}"),
        ("Missing", Styled(f"{one.missing} volumes have no transfer", BAD) if one.missing else ""),
        ("Unreadable", Styled(f"{one.unreadable} transfers cannot be read", BAD) if one.unreadable else ""),
        ("Size", format_bytes(one.total_bytes)),
        ("Location", location),
        ("Created", format_moment(one.created, now)),
        ("Completed", format_moment(one.completed, now)),
        ("Expires", expires),
    ]
    printer.facts(facts)
    printer.line(Styled("Volumes:", HEADING))
    print_volumes(printer, one.volumes, indent=2)


def print_volumes(printer: Printer, volumes: Sequence[Volume], *, indent: int = 0) -> None:
    """Print a row for each volume; there is at least one."""
    method = ("METHOD",) if isinstance(volumes[0], BackupVolume) else ()
    rows: list[list[Cell]] = [
        [
            f"{one.namespace}/{one.claim}",
            *([str(one.method)] if isinstance(one, BackupVolume) else []),
            _volume_phase(one),
            format_bytes(one.total_bytes),
            f"{one.kind}/{one.transfer}",
            _explain(one),
        ]
        for one in volumes
    ]
    printer.table(("PVC", *method, "PHASE", "SIZE", "TRANSFER", "MESSAGE"), rows, indent=indent)


def _volume_phase(one: Volume) -> Styled:
    return Styled(str(one.phase), _VOLUME_STYLES.get(one.phase, ""))


def _explain(one: Volume) -> str:
    """Return what the volume waits for, or why it failed, with the number of an attempt after the first one."""
    attempt = f"attempt {one.attempt}" if one.attempt > 1 and not one.phase.final else ""
    reason = one.reason if one.reason and not one.phase.final else ""
    return ": ".join(filter(None, (attempt, reason, one.message)))


def _live_row(progress: VolumeProgress) -> LiveRow:
    """Return the row of a volume: bytes, rate, time that remains, and what it waits for."""
    one = progress.volume
    name, total = f"{one.namespace}/{one.claim}", one.total_bytes
    percent = min(100, one.bytes_done * 100 // total) if total else 0
    # A data mover that has not counted the volume yet reports as total what is done.
    counted = one.phase is not Phase.IN_PROGRESS or one.bytes_done < total
    done = format_bytes(one.bytes_done)
    sizes = (f"{done} / {format_bytes(total)} {percent}%" if counted else done) if total else ""
    rate = f"{format_bytes(int(progress.bytes_per_second))}/s" if progress.bytes_per_second else ""
    left = f"{format_age(progress.remaining)} left" if progress.remaining is not None else ""
    why = "" if one.phase is Phase.COMPLETED else _explain(one)
    step = percent // _STEP_PERCENT if one.phase is Phase.IN_PROGRESS else ""
    return LiveRow(name, [name, _volume_phase(one), sizes, rate, left, why], f"{one.phase} {why} {step}")


_Transfer = TypeVar("_Transfer", BackupTransfer, RestoreTransfer)
_Group = TypeVar("_Group", bound=Backup | Restore)


def _completion(
    kind: type[Collection[_Transfer, _Group]],
) -> Callable[[click.Context, click.Parameter, str], Sequence[str]]:
    async def read(cluster: Connection) -> list[str]:
        return [one.name for one in (await kind(cluster.client, cluster.namespace).list_all()).groups]

    return completing(read)


complete_backups: Final = _completion(Backups)
complete_restores: Final = _completion(Restores)


async def get_groups(
    kind: type[Collection[_Transfer, _Group]],
    names: Sequence[str],
    form: OutputFormat,
    cluster: Connection,
    printer: Printer,
    *,
    volume_namespace: str = "",
) -> None:
    """Print a row for each group of these names, or for all; with `volume_namespace`, only those with volumes of it."""
    collection = kind(cluster.client, cluster.namespace)
    found = await collection.find(names)
    groups = [
        one
        for one in found.groups
        if not volume_namespace or any(volume.namespace == volume_namespace for volume in one.volumes)
    ]
    chosen = f" with volumes of namespace {volume_namespace}" if volume_namespace else ""

    printer.answer(
        collection.document(Found(groups, found.notes)),
        form,
        lambda: print_groups(printer, groups, cluster.time.now(), wide=form is OutputFormat.WIDE),
        found.notes,
        absent="" if groups else f"there is no {kind.word}{chosen} in namespace {cluster.namespace}",
    )


async def show_group(
    kind: type[Collection[_Transfer, _Group]], name: str, form: OutputFormat, cluster: Connection, printer: Printer
) -> None:
    """Print everything about one group."""
    one, notes = await kind(cluster.client, cluster.namespace).find_one(name)
    printer.answer(one, form, lambda: print_group(printer, one, cluster.time.now()))
    printer.notes(notes)


def print_canceled(
    printer: Printer,
    word: str,
    name: str,
    *,
    canceled: Sequence[Volume],
    failures: Sequence[str],
    access: ClusterAccess,
) -> None:
    """Print the volumes whose transfers have got a cancel request; BackupError: `failures` says why others have not."""
    if canceled:
        print_volumes(printer, canceled)
        command = command_for(access, f"nodeagent {word} describe {name}")
        printer.note(f"cancel requested: {command} shows how it ends")
    elif not failures:
        printer.note(f"{word} {name} has ended already: nothing to cancel")
    check_changed(printer, failures, f"canceled in {word} {name}")


def check_changed(printer: Printer, failures: Sequence[str], what: str) -> None:
    """Name all volumes that were not changed; BackupError: there are some."""
    printer.notes(failures)
    if failures:
        raise BackupError(f"not all volumes are {what}, {len(failures)} are not: {failures[0]}")


@dataclass
class Creation(Generic[_Transfer, _Group]):
    """One run of a command that creates a group; `started` is set once something of it exists.

    With `waiting_pods`, each volume has a pod that waits for its data.
    """

    kind: type[Collection[_Transfer, _Group]]
    name: str
    form: OutputFormat
    access: ClusterAccess
    printer: Printer
    wait: bool
    waiting_pods: bool = False
    started: bool = False

    def run(self, create: Coroutine[Any, Any, None]) -> None:
        """Run the command; an interruption, or a cluster that is lost, ends no transfer, and a note says so."""
        try:
            asyncio.run(create)
        except (KeyboardInterrupt, UnreachableError, UnauthorizedError):
            if self.started:
                pods = " and deletes its pods, also once it has ended" if self.waiting_pods else ""
                shown, ended = self._command("describe"), self._command("cancel")
                self.printer.note(f"the {self.kind.word} goes on: {shown} shows it, {ended} ends it{pods}")
            raise

    async def follow(self, cluster: Connection) -> _Group:
        """Return the group, if the user asked to wait once all its transfers have ended."""
        collection = self.kind(cluster.client, cluster.namespace)
        if not self.wait:
            return await collection.get_own(self.name)
        with self.printer.live() as show:
            return await collection.wait(self.name, SystemClock(), lambda volumes: show([*map(_live_row, volumes)]))

    def print(self, group: _Group, *, created: bool) -> None:
        """Print the group; without `created`, all of it existed before."""
        printer, word = self.printer, self.kind.word
        if not created:
            since = f" since {format_time(group.created)}" if group.created else ""
            printer.note(f"{word} {self.name} exists{since}: nothing was created")
        if self.form.for_programs:
            printer.document(group.to_wire(), self.form)
        elif self.wait:
            size = format_bytes(group.total_bytes)
            printer.line(f"{word} {self.name} is {group.phase}: {group.counted} volumes, {size}")
        else:
            print_volumes(printer, group.volumes)
            pods = f", {self._command('cancel')} deletes its pods once it has ended" if self.waiting_pods else ""
            start = f"the {word} was started: " if created else ""
            printer.note(f"{start}{self._command('describe')} shows it{pods}")

    def _command(self, verb: str) -> str:
        return command_for(self.access, f"nodeagent {self.kind.word} {verb} {self.name}")


_HEADERS: Final = ("BACKUP", "PVC", "CLASS", "SIZE", "DATA", "AGE", "SNAPSHOT")
_WIDE_HEADERS: Final = (*_HEADERS, "MODE", "ACCESS", "METHOD", "STARTED", "CLUSTER", "SOURCE")

_TIMEOUT: Final = timedelta(minutes=15)


async def read_stored(cluster: Connection, printer: Printer, location: str, namespaces: Sequence[str]) -> StoredList:
    """Return the snapshots of the volumes of these namespaces, or all in the location, and show what the Job does."""
    with working(cluster, printer, f"listing the snapshots in {location}") as tools:
        return await list_location(tools, location, volume_namespaces=namespaces, timeout=_TIMEOUT)


async def get_stored(
    location: str, names: Sequence[str], namespace: str, *, form: OutputFormat, cluster: Connection, printer: Printer
) -> None:
    """Print what the location holds: of the backups of these names, or all; of one namespace, if it is not empty.

    Raises:
        NotFoundError: there is no backup of such a name.
    """
    found = await read_stored(cluster, printer, location, (namespace,) if namespace else ())
    if names:
        found = _of_names(found, names)
    chosen = f" of namespace {namespace}" if namespace else ""

    printer.answer(
        found,
        form,
        lambda: _print(printer, found, cluster.time.now(), wide=form is OutputFormat.WIDE),
        found.notes,
        absent="" if found.snapshots else f"there is no snapshot{chosen} in BackupStorageLocation {location}",
    )


def _of_names(found: StoredList, names: Sequence[str]) -> StoredList:
    known = {name for one in found.snapshots for name in (one.backup, one.backup_uid) if name}
    for name in names:
        if name not in known:
            raise missing(f"there is no backup {name} in BackupStorageLocation {found.location}", name, known)
    kept = [one for one in found.snapshots if {one.backup, one.backup_uid} & set(names)]
    return StoredList(location=found.location, snapshots=kept, notes=found.notes)


def _print(printer: Printer, found: StoredList, now: datetime, *, wide: bool = False) -> None:
    """Print a row for each snapshot in the bucket; without the wide columns, a heading for each cluster."""
    if wide:
        printer.table(_WIDE_HEADERS, [_row(one, now) + _wide_cells(one) for one in found.snapshots])
        return
    for cluster in dict.fromkeys(one.cluster for one in found.snapshots):
        rows = [_row(one, now) for one in found.snapshots if one.cluster == cluster]
        printer.section(f"Cluster {cluster}:" if cluster else "No cluster is named:", _HEADERS, rows)


def _row(one: StoredSnapshot, now: datetime) -> list[Cell]:
    claim = one.claim
    return [
        one.backup or (f"Velero's {one.backup_uid}" if one.backup_uid else NONE),
        f"{claim.namespace}/{claim.name}" if claim else NONE,
        (claim and claim.storage_class) or NONE,
        (claim and claim.size) or NONE,
        format_bytes(one.bytes),
        format_age(now - parse_time(one.start)) if one.start else NONE,
        one.id,
    ]


def _wide_cells(one: StoredSnapshot) -> list[Cell]:
    claim = one.claim if one.described else None
    method = "csi-snapshot" if one.requester == DATA_UPLOAD_REQUESTER else "fs-backup"
    return [
        claim.volume_mode if claim else NONE,
        ", ".join(claim.access_modes) if claim and claim.access_modes else NONE,
        method if one.requester in SNAPSHOT_REQUESTERS else one.requester or NONE,
        one.start or NONE,
        one.cluster or NONE,
        one.source or "",
    ]
