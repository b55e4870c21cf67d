"""The command `nodeagent backup create`, and the options about volumes that it has in common with schedules."""

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from client.backups.manifests import BackupError, BackupRequest, DataMover, Method, parse_pairs
from client.backups.plan import BackupTools, Choice, check_backup, plan_backup, start_backup, sum_up_missing
from client.cli.collection_commands import VOLUMES_ONLY, Creation
from client.cli.options import DURATION, UserCommand, add_options, ignore_server_option, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.collections.collection import Backups
from client.collections.models import Backup, BackupTransfer, explain_end
from core.clock import SystemClock
from nodeagent.runtime.connection import ClusterAccess, connect

_OPTIONS: Final = (
    click.option("--pvc", "claims", metavar="NAMESPACE/NAME", multiple=True, help="PVC to back up; may be repeated"),
    click.option("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for -l and --pvc NAME"),
    click.option("--selector", "-l", metavar="LABELS", default=None, help="PVCs of the namespace with these labels"),
    click.option(
        "--method",
        type=click.Choice([method.value for method in Method]),
        default=Method.AUTO.value,
        help="csi-snapshot, fs-backup from a running pod, or auto: the first that is possible (default: auto)",
    ),
    click.option(
        "--data-mover",
        type=click.Choice([mover.value for mover in DataMover]),
        default=None,
        help="fs: files; block: the volume as a device, by csi-snapshot (default: as nodeagent.io.blockStorageClasses)",
    ),
    click.option(
        "--storage-location",
        metavar="NAME",
        default="",
        help="BackupStorageLocation (default: the one that is default)",
    ),
    click.option("--labels", metavar="KEY=VALUE,...", default="", help="labels of the transfers"),
    click.option("--annotations", metavar="KEY=VALUE,...", default="", help="annotations of the transfers"),
    ignore_server_option,
)


def backup_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add these options; the command gets `choice`, a Choice, and `location`, `labels` and `annotations`."""

    @functools.wraps(function)
    def run(*args: Any, **given: Any) -> object:
        chosen = ("claims", "namespace", "selector", "method", "data_mover", "ignore_velero_server")
        choice = Choice.parse(**{key: given.pop(key) for key in chosen})
        for key in ("labels", "annotations"):
            given[key] = parse_pairs(f"--{key}", given[key])
        return function(*args, choice=choice, location=given.pop("storage_location"), **given)

    return add_options(*_OPTIONS)(run)


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
def create(name: str, access: ClusterAccess, form: OutputFormat, choice: Choice, **given: Any) -> None:
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
