"""What `nodeagent backup` and `nodeagent restore` print for people: tables, one page, the rows of a running one."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from client.cli.output import BAD, GOOD, HEADING, WARN, Cell, LiveRow, Printer, Styled
from client.collections.collection import VolumeProgress
from client.collections.models import Backup, BackupOrigin, BackupPhase, BackupVolume, Restore, Volume
from client.text import format_bytes
from core.models.base import format_time
from core.models.phases import Phase
from core.text import format_age

__all__ = ["VOLUMES_ONLY", "live_rows", "print_group", "print_groups", "print_volumes"]

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

_NONE: Final = "-"
_STEP_PERCENT: Final = 10
"""Of progress, that are worth a line where no terminal is."""


def print_groups(printer: Printer, groups: Sequence[Backup | Restore], now: datetime, *, wide: bool) -> None:
    """Print a row for each of the backups, or of the restores; there is at least one."""
    headers: Sequence[str] = _RESTORE_HEADERS
    if isinstance(groups[0], Backup):
        headers = _WIDE_BACKUP_HEADERS if wide else _BACKUP_HEADERS
    rows = []
    for one in groups:
        cells = _cells(one, now)
        rows.append([cells[header] for header in headers])
    printer.table(headers, rows)


def _cells(one: Backup | Restore, now: datetime) -> dict[str, Cell]:
    """Return the cells of a row by their headers."""
    cells: dict[str, Cell] = {
        "NAME": one.name,
        "PHASE": Styled(str(one.phase), _PHASE_STYLES.get(one.phase, "")),
        "VOLUMES": one.counted,
        "SIZE": format_bytes(one.total_bytes),
        "AGE": format_age(now - one.created) if one.created else _NONE,
    }
    if isinstance(one, Backup):
        cells |= {
            "LOCATION": ", ".join(one.locations),
            "EXPIRES": _expiry(one, now) or ("by schedule" if one.keep else _NONE),
            "ORIGIN": str(one.origin),
            "NAMESPACES": ", ".join(sorted({volume.namespace for volume in one.volumes})),
            "METHODS": ", ".join(sorted({str(volume.method) for volume in one.volumes})),
            "COMPLETED": format_time(one.completed) if one.completed else _NONE,
        }
    return cells


def _expiry(one: Backup, now: datetime) -> str:
    if one.expires is None:
        return ""
    return f"in {format_age(one.expires - now)}" if one.expires > now else f"{format_age(now - one.expires)} ago"


def print_group(printer: Printer, one: Backup | Restore, now: datetime) -> None:
    """Print everything about one backup or restore."""
    made_by = location = expires = ""
    if isinstance(one, Backup):
        made_by = "nodeagent backup create" if one.origin is BackupOrigin.NODEAGENT else "Velero"
        location = ", ".join(one.locations)
        expires = f"by its schedule: {one.keep}" if one.keep else ""
        if one.expires is not None:
            expires = f"{format_time(one.expires)} ({_expiry(one, now)})"
    facts: list[tuple[str, Cell]] = [
        ("Name", one.name),
        ("Made by", made_by),
        ("Phase", Styled(str(one.phase), _PHASE_STYLES.get(one.phase, ""))),
        ("Volumes", f"{one.counted} {'completed' if isinstance(one, Backup) else 'restored'}"),
        ("Missing", Styled(f"{one.missing} volumes have no transfer", BAD) if one.missing else ""),
        ("Size", format_bytes(one.total_bytes)),
        ("Location", location),
        ("Created", _moment(one.created, now)),
        ("Completed", _moment(one.completed, now)),
        ("Expires", expires),
    ]
    printer.facts([(label, value) for label, value in facts if value])
    printer.line(Styled("Volumes:", HEADING))
    print_volumes(printer, one.volumes, indent=2)


def _moment(moment: datetime | None, now: datetime) -> str:
    return f"{format_time(moment)} ({format_age(now - moment)} ago)" if moment else ""


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
    why = "" if one.phase is Phase.COMPLETED else _explain(one)
    step = percent // _STEP_PERCENT if one.phase is Phase.IN_PROGRESS else ""
    return LiveRow(name, [name, _volume_phase(one), sizes, rate, left, why], f"{one.phase} {why} {step}")
