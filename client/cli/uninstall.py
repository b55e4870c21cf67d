"""The command `nodeagent uninstall`: shows what it removes and what stays, asks, and removes it."""

import asyncio
from typing import Final

import click

from client.cli.options import UserCommand, cluster_options, confirm, yes_option
from client.cli.output import HEADING, Printer, Styled
from client.install.uninstall import RemovalPlan, plan_removal, refuse_interruption, remove
from core.clock import SystemClock
from core.kube.client import select_labels
from core.models.names import PART_OF_LABELS
from nodeagent.runtime.connection import ClusterAccess, connect

__all__ = ["uninstall"]

_EXAMPLES: Final = """\
examples:
  nodeagent uninstall --namespace staging
        show what is removed and what stays, ask, and remove it
  nodeagent uninstall --yes
        without a question; it refuses while transfers have not ended
  nodeagent uninstall --force
        without a question, and interrupt transfers

Custom resource definitions, custom resources, Secrets, the namespace and all backups stay; the last lines
of the output have the commands that delete them, unless others would lose something.

exit codes:
  0  done, or there was nothing to remove, or the answer was no
  1  an error of the cluster, transfers that have not ended, or agents that do not end
  2  invalid command line, a missing permission, a release of Helm, or the cluster is not reachable
"""


@click.command("uninstall", cls=UserCommand, epilog=_EXAMPLES)
@yes_option
@click.option("--force", is_flag=True, help="do not ask, and interrupt transfers that have not ended")
@click.option("--wait", is_flag=True, hidden=True, help="of Velero: the command always waits")
@cluster_options
def uninstall(access: ClusterAccess, *, yes: bool, force: bool, wait: bool) -> None:  # noqa: ARG001 - as velero uninstall
    """Remove the node agents; backups stay."""
    asyncio.run(_run(access, ask=not (yes or force), force=force))


async def _run(access: ClusterAccess, *, ask: bool, force: bool) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        plan = await plan_removal(cluster.client, cluster.namespace)
        if not plan.removed:
            printer.note(f"there is no installation of ours in namespace {cluster.namespace}")
            return
        if not force:
            refuse_interruption(plan.unfinished)
        _show(printer, plan)
        if ask and not confirm("Remove the node agents?", "nothing was removed"):
            printer.note("nothing was removed")
            return
        clock = SystemClock()
        await remove(cluster.client, clock, plan, lambda place: printer.line(f"{place}: deleted"), force=force)
    _show_rest(printer, plan)


def _show(printer: Printer, plan: RemovalPlan) -> None:
    for title, names in (("Removed:", plan.removed_names), ("Kept:", plan.kept)):
        printer.line(Styled(title, HEADING))
        for name in names:
            printer.line(f"  {name}")


def _show_rest(printer: Printer, plan: RemovalPlan) -> None:
    """Show how the rest is deleted; no command that would delete what others use."""
    commands, labels = [], select_labels(PART_OF_LABELS)
    for what, command, lost in (
        (f"namespace {plan.namespace}", f"namespace {plan.namespace}", plan.dependents.namespace),
        ("custom resource definitions", f"crd -l {labels}", plan.dependents.definitions),
    ):
        if lost:
            printer.note(f"deleting the {what} would also delete {', '.join(lost)}")
        else:
            commands.append(f"  kubectl delete {command}")
    if commands:
        title = "To delete the rest, with all records of backups (their data stays in the bucket):"
        printer.line(Styled(title, HEADING))
        for line in commands:
            printer.line(line)
    if plan.unfinished:
        printer.note(f"{len(plan.unfinished)} transfers keep a finalizer: the namespace is not deleted before they are")
