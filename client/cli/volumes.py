"""The command `nodeagent volumes`: which volumes are protected, and why others are not."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import click
import msgspec

from client.cli.options import UserCommand, output_option, workload_options
from client.cli.output import BAD, GOOD, NONE, WARN, Cell, OutputFormat, Printer, Styled
from client.status.read import StatusReader
from client.text import format_ago, format_bytes
from core.text import format_age
from nodeagent.coverage.states import Coverage, CoverageState, VolumeCoverage
from nodeagent.runtime.connection import Connection

_ROWS: Final = 100
"""Rows of a table beside those that need attention; a wide answer has all of them."""

_FEW_ROWS: Final = 10
"""The same of all volumes, so that those that need attention are not scrolled away."""

_REASON: Final = 110
"""Characters of a reason in a row; a wide answer has all of it."""

_STYLES: Final = {
    CoverageState.PROTECTED: GOOD,
    CoverageState.LEFT_OUT: "",
    CoverageState.STALE: WARN,
    CoverageState.SNAPSHOT_ONLY: WARN,
}
_STATES: Final = [state.value for state in CoverageState]

_EXAMPLES: Final = """\
examples:
  nodeagent volumes
        all volumes: those that need attention first, and why
  nodeagent volumes -n app --state never-backed-up --state stale
        volumes of one namespace in one of these states
  nodeagent volumes -o json | jq -r '.volumes[] | select(.state != "protected") | .volume'
        for programs

states:
  protected        a copy in the bucket that is recent enough
  stale            two expected backups were missed, or nothing expects one and the last is older than a week
  never-backed-up  no complete backup is there
  failing          the newest backup failed
  shrunk           the newest backup has much less than the one before it
  snapshot-only    only snapshots are taken, which are not moved to a bucket, or hooks run
  left-out         left out on purpose; the table says by what

Backups are expected by nodeagent schedule and Velero's Schedules, else by the annotation
nodeagent.io/backup-interval of the PVC. A PVC or namespace is left out by the label
velero.io/exclude-from-backup: "true", or by the annotation nodeagent.io/exclude-from-backup with a reason.

-n is the namespace of the volumes; --agent-namespace where the agents run.

exit codes:
  0  shown, whatever the states are
  1  an error of the cluster
  2  invalid command line, or the cluster is not reachable
"""


@click.command("volumes", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--namespace", "-n", metavar="NAME", default="", help="only volumes of this namespace")
@click.option("--state", "states", type=click.Choice(_STATES), multiple=True, help="only this state; may be repeated")
@output_option
@workload_options
async def volumes(
    cluster: Connection, printer: Printer, form: OutputFormat, *, namespace: str, states: Sequence[str]
) -> None:
    """Show which volumes are protected, and why the others are not."""
    snapshot = await StatusReader(cluster.client, cluster.namespace, now=cluster.time.now).read_volumes(namespace)
    coverage = snapshot.coverage or Coverage()
    every = [one for one in coverage.volumes if namespace in {"", one.namespace}]
    chosen = tuple(one for one in every if not states or one.state in states)
    sentence = msgspec.structs.replace(coverage, volumes=tuple(every)).sentence
    answer = msgspec.structs.replace(coverage, volumes=chosen)

    def print_page() -> None:
        printer.line(sentence)
        rows = _ROWS if namespace or states else _FEW_ROWS
        print_table(printer, chosen, snapshot.at, None if form is OutputFormat.WIDE else rows)

    printer.answer(answer, form, print_page, coverage.notes)


def print_table(
    printer: Printer, chosen: Sequence[VolumeCoverage], now: datetime, rows: int | None = _FEW_ROWS
) -> None:
    """Print those that need attention, and so many others; None: all of them, in a wide table."""
    wide = rows is None
    urgent = sum(one.needs_attention for one in chosen)
    shown = chosen if rows is None else chosen[: urgent + rows]
    if not shown:
        return
    printer.line()
    headers = ["VOLUME", "STATE", "LAST BACKUP", "EVERY", "WHY"]
    headers += ["SIZE", "EXPECTED BY", "NOTE"] if wide else []
    printer.table(headers, [_row(one, now, wide=wide) for one in shown])
    if len(shown) < len(chosen):
        printer.line(f"... {len(chosen) - len(shown)} more (-o wide lists all)")


def _row(one: VolumeCoverage, now: datetime, *, wide: bool) -> list[Cell]:
    interval = one.interval_seconds
    reason = one.reason if wide or len(one.reason) <= _REASON else f"{one.reason[: _REASON - 3]}..."
    row: list[Cell] = [
        one.shown,
        Styled(one.state, _STYLES.get(one.state, BAD if one.needs_attention else WARN)),
        format_ago(one.last_backup, now),
        format_age(timedelta(seconds=interval)) if interval is not None else NONE,
        reason,
    ]
    if wide:
        row += [format_bytes(one.bytes) if one.bytes is not None else NONE, one.expected_by or NONE, one.note or NONE]
    return row
