"""The command `nodeagent backup delete`: shows what it deletes, asks, and deletes it."""

import sys
from typing import Any, Final

import click

from client.backups.delete import DeletionPlan, DeletionWish, check_plan, execute_plan, plan_deletion
from client.backups.deletion_jobs import DeletionRecord, hold_deletions
from client.backups.deletion_report import BackupDeletion, build_deletion, build_report
from client.backups.retention import DeletionError
from client.cli import options as cli
from client.cli.collection_commands import complete_backups
from client.cli.output import WARN, OutputFormat, Printer, Styled
from client.session import Session
from client.text import format_bytes
from core.errors import ConfigError
from core.snapshot_contract import DeletedSnapshot
from nodeagent.runtime.connection import ClusterAccess, connect

_EXAMPLES: Final = """\
examples:
  nodeagent backup delete before-upgrade
        show what is deleted, ask, and delete it
  nodeagent backup delete before-upgrade --yes
        without a question, such as in a script
  nodeagent backup delete before-upgrade --dry-run -o json
        {"done": false, "backups": [{"name": ..., "volumes": [...], "losses": [...]}], ...}

  nodeagent backup delete --expired --at-most 20
        delete the 20 oldest expired backups now, which schedules would spread over days

Only a backup that nodeagent backup create made in this cluster is deleted: its transfers, and then
their snapshots, by a Job. A volume's last copy is named before. It is refused while the backup runs
(nodeagent backup cancel ends it), while a restore reads it, beside a Velero server, and in a location
that has Velero's folder "backups". The next maintenance of the repository frees the space.

--expired deletes what a run of a schedule would, by the same rules. --at-most sets a number of backups
in place of the limit for each volume and day.

One command deletes at a time; another one waits. An interrupted command may be repeated.

exit codes:
  0  deleted, or the answer was no
  1  the backup may not be deleted, or an error of the cluster; the message names it
  2  invalid command line, no answer to the question, or the cluster is not reachable
"""

_HEADERS: Final = ("PVC", "TRANSFER", "LOCATION", "SNAPSHOTS", "SIZE")


@click.command("delete", cls=cli.UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_backups)
@click.option("--expired", is_flag=True, help="all backups that are expired, by the rules of schedules")
@click.option(
    "--at-most", "most", type=click.IntRange(min=1), metavar="NUMBER", help="with --expired: so many, at once"
)
@cli.yes_option
@cli.dry_run_option
@cli.output_option
@cli.workload_options
async def delete(name: str | None, form: OutputFormat, access: ClusterAccess, **given: Any) -> None:
    """Delete a backup: its transfers and its snapshots."""
    ask, dry_run = not given["yes"], given["dry_run"]
    if (name is None) is not given["expired"]:
        raise ConfigError("backup delete takes the name of a backup, or --expired")
    if given["most"] is not None and not given["expired"]:
        raise ConfigError("--at-most goes with --expired")
    if ask and not (dry_run or sys.stdin.isatty()):
        raise ConfigError("backup delete asks a question, and there is no terminal: --yes skips it")
    if form.for_programs and ask and not dry_run:
        raise ConfigError(f"-o {form} shows no plan before the question: use --yes, or --dry-run first")
    await _run(DeletionWish(name, given["most"]), form, access, ask=ask, dry_run=dry_run)


async def _run(wish: DeletionWish, form: OutputFormat, access: ClusterAccess, *, ask: bool, dry_run: bool) -> None:
    printer = Printer()
    async with connect(access) as cluster:
        with cli.working(cluster, printer, f"checking the snapshots of {wish.shown}") as tools:
            plan, found = await check_plan(tools, await plan_deletion(tools, wish))
        if wish.name is not None and plan.check is not None and (refused := plan.check.refused):
            raise DeletionError(f"{wish.shown} cannot be deleted: {next(iter(refused.values()))}")
        deletion = build_deletion(plan, found, done=False)
        if not form.for_programs:
            print_deletion(printer, deletion)
        elif dry_run:
            printer.document(deletion.to_wire(), form)
        if dry_run or (deletion.empty and not form.for_programs):
            _check_complete(plan)
            if deletion.empty and not form.for_programs:
                printer.note("there is nothing to delete")
            return
        if ask and not _confirm(wish, deletion):
            printer.note("nothing was deleted")
            return
        with cli.working(cluster, printer, f"deleting {wish.shown}") as tools:
            deleted = await _execute(tools, plan)
    done = build_deletion(plan, deleted, done=True)
    if form.for_programs:
        printer.document(done.to_wire(), form)
    else:
        printer.notes(done.notes)
        snapshots = sum(not one.kept for one in deleted)
        shown = wish.shown if wish.name is not None else f"{len(done.backups)} expired backups"
        verb = "was" if wish.name is not None or len(done.backups) == 1 else "were"
        printer.line(f"{shown} {verb} deleted, with {snapshots} snapshot{'' if snapshots == 1 else 's'}")
    _check_complete(plan)


def _check_complete(plan: DeletionPlan) -> None:
    """Check that no location was left out, as a run of a schedule does; DeletionError: one was, and why."""
    for why in plan.refusals:
        raise DeletionError(why)


async def _execute(tools: Session, plan: DeletionPlan) -> list[DeletedSnapshot]:
    """Carry the plan out while no other command deletes; keep the report of one for expired backups."""
    async with hold_deletions(tools) as guard:
        deleted = await execute_plan(tools, plan, guard)
        if plan.now is not None:
            await DeletionRecord(tools.client, tools.namespace).write_report(build_report(plan, plan.now))
        return deleted


def print_deletion(printer: Printer, deletion: BackupDeletion) -> None:
    """Print what is deleted, what is lost with it, and what is kept."""
    for backup in deletion.backups:
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
        printer.section(f"Backup {backup.name}:", _HEADERS, rows)
        for loss in backup.losses:
            printer.line(Styled(f"  {loss}", WARN))
    if deletion.unfinished:
        printer.note(f"snapshots of {deletion.unfinished} transfers are left of a deletion that was interrupted")
    for kept in deletion.kept:
        printer.note(f"backup {kept.name} is expired, and kept: {kept.reasons[0]}")
    if deletion.waiting:
        why = f": {deletion.waiting_why}" if deletion.waiting_why else ""
        printer.note(f"{deletion.waiting} expired copies wait for later runs{why}")
    printer.notes(deletion.notes)


def _confirm(wish: DeletionWish, deletion: BackupDeletion) -> bool:
    what = f"Delete {wish.shown}? It"
    if wish.name is None:
        count = len(deletion.backups)
        what = f"Delete {count} expired backup{'? It' if count == 1 else 's? They'}"
    return cli.confirm(f"{what} cannot be restored afterward", "nothing was deleted")
