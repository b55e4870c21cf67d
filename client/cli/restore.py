"""The command `nodeagent restore`: volumes of a backup into new PVCs."""

import asyncio
from typing import Final

import click

from client.cli.collection_commands import complete_restores, get_groups, print_canceled, show_group
from client.cli.options import UserGroup, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.cli.restore_create import create
from client.collections.collection import Restores
from client.restores.waiting_pods import RestoreTools, cancel_restore
from core.clock import SystemClock
from nodeagent.runtime.connection import ClusterAccess, connect

__all__ = ["restore"]

_EXAMPLES: Final = """\
examples:
  nodeagent restore create --from-backup night-1 --wait
        the volumes of a backup, each into a new PVC of its old name
  nodeagent restore create --from-backup night-1 --from-storage-location default --wait
        the same in a cluster that knows nothing of the backup: by what the bucket holds
  nodeagent restore get
        all restores
  nodeagent restore describe night-1-20261123020000
        its volumes, and why one of them does not move

exit codes:
  0  done
  1  an error of the cluster, such as a missing permission or a wrong name
  2  invalid command line, or the cluster is not reachable
"""

_GET_EXAMPLES: Final = """\
examples:
  nodeagent restore get --agent-namespace velero
        all of them, the newest first
  nodeagent restore get -o json
        {"restores": [{"name": ..., "phase": ..., "volumes": [...]}], "notes": [...]}

Restores of a Velero server are not shown: velero restore get does that.
"""

_DESCRIBE_EXAMPLES: Final = """\
examples:
  nodeagent restore describe night-1-20261123020000
        each volume, its transfer, and what it waits for
  nodeagent restore describe night-1-20261123020000 -o yaml
        the same for programs
"""

_CANCEL_EXAMPLES: Final = """\
examples:
  nodeagent restore cancel night-1-20261123020000
        end the transfers that have not ended; their PVCs stay without a volume until you delete them
"""


@click.group("restore", cls=UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def restore() -> None:
    """Restore volumes into new PVCs, and show restores."""


restore.add_command(create)


@restore.command("get", epilog=_GET_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=complete_restores)
@output_option
@workload_options
def _get(names: tuple[str, ...], form: OutputFormat, access: ClusterAccess) -> None:
    """List restores."""
    asyncio.run(get_groups(Restores, names, form=form, access=access))


@restore.command("describe", epilog=_DESCRIBE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_restores)
@output_option
@workload_options
def _describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    """Show everything about one restore."""
    asyncio.run(show_group(Restores, name, form=form, access=access))


@restore.command("cancel", epilog=_CANCEL_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_restores)
@workload_options
def _cancel(name: str, access: ClusterAccess) -> None:
    """Cancel a restore: end its transfers that have not ended."""
    asyncio.run(_run_cancel(name, access))


async def _run_cancel(name: str, access: ClusterAccess) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        tools = RestoreTools(cluster.client, SystemClock(), printer.note)
        with printer.progress(f"canceling {name}"):
            canceled = await cancel_restore(tools, cluster.namespace, name)
    print_canceled(printer, "restore", name, canceled=canceled, access=access)
