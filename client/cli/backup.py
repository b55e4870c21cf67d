"""The command `nodeagent backup`: backups of volumes, ours and Velero's."""

from typing import Final

import click

from client.cli.backup_create import create
from client.cli.backup_delete import delete
from client.cli.backup_files import copy, ls
from client.cli.backup_verify import verify
from client.cli.collection_commands import (
    complete_backups,
    get_groups,
    get_stored,
    print_canceled,
    print_volumes,
    show_group,
)
from client.cli.options import EXIT_CODES, UserGroup, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.collections.collection import Backups
from nodeagent.runtime.connection import ClusterAccess, connect

_EXAMPLES: Final = f"""\
examples:
  nodeagent backup create before-upgrade --pvc app/data --wait
        back up one volume, and show the progress
  nodeagent backup get
        all backups, also a Velero server's
  nodeagent backup describe before-upgrade
        its volumes, and why one of them does not move
  nodeagent backup verify before-upgrade
        read it back from the bucket
  nodeagent backup cancel before-upgrade
        end it
  nodeagent backup delete before-upgrade
        delete it and its snapshots
  nodeagent backup acknowledge night-1
        it has far fewer files than the one before, and that is right
  nodeagent backup cp before-upgrade:app/data/etc/app.conf .
        copy a file of it to this machine; backup ls shows what there is

-n is the namespace of PVCs; --agent-namespace where the agents run.

{EXIT_CODES}"""

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

_ACKNOWLEDGE_EXAMPLES: Final = """\
examples:
  nodeagent backup acknowledge night-1
        its volumes are as small as it says: nothing is wrong

A backup of a file system is Shrunk if it has less than half of the files or bytes of the newest one
before it that is not Shrunk, and more than 100 files or 64 MiB less. Until you acknowledge it, or the
next backup has nine tenths of its size, status and an alert name it, and that newest one is kept.
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
async def _get(
    names: tuple[str, ...], namespace: str, location: str, form: OutputFormat, access: ClusterAccess
) -> None:
    """List backups, or the snapshots in a bucket."""
    if location:
        await get_stored(location, names, namespace, form, access)
    else:
        await get_groups(Backups, names, form=form, access=access, volume_namespace=namespace)


@backup.command("describe", epilog=_DESCRIBE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@output_option
@workload_options
async def _describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    """Show everything about one backup."""
    await show_group(Backups, name, form=form, access=access)


@backup.command("cancel", epilog=_CANCEL_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@workload_options
async def _cancel(name: str, access: ClusterAccess) -> None:
    """Cancel a backup: end its transfers that have not ended."""
    printer = Printer()
    async with connect(access) as cluster:
        _, canceled = await Backups(cluster.client, cluster.namespace).cancel(name)
    print_canceled(printer, "backup", name, canceled=canceled, access=access)


@backup.command("acknowledge", epilog=_ACKNOWLEDGE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@workload_options
async def _acknowledge(name: str, access: ClusterAccess) -> None:
    """Acknowledge a backup that is Shrunk: that its volumes became so small is right."""
    printer = Printer()
    async with connect(access) as cluster:
        now = cluster.time.now().replace(microsecond=0)
        volumes = await Backups(cluster.client, cluster.namespace).acknowledge(name, now)
    if volumes:
        print_volumes(printer, volumes)
        printer.note(f"acknowledged: older copies of {'it' if len(volumes) == 1 else 'them'} expire as usual")
    else:
        printer.note(f"no volume of backup {name} is Shrunk: nothing to acknowledge")
