"""The command `nodeagent repo`: backup repositories, their maintenance, and snapshots that nothing refers to."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import click

from client.cli import options as cli
from client.cli.output import BAD, GOOD, HEADING, NONE, WARN, Cell, OutputFormat, Printer, Styled
from client.mover_jobs import read_location
from client.repositories import RepositoryReader, SnapshotList, read_repository, report_snapshots
from client.repository_view import (
    NextMaintenance,
    RepositoryDetails,
    RepositoryList,
    RepositoryProof,
    RepositorySummary,
    RunningJobState,
    build_connect_lines,
)
from client.text import format_ago, format_bytes, format_moment
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.storage import MaintenanceEntry, MaintenanceOutcome, RepositoryPhase
from core.models.units import format_duration
from core.models.verification import SHARES, VerificationOutcome
from core.snapshot_contract import SnapshotVerdict
from core.text import format_age
from nodeagent.maintenance.rules import Hold
from nodeagent.runtime.connection import ClusterAccess, Connection

_PHASES: Final[Mapping[str, str]] = {
    RepositoryPhase.READY: GOOD,
    RepositoryPhase.NEW: WARN,
    RepositoryPhase.NOT_READY: BAD,
}

_WORDS: Final[Mapping[str, str]] = {
    Hold.SERVER: "the Velero server maintains it",
    Hold.SERVER_SEEN: "a Velero server was there within the hour",
    Hold.JOB_UNFINISHED: "a Job runs",
    Hold.FOREIGN: "others maintain it",
    Hold.BLOCKED: "the last run failed",
    Hold.BACK_OFF: "the last run failed",
    Hold.NOT_OBSERVED: "the leader waits for its watches",
    Hold.WINDOW: "no window is open",
    Hold.CONCURRENCY: "other Jobs run",
    Hold.REJECTED: "its pod is rejected",
}
"""Holds that their names do not explain; `repo describe` has the whole reason."""

_ON_SCHEDULE: Final = frozenset({Hold.NOT_DUE, Hold.IDLE})


def print_list(printer: Printer, found: RepositoryList, now: datetime, *, wide: bool = False) -> None:
    """Print a row for each repository; there is at least one."""
    rows = [_cells(one, now, wide=wide) for one in found.repositories]
    printer.table([*rows[0]], [[*row.values()] for row in rows])


def _cells(one: RepositorySummary, now: datetime, *, wide: bool) -> dict[str, Cell]:
    """Return the cells of a row by their headers."""
    cells: dict[str, Cell] = {
        "NAME": one.name,
        "VOLUME NAMESPACE": one.volume_namespace,
        "LOCATION": one.location,
        "PHASE": _phase(one),
        "MAINTAINED": format_ago(one.last_maintenance, now) if one.last_maintenance else "never",
        "NEXT MAINTENANCE": _next_cell(one.next, now),
        "CONTENTS": NONE if one.contents is None else str(one.contents),
        "INDEX BLOBS": NONE if one.index_blobs is None else str(one.index_blobs),
        "AGE": format_age(now - one.created) if one.created is not None else NONE,
    }
    if wide:
        cells |= {"FREQUENCY": one.maintenance_frequency, "REPOSITORY ID": one.repository_id or NONE}
        cells["MESSAGE"] = one.message
    return cells


def _phase(one: RepositorySummary) -> Cell:
    return Styled(one.phase, _PHASES.get(one.phase, WARN))


def _next_cell(following: NextMaintenance, now: datetime) -> Cell:
    run = following.mode or "run"
    if not following.hold:
        return f"{run} is due"
    if following.hold == Hold.JOB_UNFINISHED and not following.overdue:
        return Styled("running", GOOD)
    if following.overdue and following.due is not None:
        return Styled(f"overdue for {format_age(now - following.due)}: {_why(following)}", BAD)
    if following.due is not None and following.due > now:
        text = f"{run} in {format_age(following.due - now)}"
        return text if following.hold in _ON_SCHEDULE else Styled(f"{text}: {_why(following)}", WARN)
    return Styled(f"held: {_why(following)}", WARN)


def _why(following: NextMaintenance) -> str:
    return _WORDS.get(following.hold) or following.hold.replace("-", " ")


def print_details(printer: Printer, one: RepositoryDetails, now: datetime) -> None:
    """Print everything about one repository."""
    printer.facts(_facts(one, now))
    history = [_history_row(entry, now) for entry in one.history]
    printer.section("Maintenance history:", ("RESULT", "STARTED", "TOOK", "MESSAGE"), history)
    printer.events(one.events, now)


def _facts(one: RepositoryDetails, now: datetime) -> Sequence[tuple[str, Cell]]:
    """Return the lines of the page; one without a value is left out."""
    origin = "created by an agent of this cluster" if one.created_here else "found in the location"
    return (
        ("Name", one.name),
        ("Namespace", one.namespace),
        ("Volume namespace", one.volume_namespace),
        ("Location", f"{one.location} ({one.location_phase})" if one.location_phase else one.location),
        ("Location message", Styled(one.location_message, WARN) if one.location_message else ""),
        ("Phase", _phase(one)),
        ("Message", one.message),
        ("Created", format_moment(one.created, now)),
        ("Repository ID", f"{one.repository_id} ({origin})" if one.repository_id else ""),
        ("Size", _size(one)),
        ("Unreferenced", _unreferenced(one, now)),
        *_verification(one, now),
        ("Last maintenance", format_moment(one.last_maintenance, now) or "never"),
        ("Last result", _result(one)),
        ("Last full run", Styled("it did not finish", WARN) if one.incomplete_full else ""),
        ("Next maintenance", _next_sentence(one.next, now)),
        ("Frequency", f"at most every {one.maintenance_frequency}"),
        ("Schedule of kopia", _schedule(one, now)),
        ("Next memory", _memory(one)),
        *(("Running Job", _running(job, now)) for job in one.running),
    )


def print_report(printer: Printer, found: SnapshotList, *, wide: bool = False) -> None:
    """Print the snapshots that are not referenced, the totals, and the commands that would delete them."""
    headers = ["VERDICT", "SNAPSHOT", "STARTED", "SIZE", "SOURCE", "REASON"]
    rows: list[list[Cell]] = [
        [
            Styled(str(one.verdict), WARN if one.verdict is SnapshotVerdict.UNREFERENCED else ""),
            one.id,
            one.start or NONE,
            format_bytes(one.bytes),
            one.source or NONE,
            one.reason,
        ]
        for one in found.snapshots
    ]
    if wide:
        headers.append("COMMAND")
        rows = [[*row, one.command or NONE] for row, one in zip(rows, found.snapshots, strict=True)]
    if rows:
        printer.table(headers, rows)
    totals = found.totals
    counted = {verdict: getattr(totals, verdict.value) for verdict in SnapshotVerdict}
    parts = [f"{total.count} {verdict} ({format_bytes(total.bytes)})" for verdict, total in counted.items()]
    printer.line(f"{found.repository}: {', '.join(parts)}")
    commands = [one.command for one in found.snapshots if one.command]
    if commands and not wide:
        printer.line(Styled("Nothing was deleted. To delete the unreferenced ones, connect kopia, and run:", HEADING))
        for command in commands:
            printer.line(f"  {command}")


def _size(one: RepositoryDetails) -> str:
    if one.contents is None:
        return ""
    return f"{one.contents} contents, {one.index_blobs} index blobs (as of the last maintenance)"


def _unreferenced(one: RepositoryDetails, now: datetime) -> Cell:
    if one.unreferenced is None:
        return ""
    text = f"{one.unreferenced.count} snapshots, as of {format_moment(one.reported_at, now)}"
    if not one.unreferenced.count:
        return text
    return Styled(f"{text}, {format_bytes(one.unreferenced.bytes)}: nodeagent repo report {one.name} lists them", WARN)


def _verification(one: RepositoryDetails, now: datetime) -> Sequence[tuple[str, Cell]]:
    """Return what the leader has verified, each damaged volume, and why its last Job found nothing out."""
    found = one.verification
    if found is None:
        return ()
    read = f"{found.shares} of {SHARES} shares read"
    if found.proven is not None:
        read = f"all was read since {format_moment(found.proven, now)}"
    text = f"{found.outcome}, {format_moment(found.at, now)}; {read}" if found.outcome else read
    bad = found.outcome == VerificationOutcome.FAILED
    return (
        ("Verified", Styled(text, BAD) if bad else text),
        *(("Damaged", Styled(damage, BAD)) for damage in found.damaged),
        ("Last verification", Styled(f"found nothing out: {found.message}", WARN) if found.message else ""),
        ("Restored", _restored(found, now)),
        (
            "Last restore test",
            Styled(f"found nothing out: {found.restore_message}", WARN) if found.restore_message else "",
        ),
    )


def _restored(found: RepositoryProof, now: datetime) -> Cell:
    if not found.restored:
        return ""
    text = f"PVC {found.restored}: {found.restore_outcome}, {format_moment(found.restored_at, now)}"
    return Styled(text, BAD) if found.restore_outcome == VerificationOutcome.FAILED else text


def _result(one: RepositoryDetails) -> str:
    result = one.last_result
    if result is None:
        return one.last_mode
    if result.reason:
        return f"{result.mode}: {result.reason}"
    freed = "" if result.freed_bytes is None else f", {format_bytes(result.freed_bytes)} freed"
    peak = f"peak memory of kopia {format_bytes(result.peak_bytes)}"
    return f"{result.mode}, took {result.seconds:.0f} s{freed}, {peak}"


def _next_sentence(following: NextMaintenance, now: datetime) -> str:
    """Return when the next maintenance runs and why not before, as a sentence fragment."""
    run = f"{following.mode} run" if following.mode else "run"
    earliest = "" if following.from_leader or following.due is None else ", at the earliest"
    if not following.hold:
        return f"{run} is due{earliest}: the leader is about to start its Job"
    if following.due is not None and following.due > now:
        return f"{run} due {format_moment(following.due, now)}{earliest}: {following.reason}"
    parts = [f"none now: {following.reason}"]
    if following.due is not None:
        parts.append(f"due since {format_moment(following.due, now)}")
    if following.until is not None:
        parts.append(f"not before {format_moment(following.until, now)}")
    if following.overdue:
        parts.append("this is overdue")
    return "; ".join(parts)


def _schedule(one: RepositoryDetails, now: datetime) -> str:
    parts = [
        f"{mode} {format_moment(at, now)}" for mode, at in (("quick", one.next_quick), ("full", one.next_full)) if at
    ]
    if one.full_interval_seconds:
        parts.append(f"full every {format_duration(timedelta(seconds=one.full_interval_seconds))}")
    return ", ".join(parts)


def _memory(one: RepositoryDetails) -> str:
    parts = [f"{what} {text}" for what, text in (("request", one.memory_request), ("limit", one.memory_limit)) if text]
    peaks = (("quick", one.peak_quick_bytes), ("full", one.peak_full_bytes))
    known = [f"{mode} {format_bytes(peak)}" for mode, peak in peaks if peak]
    text = ", ".join(parts) + (f" (peaks of earlier runs: {', '.join(known)})" if known else "")
    return f"{text}; the last run was out of memory: raise memoryLimitMax" if one.memory_too_small else text


def _running(job: RunningJobState, now: datetime) -> str:
    where = f" on node {job.node}" if job.node else ""
    state = f"Pod {job.pod} is {job.phase}{where}" if job.pod else "it has no pod"
    return f"{job.job}, since {format_moment(job.created, now)}; {job.pending or state}"


def _history_row(entry: MaintenanceEntry, now: datetime) -> list[Cell]:
    failed = entry.result is MaintenanceOutcome.FAILED
    took = NONE
    if entry.start_timestamp is not None and entry.complete_timestamp is not None:
        took = format_age(entry.complete_timestamp - entry.start_timestamp)
    result = str(entry.result or NONE)
    return [
        Styled(result, BAD) if failed else result,
        format_moment(entry.start_timestamp, now),
        took,
        entry.message or "",
    ]


_EXAMPLES: Final = f"""\
examples:
  nodeagent repo get
        all backup repositories, and when their next maintenance is due
  nodeagent repo describe app-default-kopia
        everything about one: why it is not maintained now, its history, its Events
  nodeagent repo get -o json | jq -r '.repositories[] | select(.next.overdue) | .name'
        those whose maintenance is overdue

