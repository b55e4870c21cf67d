"""The command `nodeagent backup`: backups of volumes, ours and Velero's."""

import asyncio
from typing import Final

import click

from client.backups.follow import cancel_backup, find_backup, find_backups
from client.backups.view import BackupList
from client.cli.backup_create import create
from client.cli.backup_delete import delete
from client.cli.backup_files import copy, ls
from client.cli.backup_names import complete_backups
from client.cli.backup_pages import print_backup, print_list, print_volumes
from client.cli.backup_verify import verify
from client.cli.options import UserGroup, command_for, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.cli.stored import get_stored
from core.clock import SystemClock
from nodeagent.runtime.connection import ClusterAccess, connect

__all__ = ["backup"]

_EXAMPLES: Final = """\
examples:
  nodeagent backup create before-upgrade --pvc app/data --wait
        back up one volume, and show the progress
  nodeagent backup get
        all backups, also those of a Velero server
  nodeagent backup describe before-upgrade
        its volumes, and why one of them does not move
  nodeagent backup verify before-upgrade
        read it back from the bucket
  nodeagent backup cancel before-upgrade
        end it
  nodeagent backup delete before-upgrade
        delete it and its snapshots
  nodeagent backup cp before-upgrade:app/data/etc/app.conf .
        copy a file of it to this machine; backup ls shows what there is

-n is the namespace of PVCs; --agent-namespace that of the agents.

exit codes:
  0  done
  1  an error of the cluster, such as a missing permission or a wrong name
  2  invalid command line, or the cluster is not reachable
"""

_GET_EXAMPLES: Final = """\
examples:
  nodeagent backup get -o wide
        all of them, the newest first
  nodeagent backup get -n app
        those with volumes of the namespace app
  nodeagent backup get -o json
        {"backups": [{"name": ..., "phase": ..., "volumes": [...]}], "notes": [...]}
  nodeagent backup get --from-storage-location default
        the snapshots in the bucket, Velero's too, also if this cluster knows nothing of them

Backups of a Velero server are shown with the volumes whose data the agents move.
"""

_DESCRIBE_EXAMPLES: Final = """\
examples:
  nodeagent backup describe night-1
        each volume, its transfer, and what it waits for
  nodeagent backup describe night-1 -o yaml
        the same for programs
"""

_CANCEL_EXAMPLES: Final = """\
examples:
  nodeagent backup cancel night-1
        end the transfers that have not ended; volumes that are in the bucket stay there
"""


@click.group("backup", cls=UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def backup() -> None:
    """Back up volumes without a Velero server, show and verify backups."""


backup.add_command(create)
backup.add_command(verify)
backup.add_command(delete)
backup.add_command(ls)
backup.add_command(copy)


@backup.command("get", epilog=_GET_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_backups)
@click.option("--namespace", "-n", metavar="NAME", default="", help="only those with volumes of this namespace")
@click.option("--from-storage-location", "location", metavar="NAME", default="", help="list what this bucket holds")
@output_option
@workload_options
def _get(names: tuple[str, ...], namespace: str, location: str, form: OutputFormat, access: ClusterAccess) -> None:
    """List backups, or the snapshots in a bucket."""
    if location:
        get_stored(location, names, namespace, form, access)
        return
    asyncio.run(_run_get(names, namespace, form, access))


async def _run_get(names: tuple[str, ...], namespace: str, form: OutputFormat, access: ClusterAccess) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        found = await find_backups(cluster.client, cluster.namespace, names)
    if namespace:
        kept = [one for one in found.backups if any(volume.namespace == namespace for volume in one.volumes)]
        found = BackupList(backups=kept, notes=found.notes)

    def print_page() -> None:
        if found.backups:
            print_list(printer, found, SystemClock().now(), wide=form is OutputFormat.WIDE)
        else:
            printer.note(f"there is no backup in namespace {access.namespace}")

    printer.answer(found, form, print_page, found.notes)


@backup.command("describe", epilog=_DESCRIBE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@output_option
@workload_options
def _describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    """Show everything about one backup."""
    asyncio.run(_run_describe(name, form, access))


async def _run_describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        one, notes = await find_backup(cluster.client, cluster.namespace, name)
    printer.answer(one, form, lambda: print_backup(printer, one, SystemClock().now()), notes)


@backup.command("cancel", epilog=_CANCEL_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@workload_options
def _cancel(name: str, access: ClusterAccess) -> None:
    """Cancel a backup: end its transfers that have not ended."""
    asyncio.run(_run_cancel(name, access))


async def _run_cancel(name: str, access: ClusterAccess) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        canceled = await cancel_backup(cluster.client, cluster.namespace, name)
    if not canceled:
        printer.note(f"backup {name} has ended already: nothing to cancel")
        return
    print_volumes(printer, canceled)
    shown = command_for(access, f"nodeagent backup describe {name}")
    printer.note(f"cancel requested: {shown} shows how it ends")
