"""What `nodeagent repo` prints for people: the table of repositories, and the page about one."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from client.cli.output import BAD, GOOD, HEADING, WARN, Cell, Printer, Styled
from client.next_maintenance import NextMaintenance
from client.repository_view import RepositoryDetails, RepositoryList, RepositorySummary, RunningJobState
from client.snapshot_report import SnapshotList
from client.text import format_bytes
from core.models.base import format_time
from core.models.storage import MaintenanceEntry, MaintenanceOutcome, RepositoryPhase
from core.models.units import format_duration
from core.models.verification import SHARES, VerificationOutcome
from core.snapshot_contract import SnapshotVerdict
from core.text import format_age
from nodeagent.maintenance.rules import Hold

__all__ = ["print_details", "print_list", "print_report"]

_HEADERS: Final = (
    "NAME",
    "VOLUME NAMESPACE",
    "LOCATION",
    "PHASE",
    "MAINTAINED",
    "NEXT MAINTENANCE",
    "CONTENTS",
    "INDEX BLOBS",
    "AGE",
)
_WIDE_HEADERS: Final = (*_HEADERS, "FREQUENCY", "REPOSITORY ID", "MESSAGE")

_PHASES: Final = {RepositoryPhase.READY: GOOD, RepositoryPhase.NEW: WARN, RepositoryPhase.NOT_READY: BAD}

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

_NONE: Final = "-"
_INDENT: Final = 2


def print_list(printer: Printer, found: RepositoryList, now: datetime, *, wide: bool = False) -> None:
    """Print a row for each repository."""
    rows = [_row(one, now, wide=wide) for one in found.repositories]
    printer.table(_WIDE_HEADERS if wide else _HEADERS, rows)


def _row(one: RepositorySummary, now: datetime, *, wide: bool) -> list[Cell]:
    cells: list[Cell] = [
        one.name,
        one.volume_namespace,
        one.location,
        _phase(one),
        f"{_age(one.last_maintenance, now)} ago" if one.last_maintenance else "never",
        _next_cell(one.next, now),
        _NONE if one.contents is None else str(one.contents),
        _NONE if one.index_blobs is None else str(one.index_blobs),
        _age(one.created, now),
    ]
    return [*cells, one.maintenance_frequency, one.repository_id or _NONE, one.message] if wide else cells


def _phase(one: RepositorySummary) -> Cell:
    style = next((style for phase, style in _PHASES.items() if phase == one.phase), WARN)
    return Styled(one.phase, style)


def _next_cell(following: NextMaintenance, now: datetime) -> Cell:
    run = following.mode or "run"
    if not following.hold:
        return f"{run} is due"
    if following.hold == Hold.JOB_UNFINISHED and not following.overdue:
        return Styled("running", GOOD)
    if following.overdue and following.due is not None:
        return Styled(f"overdue for {_age(following.due, now)}: {_why(following)}", BAD)
    if following.due is not None and following.due > now:
        text = f"{run} in {_until(following.due, now)}"
        return text if following.hold in _ON_SCHEDULE else Styled(f"{text}: {_why(following)}", WARN)
    return Styled(f"held: {_why(following)}", WARN)


def _why(following: NextMaintenance) -> str:
    """Return why nothing runs now, in few words."""
    return _WORDS.get(following.hold) or following.hold.replace("-", " ")


def print_details(printer: Printer, one: RepositoryDetails, now: datetime) -> None:
    """Print everything about one repository."""
    printer.facts([(label, value) for label, value in _facts(one, now) if value])
    if one.history:
        printer.line(Styled("Maintenance history:", HEADING))
        rows = [_history_row(entry, now) for entry in one.history]
        printer.table(("RESULT", "STARTED", "TOOK", "MESSAGE"), rows, indent=_INDENT)
    if one.events:
        printer.line(Styled("Events:", HEADING))
        lines: list[list[Cell]] = [
            [
                f"{_age(event.last_seen, now)} ago",
                Styled(event.type, WARN) if event.type == "Warning" else event.type,
                event.reason,
                str(event.count),
                event.message,
            ]
            for event in one.events
        ]
        printer.table(("LAST SEEN", "TYPE", "REASON", "COUNT", "MESSAGE"), lines, indent=_INDENT)


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
        ("Created", _moment(one.created, now)),
        ("Repository ID", f"{one.repository_id} ({origin})" if one.repository_id else ""),
        ("Size", _size(one)),
        ("Unreferenced", _unreferenced(one, now)),
        *_verification(one, now),
        ("Last maintenance", f"{_moment(one.last_maintenance, now)}" or "never"),
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
            one.start or _NONE,
            format_bytes(one.bytes),
            one.source or _NONE,
            one.reason,
        ]
        for one in found.snapshots
    ]
    if wide:
        headers.append("COMMAND")
        rows = [[*row, one.command or _NONE] for row, one in zip(rows, found.snapshots, strict=True)]
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
    text = f"{one.unreferenced.count} snapshots, as of {_moment(one.reported_at, now)}"
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
        read = f"all was read since {_moment(found.proven, now)}"
    text = f"{found.outcome}, {_moment(found.at, now)}; {read}" if found.outcome else read
    bad = found.outcome == VerificationOutcome.FAILED
    return (
        ("Verified", Styled(text, BAD) if bad else text),
        *(("Damaged", Styled(damage, BAD)) for damage in found.damaged),
        ("Last verification", Styled(f"found nothing out: {found.message}", WARN) if found.message else ""),
    )


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
        return f"{run} due {_moment(following.due, now)}{earliest}: {following.reason}"
    parts = [f"none now: {following.reason}"]
    if following.due is not None:
        parts.append(f"due since {_moment(following.due, now)}")
    if following.until is not None:
        parts.append(f"not before {_moment(following.until, now)}")
    if following.overdue:
        parts.append("this is overdue")
    return "; ".join(parts)


def _schedule(one: RepositoryDetails, now: datetime) -> str:
    parts = [f"{mode} {_moment(at, now)}" for mode, at in (("quick", one.next_quick), ("full", one.next_full)) if at]
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
    return f"{job.job}, since {_moment(job.created, now)}; {job.pending or state}"


def _history_row(entry: MaintenanceEntry, now: datetime) -> list[Cell]:
    failed = entry.result is MaintenanceOutcome.FAILED
    took = _NONE
    if entry.start_timestamp is not None and entry.complete_timestamp is not None:
        took = format_age(entry.complete_timestamp - entry.start_timestamp)
    result = str(entry.result or _NONE)
    return [Styled(result, BAD) if failed else result, _moment(entry.start_timestamp, now), took, entry.message]


def _moment(moment: datetime | None, now: datetime) -> str:
    """Return the time and how far away it is; empty if there is none."""
    if moment is None:
        return ""
    distance = f"in {_until(moment, now)}" if moment > now else f"{_age(moment, now)} ago"
    return f"{format_time(moment)} ({distance})"


def _until(moment: datetime, now: datetime) -> str:
    return format_age(moment - now)


def _age(moment: datetime | None, now: datetime) -> str:
    return format_age(now - moment) if moment is not None else _NONE
