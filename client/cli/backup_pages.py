"""What `nodeagent backup` prints for people: tables, the page about one backup, the rows of a running one."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from client.backups.progress import MovingVolume, VolumeProgress
from client.backups.view import Backup, BackupList, BackupOrigin, BackupPhase, BackupVolume
from client.cli.output import BAD, GOOD, HEADING, WARN, Cell, LiveRow, Printer, Styled
from client.text import format_age, format_bytes
from core.models.base import format_time
from core.models.phases import Phase

__all__ = [
    "PHASE_STYLES",
    "VOLUMES_ONLY",
    "VOLUME_STYLES",
    "describe_end",
    "explain_volume",
    "live_rows",
    "print_backup",
    "print_list",
    "print_volumes",
]

VOLUMES_ONLY: Final = "the backup has the data of volumes only: no manifests, and no hooks run"

_HEADERS: Final = ("NAME", "PHASE", "VOLUMES", "SIZE", "LOCATION", "AGE", "EXPIRES")
_WIDE_HEADERS: Final = (*_HEADERS, "ORIGIN", "NAMESPACES", "METHODS", "COMPLETED")
_VOLUME_HEADERS: Final = ("PVC", "METHOD", "PHASE", "SIZE", "TRANSFER", "MESSAGE")

PHASE_STYLES: Final = {
    BackupPhase.COMPLETED: GOOD,
    BackupPhase.FAILED: BAD,
    BackupPhase.PARTIALLY_FAILED: BAD,
    BackupPhase.INCOMPLETE: BAD,
    BackupPhase.CANCELED: WARN,
    BackupPhase.CANCELING: WARN,
}
VOLUME_STYLES: Final = {Phase.COMPLETED: GOOD, Phase.FAILED: BAD, Phase.CANCELED: WARN, Phase.CANCELING: WARN}

_NONE: Final = "-"
_STEP_PERCENT: Final = 10
"""Of progress, that are worth a line where no terminal is."""


def print_list(printer: Printer, found: BackupList, now: datetime, *, wide: bool = False) -> None:
    """Print a row for each backup."""
    rows = [_row(one, now, wide=wide) for one in found.backups]
    printer.table(_WIDE_HEADERS if wide else _HEADERS, rows)


def _row(one: Backup, now: datetime, *, wide: bool) -> list[Cell]:
    cells: list[Cell] = [
        one.name,
        Styled(str(one.phase), PHASE_STYLES.get(one.phase, "")),
        one.counted,
        format_bytes(one.total_bytes),
        ", ".join(one.locations),
        format_age(now - one.created) if one.created else _NONE,
        _expiry(one, now) or _NONE,
    ]
    if not wide:
        return cells
    namespaces = ", ".join(sorted({volume.namespace for volume in one.volumes}))
    methods = ", ".join(sorted({str(volume.method) for volume in one.volumes}))
    return [*cells, str(one.origin), namespaces, methods, format_time(one.completed) if one.completed else _NONE]


def _expiry(one: Backup, now: datetime) -> str:
    if one.expires is None:
        return ""
    return f"in {format_age(one.expires - now)}" if one.expires > now else f"{format_age(now - one.expires)} ago"


def print_backup(printer: Printer, one: Backup, now: datetime) -> None:
    """Print everything about one backup."""
    facts: list[tuple[str, Cell]] = [
        ("Name", one.name),
        ("Made by", "nodeagent backup create" if one.origin is BackupOrigin.NODEAGENT else "Velero"),
        ("Phase", Styled(str(one.phase), PHASE_STYLES.get(one.phase, ""))),
        ("Volumes", f"{one.counted} completed"),
        ("Missing", Styled(f"{one.missing} volumes have no transfer", BAD) if one.missing else ""),
        ("Size", format_bytes(one.total_bytes)),
        ("Location", ", ".join(one.locations)),
        ("Created", _moment(one.created, now)),
        ("Completed", _moment(one.completed, now)),
        ("Expires", f"{format_time(one.expires)} ({_expiry(one, now)})" if one.expires else ""),
    ]
    printer.facts([(label, value) for label, value in facts if value])
    printer.line(Styled("Volumes:", HEADING))
    print_volumes(printer, one.volumes, indent=2)


def _moment(moment: datetime | None, now: datetime) -> str:
    return f"{format_time(moment)} ({format_age(now - moment)} ago)" if moment else ""


def print_volumes(printer: Printer, volumes: Sequence[BackupVolume], *, indent: int = 0) -> None:
    """Print a row for each volume."""
    rows: list[list[Cell]] = [
        [
            f"{one.namespace}/{one.claim}",
            str(one.method),
            Styled(str(one.phase), VOLUME_STYLES.get(one.phase, "")),
            format_bytes(one.total_bytes),
            f"{one.kind}/{one.transfer}",
            explain_volume(one),
        ]
        for one in volumes
    ]
    printer.table(_VOLUME_HEADERS, rows, indent=indent)


def explain_volume(one: MovingVolume) -> str:
    """Return what the volume waits for, or why it failed, with the number of an attempt after the first one."""
    attempt = f"attempt {one.attempt}" if one.attempt > 1 and not one.phase.final else ""
    reason = one.reason if one.reason and not one.phase.final else ""
    return ": ".join(filter(None, (attempt, reason, one.message)))


def live_rows(volumes: Sequence[VolumeProgress]) -> list[LiveRow]:
    """Return one row for each volume: bytes, rate, time that remains, and what it waits for."""
    return [_live_row(one) for one in volumes]


def _live_row(progress: VolumeProgress) -> LiveRow:
    one = progress.volume
    name, total = f"{one.namespace}/{one.claim}", one.total_bytes
    percent = min(100, one.bytes_done * 100 // total) if total else 0
    # A data mover that has not counted the volume yet reports as total what is done.
    counted = one.phase is not Phase.IN_PROGRESS or one.bytes_done < total
    done = format_bytes(one.bytes_done)
    sizes = (f"{done} / {format_bytes(total)} {percent}%" if counted else done) if total else ""
    rate = f"{format_bytes(int(progress.bytes_per_second))}/s" if progress.bytes_per_second else ""
    left = f"{format_age(progress.remaining)} left" if progress.remaining is not None else ""
    why = "" if one.phase is Phase.COMPLETED else explain_volume(one)
    phase = Styled(str(one.phase), VOLUME_STYLES.get(one.phase, ""))
    step = percent // _STEP_PERCENT if one.phase is Phase.IN_PROGRESS else ""
    return LiveRow(name, [name, phase, sizes, rate, left, why], f"{one.phase} {why} {step}")


def describe_end(one: Backup) -> str:
    """Return one sentence about a backup that has ended."""
    return f"backup {one.name} is {one.phase}: {one.counted} volumes, {format_bytes(one.total_bytes)}"
