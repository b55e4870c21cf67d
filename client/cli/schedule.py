"""The command `nodeagent schedule`: CronJobs that back up volumes and delete expired backups."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import click

from client.backups.copies import KeepPolicy, KeepRule
from client.backups.plan import Choice, sum_up_missing
from client.cli import options as cli
from client.cli.backup import backup_options
from client.cli.backup_delete import print_deletion
from client.cli.collection_commands import VOLUMES_ONLY
from client.cli.output import GOOD, NONE, WARN, Cell, OutputFormat, Printer, Styled
from client.cli.run_schedule import build_tools
from client.install.apply import ApplyResult
from client.schedules import store
from client.schedules.manifests import build_schedule
from client.schedules.request import RetentionExplanation, ScheduleRequest, ScheduleTimes, explain_retention
from client.schedules.scheduled_run import ScheduleError, preview_schedule, run_schedule
from client.session import Session
from client.text import format_ago
from core.models.base import format_time
from core.text import format_age
from nodeagent.config.windows import parse_time_zone
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_EXAMPLES: Final = f"""\
examples:
  nodeagent schedule create night --schedule "0 2 * * *" --pvc app/data --ttl 720h
        back up a PVC every night; what is older than 30 days is deleted
  nodeagent schedule run night --dry-run
        show what it would back up and delete now

-n is the namespace of PVCs; --agent-namespace where the agents run.

{cli.EXIT_CODES}"""

_CREATE_EXAMPLES: Final = """\
examples:
  nodeagent schedule create night --schedule "0 2 * * *" --pvc app/data --pvc db/data --ttl 720h
        two PVCs every night at two, UTC
  nodeagent schedule create often --schedule @hourly --pvc app/data --ttl 48h --keep-daily 7 --keep-monthly 12
        all of two days, then the newest of each of the last seven days and twelve months that have one
  nodeagent schedule create night --schedule "0 2 * * *" -n app -l "" --ttl 720h -o yaml > night.yaml
        only print the objects, for GitOps

Each run makes a backup NAME-YYYYMMDDhhmmss, waits for its end, and then, with --ttl or --keep-..., deletes
every expired backup of nodeagent backup create in this cluster: never the newest complete copy of a volume,
and none that runs or is restored. A PVC that was deleted meanwhile is left out.

A backup of the schedule expires once it is older than its --ttl and no --keep-... of the schedule keeps it, which
counts as in restic, for each volume: nodeagent schedule retention NAME explains it.

The pods have the image of the agents and an account of their own, node-agent-schedule-NAME. The command may
be repeated: it changes the schedule to what it says, and to the image of the agents.
"""

_RETENTION_EXAMPLES: Final = """\
examples:
  nodeagent schedule retention night
        each copy, the newest of a volume first, and the rules that keep it
  nodeagent schedule retention night -o json
        {"keep": {"daily": 7}, "copies": [{"backup": ..., "stays": true, "rules": [...], "reasons": [...]}], ...}

It shows what the next run would do now, and deletes nothing.
"""

_RENEW_EXAMPLES: Final = """\
examples:
  nodeagent schedule renew night

