"""The command `nodeagent backup delete`: shows what it deletes, asks, and deletes it."""

import asyncio
import sys
from collections.abc import Callable
from typing import Final

import click

from core.errors import ConfigError
from nodeagent.cli.backup_names import complete_backups
from nodeagent.cli.job_tools import build_job_tools
from nodeagent.cli.options import UserCommand, output_option, workload_options
from nodeagent.cli.output import HEADING, WARN, OutputFormat, Printer, Styled
from nodeagent.cli.text import format_bytes
from nodeagent.operations.backups.delete import DeletionError, DeletionTools, check_plan, execute_plan, plan_named
from nodeagent.operations.backups.deletion_view import BackupDeletion, build_deletion
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["delete"]

_EXAMPLES: Final = """\
examples:
  nodeagent backup delete before-upgrade
        show what is deleted, ask, and delete it
  nodeagent backup delete before-upgrade --confirm
        without a question, such as in a script
  nodeagent backup delete before-upgrade --dry-run -o json
        {"done": false, "backups": [{"name": ..., "volumes": [...], "losses": [...]}], ...}

Only a backup that nodeagent backup create made in this cluster is deleted: its transfers, and then
their snapshots, by a Job. A volume's last copy is named before. It is refused while the backup runs
(nodeagent backup cancel ends it), while a restore reads it, beside a Velero server, and in a location
that has Velero's folder "backups". The next maintenance of the repository frees the space.

An interrupted command may be repeated.

exit codes:
  0  deleted, or the answer was no
  1  the backup may not be deleted, or an error of the cluster; the message names it
  2  invalid command line, no answer to the question, or the cluster is not reachable
"""

_HEADERS: Final = ("PVC", "TRANSFER", "LOCATION", "SNAPSHOTS", "SIZE")


@click.command("delete", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@click.option("--confirm", is_flag=True, help="do not ask")
@click.option("--dry-run", is_flag=True, help="only show what would be deleted")
@output_option
@workload_options
def delete(name: str, form: OutputFormat, access: ClusterAccess, *, confirm: bool, dry_run: bool) -> None:
    """Delete a backup: its transfers and its snapshots."""
    if not (confirm or dry_run or sys.stdin.isatty()):
        raise ConfigError("backup delete asks a question, and there is no terminal: --confirm skips it")
    if form.for_programs and not (confirm or dry_run):
        raise ConfigError(f"-o {form} shows no plan before the question: use --confirm, or --dry-run first")
    asyncio.run(_run(name, form, access, ask=not confirm, dry_run=dry_run))


async def _run(name: str, form: OutputFormat, access: ClusterAccess, *, ask: bool, dry_run: bool) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        with printer.progress(f"checking the snapshots of {name}") as show:
            tools = _tools(cluster, printer, show)
            plan = await plan_named(tools, name)
            found, refused = await check_plan(tools, plan)
        if refused:
            raise DeletionError(f"backup {name} cannot be deleted: {next(iter(refused.values()))}")
        deletion = build_deletion(plan, found, {}, done=False)
        if not form.for_programs:
            print_deletion(printer, deletion)
        elif dry_run:
            printer.document(deletion.to_wire(), form)
        if dry_run:
            return
        if ask and not _confirm(name):
            printer.note("nothing was deleted")
            return
        with printer.progress(f"deleting {name}") as show:
            deleted = await execute_plan(_tools(cluster, printer, show), plan)
    done = build_deletion(plan, deleted, {}, done=True)
    if form.for_programs:
        printer.document(done.to_wire(), form)
        return
    for note in done.notes:
        printer.note(note)
    snapshots = sum(not one.kept for one in deleted)
    printer.line(f"backup {name} was deleted, with {snapshots} snapshot{'' if snapshots == 1 else 's'}")


def _tools(cluster: Connection, printer: Printer, show: Callable[[str], None]) -> DeletionTools:
    jobs = build_job_tools(cluster, show, printer.note)
    return DeletionTools(jobs, lambda: cluster.time.date)


def print_deletion(printer: Printer, deletion: BackupDeletion) -> None:
    """Print what is deleted, what is lost with it, and what is kept."""
    for backup in deletion.backups:
        printer.line(Styled(f"Backup {backup.name}:", HEADING))
        rows = [
            [
                f"{one.namespace}/{one.claim}",
                f"{one.kind}/{one.transfer}",
                one.location,
                str(one.snapshots),
                format_bytes(one.bytes),
            ]
            for one in backup.volumes
        ]
        printer.table(_HEADERS, rows, indent=2)
        for loss in backup.losses:
            printer.line(Styled(f"  {loss}", WARN))
    if deletion.unfinished:
        printer.note(f"snapshots of {deletion.unfinished} transfers are left of a deletion that was interrupted")
    for kept in deletion.kept:
        printer.note(f"backup {kept.name} is expired, and kept: {kept.reasons[0]}")
    for note in deletion.notes:
        printer.note(note)


def _confirm(name: str) -> bool:
    try:
        return click.confirm(f"Delete backup {name}? It cannot be restored afterward", err=True)
    except click.Abort as e:
        raise ConfigError("nothing was deleted: there is no answer to the question (use --confirm)") from e
