"""The command `nodeagent describe`: everything about one transfer, and what to do next."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import click

from client.cli.options import EXIT_CODES, UserCommand, cluster_options, complete_names, list_names, output_option
from client.cli.output import BAD, GOOD, HEADING, WARN, Cell, OutputFormat, Printer, Styled
from client.status.describe import TransferDetails, TransferReader, TransferStage, find_stages, tell_story
from client.status.records import TRANSFER_KINDS, kind_named, parse_target
from client.text import format_ago, format_bytes, format_limits, format_shrinkage, format_verification
from core.models.base import format_time
from core.models.phases import AttemptStage, Phase
from core.text import format_age
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_STYLES: Final = {Phase.COMPLETED: GOOD, Phase.FAILED: BAD, Phase.CANCELED: WARN}
_BAR_COLUMNS: Final = 40

_EXAMPLES: Final = f"""\
examples:
  nodeagent describe du/backup-1
        the DataUpload of that name: its story, a bar for each phase, pods, the end of the log
  nodeagent describe du/backup-1 -o wide
        also each step with its time, what interrupted it, and its Events
  nodeagent describe dd/restore-1 -o json | jq -r .advice
        what to do next

kinds:
  du   DataUpload         datauploads
  dd   DataDownload       datadownloads
  pvb  PodVolumeBackup    podvolumebackups
  pvr  PodVolumeRestore   podvolumerestores

{EXIT_CODES}
Events are kept for an hour by the API server, and pods until the transfer ends. What cannot be read is left
out, and a note says why.
"""


def _complete(context: click.Context, _: click.Parameter, incomplete: str) -> Sequence[str]:
    """Return KIND/NAME for the shell; kinds alone before the slash, and nothing if the cluster does not answer."""
    kind, slash, begun = incomplete.partition("/")
    if not slash:
        return [f"{one.short}/" for one in TRANSFER_KINDS if one.short.startswith(kind.lower())]

    async def read(cluster: Connection) -> list[str]:
        return await list_names(cluster, kind_named(kind).resource)

    return [f"{kind}/{name}" for name in complete_names(context, begun, read)]


@click.command("describe", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("words", metavar="KIND/NAME", nargs=-1, required=True, shell_complete=_complete)
@output_option
@cluster_options
async def describe(words: Sequence[str], form: OutputFormat, access: ClusterAccess) -> None:
    """Show everything about one transfer, and what to do next."""
    target, printer = parse_target(words), Printer()
    async with connect(access) as cluster:
        found = await TransferReader(cluster.client, cluster.namespace).describe(target)
        now = cluster.time.now()
    printer.answer(found, form, lambda: _print(printer, found, now, wide=form is OutputFormat.WIDE), found.notes)


def _print(printer: Printer, one: TransferDetails, now: datetime, *, wide: bool) -> None:
    printer.facts(_facts(one, now))
    if story := list(tell_story(one, now)):
        printer.line(Styled("What happened:", HEADING))
        for sentence in story:
            printer.line(f"  {sentence}")
    printer.section("Phases:", ("PHASE", "TOOK", "WHEN"), _bars(find_stages(one, now)))
    if wide:
        _print_steps(printer, one, now)
    pods: list[list[Cell]] = [[pod.name, pod.phase, pod.node or "-", str(pod.attempt), pod.state] for pod in one.pods]
    printer.section("Pods:", ("NAME", "PHASE", "NODE", "ATTEMPT", "STATE"), pods)
    if one.log:
        printer.line(Styled("End of the log:", HEADING))
        for line in one.log:
            printer.line(f"  {line}")
    printer.line(Styled(f"What to do next: {one.advice}", HEADING))


def _bars(stages: Sequence[TransferStage]) -> list[list[Cell]]:
    """Return a row for each stage, with a bar where it is in the whole life of the transfer."""
    whole = sum((stage.length for stage in stages), timedelta()) or timedelta(seconds=1)
    rows: list[list[Cell]] = []
    before = timedelta()
    for stage in stages:
        first, last = (round(_BAR_COLUMNS * (moment / whole)) for moment in (before, before + stage.length))
        first = min(first, _BAR_COLUMNS - 1)
        bar = "=" * max(1, last - first)
        rows.append([stage.name, format_age(stage.length), f"[{' ' * first}{bar}".ljust(_BAR_COLUMNS + 1) + "]"])
        before += stage.length
    return rows


def _print_steps(printer: Printer, one: TransferDetails, now: datetime) -> None:
    history: list[list[Cell]] = [
        [format_time(moment.at), format_ago(moment.at, now), moment.what, moment.message] for moment in one.history
    ]
    printer.section("History:", ("TIME", "AGE", "WHAT", "MESSAGE"), history)
    ends: list[list[Cell]] = [
        [format_time(end.at), end.cause, end.node or "-", "yes" if end.terminated else "no", end.message or ""]
        for end in one.interruptions
    ]
    printer.section("Interruptions:", ("TIME", "CAUSE", "NODE", "ENDED", "MESSAGE"), ends)
    printer.events(one.events, now)


def _facts(one: TransferDetails, now: datetime) -> Sequence[tuple[str, Cell]]:
    """Return the lines of the page; one without a value is left out."""
    phase = f"{one.phase}, canceling" if one.canceling else str(one.phase)
    share = f" of {format_bytes(one.total_bytes)}" if one.total_bytes else ""
    attempt = f"{one.number}, {one.stage or AttemptStage.RUNNING}; {one.retries} count toward maxRetries"
    took = one.completed - one.accepted if one.completed and one.accepted else None
    created = datetime.fromisoformat(one.created) if one.created else None
    return (
        ("Name", one.shown),
        ("Phase", Styled("unknown", BAD) if one.fault else Styled(phase, _STYLES.get(one.phase, ""))),
        ("Invalid", Styled(one.fault, BAD) if one.fault else ""),
        ("Pending for", Styled(one.reason, WARN) if one.reason else ""),
        ("Message", one.message),
        ("Volume", f"{one.queue}/{one.volume}" if one.volume else ""),
        ("Backup", one.backup),
        ("Schedule", one.schedule),
        ("Location", one.location),
        ("Node", one.node),
        ("Age", format_age(now - created) if created else ""),
        ("Took", format_age(took) if took else ""),
        ("Moved", f"{format_bytes(one.bytes_done)}{share}" if one.bytes_done or one.total_bytes else ""),
        ("New data", "" if one.new_bytes is None else format_bytes(one.new_bytes)),
        ("Limited to", format_limits(one.bandwidth)),
        ("Files", "" if one.files is None else str(one.files)),
        ("Shrunk", format_shrinkage(one.shrunk, now)),
        ("Left out", one.left_out.text if one.left_out is not None else ""),
        ("Snapshot", one.snapshot_id),
        ("Base snapshot", one.base_snapshot),
        ("Verified", format_verification(one.verification, now)),
        ("Attempt", attempt if one.number > 1 else ""),
        ("Outcome", one.outcome),
    )