A schedule keeps its image, its permissions and the rules by which it deletes until it is renewed. One that is
applied from files, such as by kubectl apply, is left alone and named.
"""

_HEADERS: Final = ("NAME", "SCHEDULE", "TTL", "KEEP", "LAST RUN", "LAST SUCCESS", "NEXT RUN", "RUNNING")
_WIDE_HEADERS: Final = (*_HEADERS, "PVCS", "METHOD", "LOCATION", "AGE")
_RETENTION_HEADERS: Final = ("PVC", "BACKUP", "LOCATION", "CREATED", "NEXT RUN", "WHY")


@click.group("schedule", cls=cli.UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def schedule() -> None:
    """Back up volumes regularly, and delete expired backups."""


async def _find(cluster: Connection, names: Sequence[str]) -> store.ScheduleList:
    return await store.find_schedules(cluster.client, cluster.namespace, names, cluster.time.now())


@cli.completing
async def _complete(cluster: Connection) -> list[str]:
    return [one.name for one in (await _find(cluster, ())).schedules]


_keep_options: Final = cli.add_options(
    *(click.option(one.flag, type=click.IntRange(min=1), metavar="NUMBER", help=one.help) for one in KeepRule)
)


@schedule.command("create", epilog=_CREATE_EXAMPLES)
@click.argument("name", metavar="NAME")
@click.option("--schedule", "cron", metavar="CRON", required=True, help='when, such as "0 2 * * *" or @daily')
@click.option(
    "--time-zone", metavar="NAME", default="", help="IANA time zone of --schedule and --keep-... (default: UTC)"
)
@backup_options
@click.option("--ttl", type=cli.DURATION, metavar="DURATION", help="time to live of a backup (default: none)")
@click.option("--verify", is_flag=True, help="read each backup back from the bucket, before anything is deleted")
@click.option("--suspend", is_flag=True, help="create it without runs, until it is created again without this flag")
@_keep_options
@cli.output_option
@cli.workload_options
async def _create(name: str, access: ClusterAccess, form: OutputFormat, choice: Choice, **given: Any) -> None:
    """Create or change a schedule; -o yaml only prints its objects."""
    times = ScheduleTimes(given.pop("cron"), given.pop("time_zone") or None, given.pop("suspend"))
    keep = KeepPolicy.of({rule: given.pop(f"keep_{rule}") for rule in KeepRule}, times.time_zone)
    request = ScheduleRequest(name, access.namespace, choice, keep=keep, **given)
    request.check()
    times.check()
    printer = Printer()
    async with connect(access) as cluster:
        agent = await store.read_image(cluster.client, cluster.namespace)
        tools = Session.of(cluster, printer.note)
        await store.check_schedule(tools, request)
        objects = build_schedule(request, times, agent, cluster.time.now())
        if form.for_programs:
            printer.document({"apiVersion": "v1", "kind": "List", "items": objects}, form)
            return
        result = await store.apply_schedule(store.OwnedObjects(tools, request, printer.line), objects)
        next_run = times.next_after(cluster.time.now())
    what, which = ("created", "first") if result is ApplyResult.CREATED else ("changed", "next")
    when = f"its {which} run is at {format_time(next_run)}" if next_run and not times.suspend else "it is suspended"
    printer.line(f"schedule {request.name} was {what}: {when}")
    printer.note(f"{cli.command_for(access, f'nodeagent schedule get {request.name}')} shows it")
    printer.note(VOLUMES_ONLY)


@schedule.command("get", epilog="examples:\n  nodeagent schedule get night -o wide\n")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete)
@cli.output_option
@cli.workload_options
async def _get(
    names: tuple[str, ...], form: OutputFormat, access: ClusterAccess, cluster: Connection, printer: Printer
) -> None:
    """List schedules, with their last and next run. With -o wide, also their PVCs."""
    found, now, wide = await _find(cluster, names), cluster.time.now(), form is OutputFormat.WIDE
    renewals = [
        f"schedule {one.name} deletes by older rules of retention: run "
        + cli.command_for(access, f"nodeagent schedule renew {one.name}")
        for one in found.schedules
        if one.old_rules
    ]
    printer.answer(
        found,
        form,
        lambda: printer.table(
            _WIDE_HEADERS if wide else _HEADERS, [_row(one, now, wide=wide) for one in found.schedules]
        ),
        [*found.notes, *renewals],
        absent="" if found.schedules else f"there is no schedule in namespace {cluster.namespace}",
    )


def _row(one: store.Schedule, now: datetime, *, wide: bool) -> list[Cell]:
    last = one.last_run
    late = last is not None and not one.running and (one.last_success is None or one.last_success < last)
    cells: list[Cell] = [
        one.name,
        " ".join(filter(None, (one.schedule, one.time_zone))),
        one.ttl or NONE,
        ", ".join(f"{rule} {count}" for rule, count in one.keep.items()) or NONE,
        format_ago(one.last_run, now),
        Styled(format_ago(one.last_success, now), WARN if late else GOOD if one.last_success else ""),
        f"in {format_age(one.next_run - now)}"
        if one.next_run
        else Styled("suspended", WARN)
        if one.suspended
        else NONE,
        str(one.running),
    ]
    return [*cells, one.claims, one.method, one.location or NONE, format_ago(one.created, now)] if wide else cells


@schedule.command("run", epilog="examples:\n  nodeagent schedule run night --dry-run\n")
@click.argument("name", metavar="NAME", shell_complete=_complete)
@cli.dry_run_option
@cli.workload_options
async def _run(name: str, cluster: Connection, printer: Printer, *, dry_run: bool) -> None:
    """Run a schedule now, with your own permissions."""
    request = await store.read_request(cluster.client, cluster.namespace, name)
    if not dry_run:
        await run_schedule(build_tools(cluster, printer.line), request)
        return
    with printer.progress(f"checking schedule {name}") as show:
        preview = await preview_schedule(build_tools(cluster, show, on_note=printer.note), request)
    for volume in preview.volumes:
        printer.line(f"back up {volume.claim.namespace}/{volume.claim.name} by {volume.method}")
    if preview.deletion is not None:
        print_deletion(printer, preview.deletion)
        if preview.deletion.empty:
            printer.note("nothing would be deleted")
    if preview.failures:
        printer.notes(preview.failures)
        raise ScheduleError(f"not all volumes would be backed up: {sum_up_missing(preview.failures)}")


@schedule.command("retention", epilog=_RETENTION_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete)
@cli.output_option
@cli.workload_options
async def _retention(
    name: str, form: OutputFormat, access: ClusterAccess, cluster: Connection, printer: Printer
) -> None:
    """Say of each copy that a schedule has made why it stays or goes."""
    request = await store.read_request(cluster.client, cluster.namespace, name)
    found = await explain_retention(build_tools(cluster, printer.note).session, request)
    notes = [f"{cli.command_for(access, f'nodeagent schedule run {name} --dry-run')} also looks at the snapshots"]
    if not request.deletes:
        notes.insert(0, f"schedule {name} deletes nothing: it has neither --ttl nor --keep-...")
    printer.answer(found, form, lambda: _print_retention(printer, found), notes)


def _print_retention(printer: Printer, found: RetentionExplanation) -> None:
    if not found.copies:
        printer.note(f"schedule {found.schedule} has no backups")
        return
    zone = parse_time_zone(found.time_zone)
    rows: list[list[Cell]] = [
        [
            f"{one.namespace}/{one.claim}",
            one.backup,
            one.location,
            one.created.astimezone(zone).isoformat(" ", "minutes") if one.created is not None else NONE,
            Styled("stays", GOOD) if one.stays else Styled("goes", WARN),
            "; ".join(one.reasons),
        ]
        for one in found.copies
    ]
    printer.table(_RETENTION_HEADERS, rows)


@schedule.command("renew", epilog=_RENEW_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete)
@cli.workload_options
async def _renew(names: tuple[str, ...], cluster: Connection, printer: Printer) -> None:
    """Give schedules the image of the agents, today's rules and permissions."""
    failures = await store.renew_schedules(Session.of(cluster, printer.note), names, printer.line)
    if failures:
        raise ScheduleError("; ".join(failures))


@schedule.command("delete", epilog="examples:\n  nodeagent schedule delete night\n")
@click.argument("name", metavar="NAME", shell_complete=_complete)
@cli.workload_options
async def _delete(name: str, cluster: Connection, printer: Printer) -> None:
    """Delete a schedule; its backups stay. Another schedule with --ttl deletes what is expired."""
    request = await store.read_request(cluster.client, cluster.namespace, name)
    await store.delete_schedule(store.OwnedObjects(Session.of(cluster, printer.note), request, printer.line))
    printer.note(f"the backups of schedule {name} stay: nodeagent backup get shows them")
