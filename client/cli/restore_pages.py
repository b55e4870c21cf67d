"""What `nodeagent restore` prints for people, and the table of what a bucket holds."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from client.cli.backup_pages import PHASE_STYLES, VOLUME_STYLES, explain_volume
from client.cli.output import BAD, HEADING, Cell, Printer, Styled
from client.restores.stored import StoredList
from client.restores.view import Restore, RestoreList, RestoreVolume
from client.text import format_age, format_bytes
from core.models.base import format_time, parse_time
from core.models.names import DATA_UPLOAD_REQUESTER, SNAPSHOT_REQUESTERS
from core.snapshot_contract import StoredSnapshot

__all__ = ["print_restore", "print_restored_volumes", "print_restores", "print_stored"]

_HEADERS: Final = ("NAME", "PHASE", "VOLUMES", "SIZE", "AGE")
_VOLUME_HEADERS: Final = ("PVC", "PHASE", "SIZE", "TRANSFER", "MESSAGE")
_STORED_HEADERS: Final = ("BACKUP", "PVC", "CLASS", "SIZE", "DATA", "AGE", "SNAPSHOT")
_WIDE_STORED_HEADERS: Final = (*_STORED_HEADERS, "MODE", "ACCESS", "METHOD", "STARTED", "CLUSTER", "SOURCE")
_NONE: Final = "-"


def print_restores(printer: Printer, found: RestoreList, now: datetime) -> None:
    """Print a row for each restore."""
    rows: list[list[Cell]] = [
        [one.name, _phase(one), one.counted, format_bytes(one.total_bytes), _age(one.created, now)]
        for one in found.restores
    ]
    printer.table(_HEADERS, rows)


def _phase(one: Restore) -> Styled:
    return Styled(str(one.phase), PHASE_STYLES.get(one.phase, ""))


def _age(moment: datetime | None, now: datetime) -> str:
    return format_age(now - moment) if moment else _NONE


def print_restore(printer: Printer, one: Restore, now: datetime) -> None:
    """Print everything about one restore."""
    facts: list[tuple[str, Cell]] = [
        ("Name", one.name),
        ("Phase", _phase(one)),
        ("Volumes", f"{one.counted} restored"),
        ("Missing", Styled(f"{one.missing} volumes have no transfer", BAD) if one.missing else ""),
        ("Size", format_bytes(one.total_bytes)),
        ("Created", f"{format_time(one.created)} ({_age(one.created, now)} ago)" if one.created else ""),
        ("Completed", f"{format_time(one.completed)} ({_age(one.completed, now)} ago)" if one.completed else ""),
    ]
    printer.facts([(label, value) for label, value in facts if value])
    printer.line(Styled("Volumes:", HEADING))
    print_restored_volumes(printer, one.volumes, indent=2)


def print_restored_volumes(printer: Printer, volumes: Sequence[RestoreVolume], *, indent: int = 0) -> None:
    """Print a row for each volume."""
    rows: list[list[Cell]] = [
        [
            f"{one.namespace}/{one.claim}",
            Styled(str(one.phase), VOLUME_STYLES.get(one.phase, "")),
            format_bytes(one.total_bytes),
            f"{one.kind}/{one.transfer}",
            explain_volume(one),
        ]
        for one in volumes
    ]
    printer.table(_VOLUME_HEADERS, rows, indent=indent)


def print_stored(printer: Printer, found: StoredList, now: datetime, *, wide: bool = False) -> None:
    """Print a row for each snapshot in the bucket; without the wide columns, a heading for each cluster."""
    if wide:
        printer.table(_WIDE_STORED_HEADERS, [_stored_row(one, now) + _wide_cells(one) for one in found.snapshots])
        return
    for cluster in dict.fromkeys(one.cluster for one in found.snapshots):
        printer.line(Styled(f"Cluster {cluster}:" if cluster else "No cluster is named:", HEADING))
        rows = [_stored_row(one, now) for one in found.snapshots if one.cluster == cluster]
        printer.table(_STORED_HEADERS, rows, indent=2)


def _stored_row(one: StoredSnapshot, now: datetime) -> list[Cell]:
    claim = one.claim
    return [
        one.backup or (f"Velero's {one.backup_uid}" if one.backup_uid else _NONE),
        f"{claim.namespace}/{claim.name}" if claim else _NONE,
        (claim.storage_class if claim else "") or _NONE,
        (claim.size if claim else "") or _NONE,
        format_bytes(one.bytes),
        _age(parse_time(one.start), now) if one.start else _NONE,
        one.id,
    ]


def _wide_cells(one: StoredSnapshot) -> list[Cell]:
    claim = one.claim if one.described else None
    method = "csi-snapshot" if one.requester == DATA_UPLOAD_REQUESTER else "fs-backup"
    return [
        claim.volume_mode if claim else _NONE,
        ", ".join(claim.access_modes) if claim and claim.access_modes else _NONE,
        method if one.requester in SNAPSHOT_REQUESTERS else one.requester or _NONE,
        one.start or _NONE,
        one.cluster or _NONE,
        one.source,
    ]
