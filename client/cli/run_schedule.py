"""The command `nodeagent run-schedule` of the pods of a schedule: it needs no Python package but the agent's."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from client.collections.collection import VolumeProgress
from client.schedules.request import ScheduleRequest, parse_run
from client.schedules.scheduled_run import ScheduleTools, run_schedule
from client.session import Session, interrupted_by_signals
from client.text import format_bytes, print_line
from core.models.backups import RetentionReport
from core.models.base import format_time
from core.text import format_age
from exposer.pods import JOB_VARIABLE
from nodeagent.runtime.connection import ClusterAccess, Connection, connect


def run_words(words: Sequence[str]) -> int:
    """Run the command with the words after its name, and return the exit code; AgentError: the run failed."""
    request, access = parse_run(words)
    with interrupted_by_signals():
        asyncio.run(_run(request, access))
    return 0


async def _run(request: ScheduleRequest, access: ClusterAccess) -> None:
    async with connect(access) as cluster:
        await run_schedule(build_tools(cluster, print_line, os.environ.get(JOB_VARIABLE) or None), request)


def build_tools(
    cluster: Connection,
    say: Callable[[str], None],
    job: str | None = None,
    on_note: Callable[[str], None] | None = None,
) -> ScheduleTools:
    """Return what a run works with in this cluster; `say` gets each line of it, and notes if `on_note` does not."""
    session = replace(Session.of(cluster, on_note or say, say), in_pod=bool(job))
    return ScheduleTools(session, _say_changes(say), say, on_report=lambda report: explain_report(report, say), job=job)


def explain_report(report: RetentionReport, say: Callable[[str], None]) -> None:
    """Say what a run of retention has left: what a rule keeps, how to let go, and what waits."""
    for one in report.held:
        age = f", {format_age(report.at - one.created)} old" if one.created is not None else ""
        command = f"; {one.command} lets go" if one.command else ""
        say(f"backup {one.backup} is expired, and kept: {one.reason} ({format_bytes(one.bytes)}{age}){command}")
    if more := report.held_count - len(report.held):
        say(f"{more} more expired backups are kept")
    if report.waiting:
        through = f", until {format_time(report.through)}" if report.through is not None else ""
        why = f": {report.waiting_why}" if report.waiting_why else ""
        say(f"{report.waiting} expired copies wait for later runs{through}{why}")


def _say_changes(say: Callable[[str], None]) -> Callable[[list[VolumeProgress]], None]:
    phases: dict[str, str] = {}

    def show(volumes: list[VolumeProgress]) -> None:
        for volume in (one.volume for one in volumes):
            name = f"{volume.namespace}/{volume.claim}"
            if phases.get(name) != volume.phase:
                phases[name] = volume.phase
                say(f"{name}: {volume.phase}")

    return show
