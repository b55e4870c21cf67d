"""The option `--from-storage-location` of `backup get` and `restore create`: a Job lists what a bucket holds."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from client.cli.job_tools import build_job_tools
from client.cli.output import OutputFormat, Printer
from client.cli.restore_pages import print_stored
from client.restores.stored import StoredList, list_stored
from core.clock import SystemClock
from nodeagent.config.keys import missing
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["get_stored", "read_stored"]

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
            print_stored(printer, found, SystemClock().now(), wide=form is OutputFormat.WIDE)
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
