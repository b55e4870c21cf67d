"""The command `nodeagent backup create`: volumes to a bucket, without a Velero server."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import click

from client.backups.create import check_backup, start_backup, sum_up_missing
from client.backups.follow import read_own_backup, wait_for_backup
from client.backups.methods import BackupError
from client.backups.moving import explain_end
from client.backups.objects import BackupRequest
from client.backups.plan import BackupTools, Choice, plan_backup
from client.backups.view import Backup
from client.cli.backup_options import backup_options
from client.cli.backup_pages import VOLUMES_ONLY, describe_end, live_rows, print_volumes
from client.cli.options import DurationType, UserCommand, command_for, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from core.clock import SystemClock
from core.models.base import format_time
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["create"]

_EXAMPLES: Final = """\
examples:
  nodeagent backup create before-upgrade --pvc app/data --wait
        one volume; wait until its data is in the bucket
  nodeagent backup create night-1 --pvc app/data --pvc db/data --ttl 720h
        two volumes, to be kept for 30 days; then a schedule with --ttl deletes them
  nodeagent backup create night-1 -n app -l tier=web
        all PVCs of the namespace app with that label; -l "" is all of them
  nodeagent backup create files --pvc app/data --method fs-backup -o json
        from a running pod, without a snapshot

All volumes are checked before anything is created. The command may be repeated: what exists of the
backup stays. --wait shows each volume; Ctrl-C ends the waiting, and not the backup.

A backup has the data of volumes only. It has no manifests, and runs no hooks: stop or flush a database
first, or use Velero. It is crash-consistent with csi-snapshot; fs-backup reads files that may change.

exit codes:
  0  created; with --wait: every volume is in the bucket
  1  a volume cannot be backed up, or is not in the backup; the message names it
  2  invalid command line, or the cluster is not reachable
"""


@dataclass
class _Run:
    """One run of the command; `started` is set once something of the backup exists."""

    request: BackupRequest
    choice: Choice
    form: OutputFormat
    wait: bool
    printer: Printer
    access: ClusterAccess
    started: bool = False


@click.command("create", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="NAME")
@backup_options
@click.option(
    "--ttl", type=DurationType(), metavar="DURATION", help="when it expires, which get shows (default: never)"
)
@click.option(
    "--read-all-files", is_flag=True, help="also read files whose size and time are unchanged since the last backup"
)
@click.option("--wait", "-w", is_flag=True, help="wait until every volume has ended, and show the progress")
@output_option
@workload_options
def create(name: str, access: ClusterAccess, form: OutputFormat, choice: Choice, **given: Any) -> None:  # noqa: ANN401 - click's
    """Back up volumes: their data only, without manifests and hooks."""
    wait: bool = given.pop("wait")
    request = BackupRequest(name=name, namespace=access.namespace, **given)
    run = _Run(request, choice, form, wait=wait, printer=Printer(), access=access)
    try:
        asyncio.run(_create(run))
    except KeyboardInterrupt:
        if run.started:
            shown, ended = (command_for(access, f"nodeagent backup {verb} {name}") for verb in ("describe", "cancel"))
            run.printer.note(f"the backup goes on: {shown} shows it, {ended} ends it")
        raise


async def _create(run: _Run) -> None:
    async with connect(run.access) as cluster:
        tools = BackupTools(cluster.client, SystemClock(), run.printer.note, lambda: cluster.time.date)
        with run.printer.progress(f"checking the volumes of {run.request.name}"):
            volumes = await plan_backup(tools, run.request, run.choice)
            await check_backup(tools, volumes)
        run.started = True
        missing = await start_backup(tools, volumes)
        backup = await _follow(run, cluster, tools)
        _print(run, backup, created=bool(volumes))
    if missing:
        state = f"{len(volumes) - len(missing)} of {len(volumes)} volumes were started"
        raise BackupError(f"{sum_up_missing(missing)}; {state}: repeat the command, or cancel the backup")
    if run.wait and (failure := explain_end(backup)):
        raise BackupError(f"backup {backup.name} is {backup.phase}: {failure}")


async def _follow(run: _Run, cluster: Connection, tools: BackupTools) -> Backup:
    """Wait for the backup if the user asked for it, and return it."""
    name = run.request.name
    if run.wait:
        with run.printer.live() as show:
            return await wait_for_backup(tools, cluster.namespace, name, lambda rows: show(live_rows(rows)))
    return await read_own_backup(cluster.client, cluster.namespace, name)


def _print(run: _Run, backup: Backup, *, created: bool) -> None:
    """Print the backup; without `created`, all of it existed before."""
    printer, shown = run.printer, command_for(run.access, f"nodeagent backup describe {backup.name}")
    if not created:
        since = f" since {format_time(backup.created)}" if backup.created else ""
        printer.note(f"backup {backup.name} exists{since}: nothing was created")
    if run.form.for_programs:
        printer.document(backup.to_wire(), run.form)
        return
    if run.wait:
        printer.line(describe_end(backup))
    else:
        print_volumes(printer, backup.volumes)
        printer.note(f"the backup was started: {shown} shows it" if created else f"{shown} shows it")
    printer.note(VOLUMES_ONLY)
