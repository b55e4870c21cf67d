"""The command `nodeagent run-schedule` of the pods of a schedule: it needs no Python package but the agent's."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from client.backups.delete import DeletionTools
from client.backups.methods import Method
from client.cli.claim_flags import parse_claims, parse_pairs
from client.cli.job_tools import build_job_tools
from client.collections.collection import VolumeProgress
from client.schedules.objects import JOB_VARIABLE
from client.schedules.request import ScheduleRequest
from client.schedules.run import ScheduleTools, run_schedule
from client.text import format_age, format_bytes
from core.errors import ConfigError
from core.models.base import format_time
from core.models.names import SCHEDULE_COMMAND
from core.models.retention import RetentionReport
from core.models.units import parse_duration
from core.text import one_line
from nodeagent.runtime.command_line import CommandParser, add_kubeconfig
from nodeagent.runtime.connection import ClusterAccess, Connection, connect
from nodeagent.runtime.settings import DEFAULT_NAMESPACE

__all__ = ["build_tools", "explain_report", "parse_run", "run_words"]

_ABOUT: Final = """\
Runs a schedule once: backs its PVCs up, waits for the end, and deletes expired backups. Pods of
`nodeagent schedule create` run it."""

_EXAMPLES: Final = """\
examples:
  kubectl -n velero create job night-now --from=cronjob/night
        run a schedule now
  nodeagent schedule run night --dry-run
        show what it would back up and delete

exit codes:
  0  every volume is in the bucket, and what is expired is deleted
  1  something of it failed; the message names it
  2  invalid command line, or the cluster is not reachable
"""


def parse_run(words: Sequence[str]) -> tuple[ScheduleRequest, ClusterAccess]:
    """Return the schedule that the words after `run-schedule` describe, and how its cluster is reached.

    Raises:
        ConfigError: they are invalid.
    """
    given = _parser().parse_args(list(words))
    selector: str | None = given.selector
    request = ScheduleRequest(
        name=given.name,
        namespace=given.agent_namespace,
        claims=parse_claims(given.pvc, given.namespace, selector),
        selector_namespace=given.namespace,
        selector=selector or "",
        method=Method(given.method),
        location=given.storage_location,
        ttl=_parse_ttl(given.ttl),
        verify=given.verify,
        ignore_velero_server=given.ignore_velero_server,
        labels=parse_pairs("--labels", given.labels),
        annotations=parse_pairs("--annotations", given.annotations),
    )
    return request, ClusterAccess(given.kubeconfig or None, given.kubecontext, given.agent_namespace)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"nodeagent {SCHEDULE_COMMAND}",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="name of the schedule, with which those of its backups begin")
    parser.add_argument("--pvc", metavar="NAMESPACE/NAME", action="append", default=[], help="PVC; may be repeated")
    parser.add_argument("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for --selector")
    parser.add_argument("--selector", "-l", metavar="LABELS", default=None, help="PVCs with these labels")
    methods = [str(method) for method in Method]
    parser.add_argument("--method", choices=methods, default=str(Method.AUTO), help="as of backup create")
    parser.add_argument("--storage-location", metavar="NAME", default="", help="BackupStorageLocation")
    parser.add_argument("--ttl", metavar="DURATION", default="", help="when its backups expire (default: never)")
    parser.add_argument("--verify", action="store_true", help="read each backup back from the bucket")
    parser.add_argument("--labels", metavar="KEY=VALUE,...", default="", help="labels of the transfers")
    parser.add_argument("--annotations", metavar="KEY=VALUE,...", default="", help="annotations of the transfers")
    parser.add_argument("--ignore-velero-server", action="store_true", help="as of backup create")
    default = os.environ.get("VELERO_NAMESPACE") or DEFAULT_NAMESPACE
    parser.add_argument("--agent-namespace", metavar="NAME", default=default, help="namespace of the agents")
    add_kubeconfig(parser.add_argument_group("cluster"))
    return parser


def _parse_ttl(text: str) -> timedelta | None:
    if not text:
        return None
    try:
        ttl = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"--ttl: {e}") from e
    if ttl <= timedelta():
        raise ConfigError(f'--ttl: not a positive duration: "{text}"')
    return ttl


def run_words(words: Sequence[str]) -> int:
    """Run the command with the words after its name, and return the exit code.

    Raises:
        AgentError: the run failed.
    """
    request, access = parse_run(words)
    asyncio.run(_run(request, access))
    return 0


async def _run(request: ScheduleRequest, access: ClusterAccess) -> None:
    async with connect(access) as cluster:
        await run_schedule(build_tools(cluster, _say, os.environ.get(JOB_VARIABLE, "")), request)


def build_tools(cluster: Connection, say: Callable[[str], None], job: str = "") -> ScheduleTools:
    """Return what a run works with in this cluster; `say` gets each line of it."""
    jobs = build_job_tools(cluster, say, say)
    deletion = DeletionTools(jobs, lambda: cluster.time.date, in_pod=bool(job))
    return ScheduleTools(
        deletion, _Changes(say).show, say, on_report=lambda report: explain_report(report, say), job=job
    )


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
        say(f"{report.waiting} expired copies wait for later runs{through}: {report.waiting_why}")


def _say(text: str) -> None:
    sys.stdout.write(f"{one_line(text)}\n")
    sys.stdout.flush()


class _Changes:
    """Says when the phase of a volume changes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._phases: dict[str, str] = {}

    def show(self, volumes: list[VolumeProgress]) -> None:
        for one in volumes:
            volume = one.volume
            name = f"{volume.namespace}/{volume.claim}"
            if self._phases.get(name) != volume.phase:
                self._phases[name] = volume.phase
                self._say(f"{name}: {volume.phase}")
