"""The option `--from-storage-location` of `backup get` and `restore create`: a Job lists what a bucket holds."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from client.cli.job_tools import build_job_tools
from client.cli.output import HEADING, Cell, OutputFormat, Printer, Styled
from client.restores.sources import StoredList, list_stored
from client.text import format_bytes
from core.clock import SystemClock
from core.models.base import parse_time
from core.models.names import DATA_UPLOAD_REQUESTER, SNAPSHOT_REQUESTERS
from core.snapshot_contract import StoredSnapshot
from core.text import format_age
from nodeagent.config.schema import missing
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["get_stored", "read_stored"]

_HEADERS: Final = ("BACKUP", "PVC", "CLASS", "SIZE", "DATA", "AGE", "SNAPSHOT")
_WIDE_HEADERS: Final = (*_HEADERS, "MODE", "ACCESS", "METHOD", "STARTED", "CLUSTER", "SOURCE")
_NONE: Final = "-"

_TIMEOUT: Final = timedelta(minutes=15)


async def read_stored(cluster: Connection, printer: Printer, location: str, namespaces: Sequence[str]) -> StoredList:
    """Return the snapshots of the volumes of these namespaces, or all in the location, and show what the Job does."""
    with printer.progress(f"listing the snapshots in {location}") as show:
        tools = build_job_tools(cluster, show, printer.note)
        return await list_stored(tools, location, volume_namespaces=namespaces, timeout=_TIMEOUT)


def get_stored(location: str, names: Sequence[str], namespace: str, form: OutputFormat, access: ClusterAccess) -> None:
    """Print what the location holds: of the backups of these names, or all; of one namespace, if it is not empty.

    Raises:
        NotFoundError: there is no backup of such a name.
    """
    asyncio.run(_get(location, names, namespace, form, access))


async def _get(location: str, names: Sequence[str], namespace: str, form: OutputFormat, access: ClusterAccess) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        found = await read_stored(cluster, printer, location, (namespace,) if namespace else ())
    if names:
        found = _of_names(found, names)

    def print_page() -> None:
        if found.snapshots:
            _print(printer, found, SystemClock().now(), wide=form is OutputFormat.WIDE)
        else:
            printer.note(f"there is no snapshot in BackupStorageLocation {location}")

    printer.answer(found, form, print_page, found.notes)


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
        printer.line(Styled(f"Cluster {cluster}:" if cluster else "No cluster is named:", HEADING))
        rows = [_row(one, now) for one in found.snapshots if one.cluster == cluster]
        printer.table(_HEADERS, rows, indent=2)


def _row(one: StoredSnapshot, now: datetime) -> list[Cell]:
    claim = one.claim
    return [
        one.backup or (f"Velero's {one.backup_uid}" if one.backup_uid else _NONE),
        f"{claim.namespace}/{claim.name}" if claim else _NONE,
        (claim.storage_class if claim else "") or _NONE,
        (claim.size if claim else "") or _NONE,
        format_bytes(one.bytes),
        format_age(now - parse_time(one.start)) if one.start else _NONE,
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
