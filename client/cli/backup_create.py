"""The command `nodeagent backup create`: volumes to a bucket, without a Velero server."""

from typing import Any, Final

import click

from client.backups.create import check_backup, start_backup, sum_up_missing
from client.backups.manifests import BackupRequest
from client.backups.methods import BackupError
from client.backups.plan import BackupTools, Choice, plan_backup
from client.cli.backup_options import backup_options
from client.cli.collection_commands import Creation
from client.cli.collection_pages import VOLUMES_ONLY
from client.cli.flag_types import DURATION
from client.cli.options import UserCommand, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.collections.collection import Backups
from client.collections.models import Backup, BackupTransfer, explain_end
from core.clock import SystemClock
from nodeagent.runtime.connection import ClusterAccess, connect

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


@click.command("create", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="NAME")
@backup_options
@click.option("--ttl", type=DURATION, metavar="DURATION", help="time to live of a backup (default: none)")
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
    creation = Creation(Backups, name, form, access, Printer(), wait=wait)
    creation.run(_create(creation, request, choice))


async def _create(creation: Creation[BackupTransfer, Backup], request: BackupRequest, choice: Choice) -> None:
    printer = creation.printer
    async with connect(creation.access) as cluster:
        tools = BackupTools(cluster.client, SystemClock(), printer.note, lambda: cluster.time.date)
        with printer.progress(f"checking the volumes of {request.name}"):
            volumes = await plan_backup(tools, request, choice)
            await check_backup(tools, volumes)
        creation.started = True
        missing = await start_backup(tools, volumes)
        backup = await creation.follow(cluster)
        creation.print(backup, created=bool(volumes))
        if not creation.form.for_programs:
            printer.note(VOLUMES_ONLY)
    if missing:
        state = f"{len(volumes) - len(missing)} of {len(volumes)} volumes were started"
        raise BackupError(f"{sum_up_missing(missing)}; {state}: repeat the command, or cancel the backup")
    if creation.wait and (failure := explain_end(backup)):
        raise BackupError(f"backup {backup.name} is {backup.phase}: {failure}")