{cli.EXIT_CODES}"""

_GET_EXAMPLES: Final = """\
examples:
  nodeagent repo get --namespace velero
        all of them
  nodeagent repo get -o json
        {"repositories": [{"name": ..., "next": {"hold": ..., "due": ...}, ...}], "notes": [...]}

The leader says what holds a maintenance. Its status page is read through the API server, which needs the
permission to get pods/proxy. Without it, what the custom resources show is computed here, and a note says so.
"""

_CONNECT_EXAMPLES: Final = """\
examples:
  nodeagent repo connect-command app-default-kopia
        show the lines
  eval "$(nodeagent repo connect-command app-default-kopia)" && kopia snapshot list
        run them in this shell; then kopia, KopiaUI, kopia mount and kopia diff read the repository

The lines have no secret: kubectl reads password and keys from their Secrets when they are run, into
variables of the shell. kopia is connected read-only, with the identity of the data movers, and by a
configuration file of its own: $KOPIA_CONFIG_PATH. It works for S3 with keys, and for directories.
"""

_REPORT_EXAMPLES: Final = """\
examples:
  nodeagent repo report app-default-kopia
        start a Job, wait for it, print the snapshots that are not referenced; the Job is deleted
  nodeagent repo report app-default-kopia --timeout 1h -o json > report.json

