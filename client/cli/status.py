"""The command `nodeagent status`: the health of agents, queue, transfers, repositories and configuration."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import click

from client.cli.flag_types import DURATION
from client.cli.options import UserCommand, cluster_options, output_option
from client.cli.output import OutputFormat, Printer
from client.cli.status_pages import print_status, summarize
from client.status.follow import ProgressRates, StatusFollower
from client.status.health import is_managed
from client.status.read import StatusReader
from client.status.records import ClusterSnapshot, UnreadPart
from client.status.view import StatusView, build_view
from core.aio import wait_for_event
from core.clock import Clock, Deadline, SystemClock
from core.errors import AgentError, ConfigError
from core.text import format_age
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["status"]

_REDRAW_SECONDS: Final = 1.0
"""Between two redraws, whatever changes."""

_QUIET_SECONDS: Final = 4.0
"""How long the page may stay as it is while nothing changes but ages; added to the pause."""

_EXAMPLES: Final = """\
examples:
  nodeagent status -n velero
        health and why, queue, transfers with rate and time left, nodes, repositories, configuration
  nodeagent status -w
        the same, live; Ctrl-C ends it
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

    def check(self) -> None:
        """Raise ConfigError if the options contradict each other."""
        if self.watch and self.form.for_programs:
            raise ConfigError("--watch shows a page for people, so -o is table or wide (see nodeagent status --help)")
        if self.timeout is not None and not self.wait_idle:
            raise ConfigError("--timeout needs --wait-idle (see nodeagent status --help)")


@click.command("status", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--watch", "-w", is_flag=True, help="stay, and show each change, at most once a second")
@click.option("--wait-idle", is_flag=True, help="wait until no transfer is pending or running")
@click.option("--timeout", type=DURATION, metavar="DURATION", help="how long --wait-idle may take (default: no limit)")
@output_option
@cluster_options
def status(
    access: ClusterAccess, form: OutputFormat, *, watch: bool, wait_idle: bool, timeout: timedelta | None
) -> None:
    """Show the health of the agents and what they do: queue, transfers, nodes, repositories."""
    options = _Options(form, watch, wait_idle, timeout)
    options.check()
    asyncio.run(_run(access, options))


async def _run(access: ClusterAccess, options: _Options) -> None:
    printer, clock = Printer(), SystemClock()
    async with connect(access) as cluster:
        reader = StatusReader(cluster.client, cluster.namespace, now=cluster.time.now)
        if options.watch or options.wait_idle:
            view = await _follow(cluster, reader, printer, options, clock)
        else:
            view = build_view(await reader.read())
    if options.form.for_programs:
        printer.document(view.to_wire(), options.form)
    elif not options.watch:
        print_status(printer, view, wide=options.wide)


async def _follow(
    cluster: Connection, reader: StatusReader, printer: Printer, options: _Options, clock: Clock
) -> StatusView:
    """Show each change; return the last view once no transfer is left, if that is waited for.

    Raises:
        NotIdleError: the timeout passed, or transfers cannot be read.
    """
    deadline = Deadline.after(clock, options.timeout) if options.timeout is not None else None
    # A cluster that does not answer is an error now; later ones are shown.
    first = await reader.read()
    follower, rates = StatusFollower(cluster.client, cluster.namespace, reader, clock), ProgressRates()
    views = [build_view(first)]

    async def work() -> None:
        while not _is_done(snapshot := follower.snapshot(), options, deadline):
            follower.changed.clear()
            rates.observe(snapshot.transfers, snapshot.at)
            views[0] = build_view(snapshot, rates.rate_of)
            show(views[0])
            await clock.sleep(_REDRAW_SECONDS)
            await wait_for_event(follower.changed, _left(deadline))
        views[0] = build_view(snapshot, rates.rate_of)
        show(views[0])

    with _shown(printer, options) as show:
        show(views[0])
        if not _is_done(first, options, deadline):
            await follower.run(work)
    return views[0]


def _left(deadline: Deadline | None) -> float:
    """Return how long nothing may be shown."""
    return _QUIET_SECONDS if deadline is None else max(0.0, min(_QUIET_SECONDS, deadline.remaining_seconds))


def _is_done(snapshot: ClusterSnapshot, options: _Options, deadline: Deadline | None) -> bool:
    """Return whether there is nothing left to wait for.

    Raises:
        NotIdleError: the timeout passed, or transfers cannot be read.
    """
    if not options.wait_idle:
        return False
    expired = deadline is not None and deadline.expired
    unread = [one for one in snapshot.unread if one.part is UnreadPart.TRANSFERS]
    if unread and (expired or not unread[0].passing):
        why = unread[0].why
        raise NotIdleError(f"transfers cannot be read, so it is not known whether any is left: {why}")
    if faulty := [one for one in snapshot.transfers if one.fault]:
        why = f"{faulty[0].shown}: {faulty[0].fault}"
        raise NotIdleError(f"transfers cannot be read, so it is not known whether any is left: {why}")
    left = [one.shown for one in snapshot.transfers if one.active and is_managed(snapshot, one)]
    if left and expired and options.timeout is not None:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise NotIdleError(f"not idle within {format_age(options.timeout)}: {left[0]}{more}")
    return not left and not unread


@contextmanager
def _shown(printer: Printer, options: _Options) -> Iterator[Callable[[StatusView], None]]:
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
