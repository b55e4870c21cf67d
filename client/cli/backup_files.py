"""The commands `nodeagent backup ls` and `nodeagent backup cp`: files of a backup, without restoring a volume."""

import stat
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import click

from client.backups.files import CopyResult, FileCopy, FileList, FilesError, copy_files, find_place, list_files
from client.backups.unpack import check_python
from client.cli.collection_commands import complete_backups, print_volumes
from client.cli.options import UserCommand, output_option, timeout_option, working, workload_options
from client.cli.output import Cell, OutputFormat, Printer
from client.collections.collection import Backups
from client.collections.models import Backup
from client.text import format_bytes
from core.errors import ConfigError
from core.snapshot_contract import FileEntry, FileType
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_LIMIT: Final = 5000
_MOST: Final = 50_000
"""The mover ends a list at 8 MiB anyway, which a log has room for."""

_TERMINAL_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 30.0

_LS_EXAMPLES: Final = """\
examples:
  nodeagent backup ls night-1
        the volumes of the backup
  nodeagent backup ls night-1 app/data
        the root of the volume of PVC data in namespace app; `data` suffices if only one PVC has that name
  nodeagent backup ls night-1 data/etc -o json | jq -r '.entries[].name'
        a directory in it, for programs
  nodeagent backup ls night-1 disk/
        the files in a block volume, if it has ext4; `disk` alone is the device

A Job with the account of the data movers reads the repository, and is deleted. Links are not followed.
"""

_CP_EXAMPLES: Final = """\
examples:
  nodeagent backup cp night-1:app/data/etc ./etc
        a directory; as with cp -r, into ./etc if that exists, else it becomes ./etc
  nodeagent backup cp night-1:data/etc/app.conf .
        a file
  nodeagent backup cp night-1:data .
        the whole volume, as ./data; a block volume as a sparse image
  nodeagent backup cp night-1:disk/var/lib .
        a directory in a block volume, if it has ext4; `disk/` is all of it

A pod sends the files through the API server: create and get pods/exec are needed. They belong to you, with
the modes of the backup. What could leave the destination is refused by name, and the rest goes on: absolute
paths, .., links that lead out, devices. An existing file stays, unless --overwrite is given. To restore a
volume with owners and all: nodeagent restore create.
"""


_timeout_option: Final = timeout_option(timedelta(minutes=15), "the Job may take to start, and to list")


@click.command("ls", cls=UserCommand, epilog=_LS_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@click.argument("place", metavar="[PVC[/PATH]]", default="")
@click.option(
    "--limit", type=click.IntRange(1, _MOST), metavar="NUMBER", default=_LIMIT, help=f"most entries (default: {_LIMIT})"
)
@click.option("--after", metavar="NAME", default="", help="begin behind this name of the directory")
@_timeout_option
@output_option
@workload_options
async def ls(
    cluster: Connection, printer: Printer, *, name: str, place: str, form: OutputFormat, after: str, **bounds: Any
) -> None:
    """List the volumes of a backup, or the files in one."""
    backup = await _find(cluster, printer, name)
    if not place:
        printer.answer(backup, form, lambda: print_volumes(printer, backup.volumes))
        return
    wanted = find_place(backup, place)
    with working(cluster, printer, f"listing {wanted.shown}") as tools:
        found = await list_files(tools, wanted, after=after or None, **bounds)
    printer.answer(found, form, lambda: _print(printer, found, wide=form is OutputFormat.WIDE), found.notes)


async def _find(cluster: Connection, printer: Printer, name: str) -> Backup:
    backup, notes = await Backups(cluster.client, cluster.namespace).find_one(name)
    printer.notes(notes)
    return backup


def _print(printer: Printer, found: FileList, *, wide: bool) -> None:
    headers = ("MODE", "OWNER", "SIZE", "MODIFIED", *(("FILES",) if wide else ()), "NAME")
    if found.entries:
        printer.table(headers, [_row(one, wide=wide) for one in found.entries])
    else:
        printer.note(f"{found.place} is empty")


_TYPE_BITS: Final = {FileType.FILE: stat.S_IFREG, FileType.DIRECTORY: stat.S_IFDIR, FileType.LINK: stat.S_IFLNK}


def _row(one: FileEntry, *, wide: bool) -> list[Cell]:
    directory = one.type is FileType.DIRECTORY
    permissions = int(one.mode or "0", 8)
    return [
        stat.filemode(_TYPE_BITS.get(one.type, 0) | permissions),
        f"{one.user_id}:{one.group_id}",
        format_bytes(one.size_bytes),
        one.modified[:19].replace("T", " ") if one.modified else "-",
        *((str(one.files) if directory else "-",) if wide else ()),
        f"{one.name}/" if directory and one.name else one.name,
    ]


@click.command("cp", cls=UserCommand, epilog=_CP_EXAMPLES)
@click.argument("source", metavar="NAME:PVC[/PATH]")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--overwrite", is_flag=True, help="replace files that exist")
@click.option("--device", is_flag=True, help="copy the device, also of a volume with a file system")
@_timeout_option
@workload_options
async def copy(
    *, source: str, destination: Path, overwrite: bool, device: bool, timeout: timedelta, access: ClusterAccess
) -> None:
    """Copy a file or a directory of a backup to this machine."""
    check_python()
    name, _, text = source.partition(":")
    if not name or not text.strip("/"):
        raise ConfigError(f'"{source}" names no file of a backup: expected NAME:PVC/PATH, such as night-1:data/etc')
    printer = Printer()
    async with connect(access) as cluster:
        place = find_place(await _find(cluster, printer, name), text)
        if device and place.path:
            raise ConfigError(f"--device copies a volume as a whole, not {place.shown}")
        if device and not place.device:
            # The only file of a volume would pass for its device.
            raise FilesError(f"{place.shown} was backed up as files: the backup has no device of it")
        with working(cluster, printer, f"copying {place.shown}") as tools:
            copied = FileCopy(
                tools,
                cluster.pod_exec,
                place,
                destination,
                on_bytes=_Meter(tools.on_progress).show,
                on_refused=lambda entry, why: printer.note(f"{entry} is not copied: {why}"),
                overwrite=overwrite,
            )
            done = await copy_files(copied, timeout=timeout)
    _report(printer, done)


def _report(printer: Printer, done: CopyResult) -> None:
    files = "1 file" if done.files == 1 else f"{done.files} files"
    printer.line(f"copied {files}, {format_bytes(done.size_bytes)}, to {done.target}")
    if done.note:
        printer.note(done.note)
    if done.refused:
        raise FilesError(f"{done.refused} entries were not copied: the notes name them")


class _Meter:
    """Shows how much was copied: often on a terminal, elsewhere, where each text is a line, rarely."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._pause_seconds = _TERMINAL_SECONDS if sys.stderr.isatty() else _LINE_SECONDS
        self._start = self._last = time.monotonic()

    def show(self, done: int, files: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < self._pause_seconds:
            return
        self._last = now
        rate = format_bytes(int(done / (now - self._start)))
        # How much a directory in a device has is not known before.
        whole = f" of {format_bytes(total)}" if total else ""
        self._show(f"{format_bytes(done)}{whole}, {files} files, {rate}/s")
