"""The command `nodeagent status`: the health of agents, queue, transfers, repositories and configuration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import click

from client.cli.options import DURATION, UserCommand, cluster_options, output_option
from client.cli.output import BAD, GOOD, NONE, WARN, Cell, OutputFormat, Printer, Styled
from client.status.follow import ProgressRates, StatusFollower, pause_after
from client.status.health import Health, is_managed
from client.status.read import StatusReader
from client.status.records import TRANSFER_KINDS, ClusterSnapshot, UnreadPart
from client.status.view import ActiveRow, NodeRow, PendingRow, StatusView, build_view
from client.text import MOST_SECONDS, format_ago, format_bytes
from core.aio import wait_for_event
from core.clock import Clock, Deadline, SystemClock
from core.errors import AgentError, ConfigError
from core.models.backups import RetentionReport
from core.models.names import NO_CONFIG
from core.models.phases import Phase
from core.models.storage import RepositoryPhase
from core.text import format_age
from nodeagent.coverage.states import CoverageState
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_STYLES: Final = {Health.HEALTHY: GOOD, Health.UNKNOWN: WARN, Health.DEGRADED: WARN, Health.UNHEALTHY: BAD}
_SHORT: Final = {kind.name: kind.short for kind in TRANSFER_KINDS}
_TRANSFER_HEADERS: Final = ("TRANSFER", "PHASE", "NODE", "VOLUME", "PROGRESS", "RATE", "ETA", "WAITING FOR")
_PENDING_HEADERS: Final = ("POSITION", "TRANSFER", "VOLUME", "AGE", "REASON", "MESSAGE")
_NODE_HEADERS: Final = ("NODE", "AGENT", "SLOTS", "PREPARING", "CONFIGURATION", "RESTARTS", "POD")
_ROWS: Final = 15
"""Rows of a section; a wide answer has all of them."""

_MESSAGE: Final = 90
"""Characters of a message in a row; a wide answer has all of it."""

_UNKNOWN: Final = Styled("unknown", WARN)
_IN_ORDER: Final = frozenset({CoverageState.PROTECTED, CoverageState.LEFT_OUT})


class _Section:
    """Prints sections: all of their rows if `wide`, else the first ones."""

    def __init__(self, printer: Printer, *, wide: bool) -> None:
        self._printer = printer
        self.wide = wide

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        if not rows:
            return
        self._printer.line()
        kept = rows if self.wide else rows[:_ROWS]
        self._printer.section(title, headers, kept)
        if len(kept) < len(rows):
            self._printer.line(f"  ... {len(rows) - len(kept)} more (-o wide lists all)")

    def message(self, text: str) -> str:
        return text if self.wide or len(text) <= _MESSAGE else f"{text[: _MESSAGE - 3]}..."


def summarize(view: StatusView) -> str:
    """Return the state in one line."""
    order = list(Phase)
    phases = [f"{view.phases[name]} {name}" for name in sorted(view.phases, key=lambda name: order.index(Phase(name)))]
    agents = f"{sum(node.ready for node in view.nodes)} of {len(view.nodes)} agents ready"
    agents = "agents unknown" if UnreadPart.AGENTS in view.unread else agents
    known = ", ".join(phases) or ("unknown" if UnreadPart.TRANSFERS in view.unread else "none")
    return f"{view.health}: {agents}; transfers: {known}"


def print_status(printer: Printer, view: StatusView, *, wide: bool = False) -> None:
    """Print everything."""
    section = _Section(printer, wide=wide)
    text = summarize(view).removeprefix(view.health)
    printer.line(Styled(f"{view.health.upper()}{text}", _STYLES[view.health]))
    for finding in view.findings:
        see = f" (see {finding.see})" if finding.see else ""
        printer.line(Styled(f"  {finding.health}: {finding.message}{see}", _STYLES[finding.health]))
    _print_leader(printer, view)
    transfers = [_active_row(section, row) for row in view.transfers]
    section.table(f"Transfers ({len(transfers)} with a node)", _TRANSFER_HEADERS, transfers)
    pending = [_pending_row(section, row, view.at) for row in view.pending]
    section.table(f"Pending ({len(pending)})", _PENDING_HEADERS, pending)
    failed = [
        [_shown(row.kind, row.name), format_ago(row.completed, view.at), section.message(row.message)]
        for row in view.failed
    ]
    section.table("Failed within a day", ("TRANSFER", "ENDED", "MESSAGE"), failed)
    section.table(f"Nodes ({len(view.nodes)})", _NODE_HEADERS, [_node_row(row, view) for row in view.nodes])
    _print_storage(section, view)
    if view.retention is not None:
        _print_retention(section, view.retention, view.at)
    printer.notes((*(view.volumes.notes if view.volumes is not None else ()), *view.notes))


def _print_leader(printer: Printer, view: StatusView) -> None:
    config, leader = view.configuration, view.leader
    quota = NONE if view.queue_length is None else str(view.queue_length)
    source = ", computed here" if view.positions_computed else ""
    state = _config_state(view)
    facts: list[tuple[str, Cell]] = [
        ("Leader", f"{leader.node} ({leader.holder})" if leader.holder else Styled("none", BAD)),
        ("Queue", f"{view.queued} queued{source}; prepareQueueLength {quota}"),
        ("Configuration", Styled(f"{state}: rejected", BAD) if config.errors else state),
    ]
    if UnreadPart.LEASE in view.unread:
        facts[0] = ("Leader", _UNKNOWN)
    if UnreadPart.CONFIG in view.unread:
        facts[1:] = [("Queue", f"{view.queued} queued{source}"), ("Configuration", _UNKNOWN)]
    facts += [("", Styled(error, BAD)) for error in config.errors]
    facts += [("", Styled(warning, WARN)) for warning in config.warnings]
    printer.facts([("Volumes", _volumes_fact(view)), *facts])


def _volumes_fact(view: StatusView) -> Cell:
    if view.volumes is None:
        return _UNKNOWN
    if view.volumes.counts.keys() <= _IN_ORDER:
        return view.volumes.sentence
    return Styled(f"{view.volumes.sentence} (nodeagent volumes says why)", WARN)


def _config_state(view: StatusView) -> str:
    config = view.configuration
    named = f"ConfigMap {config.name}, {config.hash}" if config.name else "no ConfigMap"
    agreeing = sum(node.config == (config.hash or NO_CONFIG) for node in view.nodes)
    return f"{named}, active on {agreeing} of {len(view.nodes)} agents"


def _active_row(section: _Section, row: ActiveRow) -> list[Cell]:
    phase = f"{row.phase} ({row.attempt})" if row.attempt > 1 else str(row.phase)
    moved = format_bytes(row.bytes_done)
    if row.total_bytes:
        share = min(100, row.bytes_done * 100 // row.total_bytes)
        moved = f"{moved} of {format_bytes(row.total_bytes)}, {share} %"
    waiting = f"{row.reason}: {row.message}" if row.reason else row.message
    return [
        _shown(row.kind, row.name),
        Styled(f"{phase}, canceling", WARN) if row.canceling else phase,
        row.node or NONE,
        f"{row.volume_namespace}/{row.volume}",
        moved if row.began is not None or row.bytes_done else NONE,
        f"{format_bytes(int(row.bytes_per_second))}/s" if row.bytes_per_second is not None else NONE,
        format_age(timedelta(seconds=min(row.eta_seconds, MOST_SECONDS))) if row.eta_seconds is not None else NONE,
        section.message(waiting) or NONE,
    ]


def _pending_row(section: _Section, row: PendingRow, now: datetime) -> list[Cell]:
    reason = row.reason or ("Queued" if row.position else NONE)
    return [
        str(row.position or NONE),
        _shown(row.kind, row.name),
        f"{row.volume_namespace}/{row.volume}",
        format_ago(datetime.fromisoformat(row.created), now).removesuffix(" ago") if row.created else NONE,
        Styled(f"{reason}, canceling", WARN) if row.canceling else reason,
        section.message(row.message),
    ]


def _node_row(row: NodeRow, view: StatusView) -> list[Cell]:
    same = row.config in {"", view.configuration.hash or NO_CONFIG}
    config = row.config or "unknown"
    state = "ready, leader" if row.leader and row.ready else "ready" if row.ready else "not ready"
    return [
        row.node or NONE,
        Styled(state, GOOD if row.ready else BAD),
        f"{row.running}/{'?' if row.slots is None else row.slots}",
        str(row.preparing),
        config if same else Styled(config, WARN),
        str(row.restarts),
        row.pod,
    ]


def _print_storage(section: _Section, view: StatusView) -> None:
    rows: list[list[Cell]] = [
        [
            one.name,
            one.volume_namespace,
            one.location,
            Styled(one.phase, GOOD if one.phase == RepositoryPhase.READY else WARN),
            format_ago(one.maintained, view.at) if one.maintained else "never",
            section.message(one.message or one.failed),
        ]
        for one in view.repositories
    ]
    headers = ("NAME", "VOLUME NAMESPACE", "LOCATION", "PHASE", "MAINTAINED", "MESSAGE")
    section.table(f"Repositories ({len(rows)})", headers, rows)
    locations: list[list[Cell]] = [
        [
            one.name,
            Styled(one.phase or "not validated", GOOD if one.phase == "Available" else WARN),
            "read-only" if one.read_only else "read-write",
            format_ago(one.validated, view.at),
            section.message(one.message),
        ]
        for one in view.locations
    ]
    section.table("Locations", ("NAME", "PHASE", "ACCESS", "VALIDATED", "MESSAGE"), locations)


def _print_retention(section: _Section, report: RetentionReport, now: datetime) -> None:
    rows: list[list[Cell]] = [
        [
            one.backup,
            f"{one.namespace}/{one.claim}",
            one.location,
            format_ago(one.created, now).removesuffix(" ago"),
            format_bytes(one.bytes),
            section.message(one.reason),
            one.command or "",
        ]
        for one in report.held
    ]
    headers = ("BACKUP", "VOLUME", "LOCATION", "AGE", "SIZE", "REASON", "COMMAND")
    section.table(f"Retention ({report.held_count} kept)", headers, rows)


def _shown(kind: str, name: str) -> str:
    return f"{_SHORT.get(kind, kind)}/{name}"


_REDRAW_SECONDS: Final = 1.0
"""Between two redraws, whatever changes."""

_QUIET_SECONDS: Final = 4.0
"""How long the page may stay as it is while nothing changes but ages; added to the pause."""

_EXAMPLES: Final = """\
examples:
  nodeagent status -w
        health and why, queue, transfers, nodes, repositories, configuration, live; Ctrl-C ends it
  nodeagent status --wait-idle --timeout 2h
        wait until no transfer is pending or running
  nodeagent status -o json | jq -r '.health, .findings[].message'
        for programs