verdicts:
  unreferenced  older than a week, and neither a transfer nor a Backup refers to it: here or in the bucket
  incomplete    a checkpoint that its backup left behind
  unknown       what may refer to it could not be read, or it was made by something else

Nothing is ever deleted. Check a snapshot before you run the command that deletes it.
"""


@click.group("repo", cls=cli.UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def repo() -> None:
    """Show backup repositories and their maintenance."""


_complete_names: Final = cli.completing(lambda cluster: cli.list_names(cluster, BACKUP_REPOSITORIES))


@repo.command("get", epilog=_GET_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete_names)
@cli.output_option
@cli.cluster_options
async def _get(names: Sequence[str], form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """List backup repositories, with their last and next maintenance."""
    found = await _reader(cluster).summarize(names)
    printer.answer(
        found,
        form,
        lambda: print_list(printer, found, cluster.time.now(), wide=form is OutputFormat.WIDE),
        found.notes,
        absent="" if found.repositories else f"there is no BackupRepository in namespace {cluster.namespace}",
    )


@repo.command("describe", epilog="examples:\n  nodeagent repo describe app-default-kopia -o yaml\n")
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@cli.output_option
@cli.cluster_options
async def _describe(name: str, form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """Show everything about one backup repository: why it is not maintained, its history, its Events."""
    found = await _reader(cluster).describe(name)
    printer.answer(found, form, lambda: print_details(printer, found, cluster.time.now()), found.notes)


def _reader(cluster: Connection) -> RepositoryReader:
    return RepositoryReader(cluster.client, cluster.namespace, now=cluster.time.now)


@repo.command("connect-command", epilog=_CONNECT_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@cli.cluster_options
async def _connect_command(name: str, access: ClusterAccess, cluster: Connection, printer: Printer) -> None:
    """Print the shell lines that connect kopia to one backup repository, read-only."""
    repository = await read_repository(cluster.client, cluster.namespace, name)
    location = await read_location(cluster.client, cluster.namespace, repository.spec.backup_storage_location)
    given = (("--context", access.kubecontext), ("--kubeconfig", access.kubeconfig))
    for line in build_connect_lines(repository, location, [f"{flag}={value}" for flag, value in given if value]):
        printer.line(line)


@repo.command("report", epilog=_REPORT_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@cli.timeout_option(timedelta(minutes=15), "the Job may take")
@cli.output_option
@cli.cluster_options
async def _report(name: str, timeout: timedelta, form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """List kopia snapshots of one backup repository that no backup refers to."""
    with cli.working(cluster, printer, f"preparing the report of {name}") as tools:
        found = await report_snapshots(tools, name, timeout=timeout)
    printer.answer(found, form, lambda: print_report(printer, found, wide=form is OutputFormat.WIDE), found.notes)