health:
  healthy    no rule found anything
  unknown    something could not be read: the answer names it
  degraded   something needs attention; other transfers work
  unhealthy  transfers cannot be admitted, or a location is not available

exit codes:
  0  shown, whatever the health is; with --wait-idle, no transfer is left
  1  an error of the cluster, such as a missing permission; with --wait-idle, the timeout passed
  2  invalid command line, or the cluster is not reachable

Positions in the queue are those that the leader says. Its status page is read through the API server,
which needs the permission to get pods/proxy. Without it, positions follow from the custom resources, and a
note says so.
"""


class NotIdleError(AgentError):
    """Transfers are left, or may be."""


@dataclass(frozen=True)
class _Options:
    """What was asked for; `timeout` None: wait without a limit."""

    form: OutputFormat
    watch: bool
    wait_idle: bool
    timeout: timedelta | None

    @property
    def wide(self) -> bool:
        return self.form is OutputFormat.WIDE


@click.command("status", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--watch", "-w", is_flag=True, help="stay, and show each change, at most once a second")
@click.option("--wait-idle", is_flag=True, help="wait until no transfer is pending or running")
@click.option("--timeout", type=DURATION, metavar="DURATION", help="how long --wait-idle may take (default: no limit)")
@output_option
@cluster_options
async def status(
    access: ClusterAccess, form: OutputFormat, *, watch: bool, wait_idle: bool, timeout: timedelta | None
) -> None:
    """Show the health of the agents and what they do: queue, transfers, nodes, repositories."""
    if watch and form.for_programs:
        raise ConfigError("--watch shows a page for people, so -o is table or wide (see nodeagent status --help)")
    if timeout is not None and not wait_idle:
        raise ConfigError("--timeout needs --wait-idle (see nodeagent status --help)")
    options = _Options(form, watch, wait_idle, timeout)
    printer, clock = Printer(), SystemClock()
    async with connect(access) as cluster:
        reader = StatusReader(cluster.client, cluster.namespace, now=cluster.time.now)
        if watch or wait_idle:
            view = await _follow(cluster, reader, printer, options, clock)
        else:
            view = build_view(await reader.read())
    if form.for_programs:
        printer.document(view.to_wire(), form)
    elif not watch:
        print_status(printer, view, wide=options.wide)


async def _follow(
    cluster: Connection, reader: StatusReader, printer: Printer, options: _Options, clock: Clock
) -> StatusView:
    """Show each change; return the last view once no transfer is left, if that is waited for."""
    deadline = Deadline.after(clock, options.timeout) if options.timeout is not None else None
    # A cluster that does not answer is an error now; later ones are shown.
    first = await reader.read()
    follower = StatusFollower(cluster.client, cluster.namespace, reader, clock, patient=True)
    rates = ProgressRates()
    views = [build_view(first)]

    async def work() -> None:
        while not _is_done(snapshot := follower.snapshot(), options, deadline):
            follower.changed.clear()
            rates.observe(snapshot.transfers, snapshot.at)
            views[0] = build_view(snapshot, rates.rate_of)
            show(views[0])
            await clock.sleep(pause_after(snapshot, _REDRAW_SECONDS))
            left = _QUIET_SECONDS if deadline is None else deadline.remaining_seconds
            await wait_for_event(follower.changed, min(_QUIET_SECONDS, left))
        views[0] = build_view(snapshot, rates.rate_of)
        show(views[0])

    with _shown_status(printer, options) as show:
        show(views[0])
        if not _is_done(first, options, deadline):
            await follower.run(work)
    return views[0]


def _is_done(snapshot: ClusterSnapshot, options: _Options, deadline: Deadline | None) -> bool:
    if not options.wait_idle:
        return False
    expired = deadline is not None and deadline.expired
    unread = [one for one in snapshot.unread if one.part is UnreadPart.TRANSFERS]
    lost = [one.why for one in unread if expired or not one.passing]
    lost += [f"{one.shown}: {one.fault}" for one in snapshot.transfers if one.fault]
    if lost:
        raise NotIdleError(f"transfers cannot be read, so it is not known whether any is left: {lost[0]}")
    left = [one.shown for one in snapshot.transfers if one.active and is_managed(snapshot, one)]
    if left and expired and options.timeout is not None:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise NotIdleError(f"not idle within {format_age(options.timeout)}: {left[0]}{more}")
    return not left and not unread


@contextmanager
def _shown_status(printer: Printer, options: _Options) -> Iterator[Callable[[StatusView], None]]:
    """Yield what shows a view: a page on a terminal, else a line when its summary changes."""
    if options.watch and printer.is_terminal:
        with printer.screen() as draw:
            yield lambda view: draw(lambda page: print_status(page, view, wide=options.wide))
        return
    before = ""

    def show_line(view: StatusView) -> None:
        nonlocal before
        if (line := summarize(view)) != before:
            before = line
            if options.watch:
                printer.line(line)
            else:
                doing(line)

    if options.watch:
        yield show_line
        return
    with printer.progress("waiting until no transfer is left") as doing:
        yield show_line
