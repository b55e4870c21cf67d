"""The command `nodeagent repo`: backup repositories, their maintenance, and snapshots that nothing refers to."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import click

from client.cli.flag_types import DURATION
from client.cli.job_tools import build_job_tools
from client.cli.options import UserGroup, cluster_options, complete_names, list_names, output_option
from client.cli.output import OutputFormat, Printer
from client.cli.repo_pages import print_details, print_list, print_report
from client.connect_command import build_connect_lines
from client.mover_jobs import read_location
from client.repositories import RepositoryReader, read_repository
from client.snapshot_report import report_snapshots
from core.clock import SystemClock
from core.kube.resources import BACKUP_REPOSITORIES
from core.text import format_age
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["repo"]

_REPORT_TIMEOUT: Final = timedelta(minutes=15)

_EXAMPLES: Final = """\
examples:
  nodeagent repo get
        all backup repositories, and when their next maintenance is due
  nodeagent repo describe app-default-kopia
        everything about one: why it is not maintained now, its history, its Events
  nodeagent repo get -o json | jq -r '.repositories[] | select(.next.overdue) | .name'
        those whose maintenance is overdue
  nodeagent repo report app-default-kopia
        kopia snapshots that no backup refers to; nothing is deleted

exit codes:
  0  done
  1  an error of the cluster, such as a missing permission or a wrong name
  2  invalid command line, or the cluster is not reachable
"""

_GET_EXAMPLES: Final = """\
examples:
  nodeagent repo get --namespace velero
        all of them
  nodeagent repo get app-default-kopia db-default-kopia -o wide
        with frequency, unique ID and message
  nodeagent repo get -o json
        {"repositories": [{"name": ..., "next": {"hold": ..., "due": ...}, ...}], "notes": [...]}

The leader says what holds a maintenance. Its status page is read through the API server, which needs the
permission to get pods/proxy. Without it, what the custom resources show is computed here, and a note says so.
"""

_DESCRIBE_EXAMPLES: Final = """\
examples:
  nodeagent repo describe app-default-kopia
        why it is not maintained now, its history, its Events
  nodeagent repo describe app-default-kopia -o yaml
        the same for programs
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


@click.group("repo", cls=UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def repo() -> None:
    """Show backup repositories and their maintenance."""


def _complete_names(context: click.Context, _: click.Parameter, incomplete: str) -> Sequence[str]:
    """Return the names of repositories for the shell; none, if the cluster does not answer."""
    return complete_names(context, incomplete, lambda cluster: list_names(cluster, BACKUP_REPOSITORIES))


@repo.command("get", epilog=_GET_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=_complete_names)
@output_option
@cluster_options
def _get(names: Sequence[str], form: OutputFormat, access: ClusterAccess) -> None:
    """List backup repositories, with their last and next maintenance."""
    asyncio.run(_run_get(names, form, access))


async def _run_get(names: Sequence[str], form: OutputFormat, access: ClusterAccess) -> None:
    clock, printer = SystemClock(), Printer()
    async with connect(access) as cluster:
        found = await _reader(cluster, clock).summarize(names)

    def print_page() -> None:
        if found.repositories:
            print_list(printer, found, clock.now(), wide=form is OutputFormat.WIDE)
        else:
            printer.note(f"there is no BackupRepository in namespace {cluster.namespace}")

    printer.answer(found, form, print_page, found.notes)


@repo.command("describe", epilog=_DESCRIBE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@output_option
@cluster_options
def _describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    """Show everything about one backup repository."""
    asyncio.run(_run_describe(name, form, access))


async def _run_describe(name: str, form: OutputFormat, access: ClusterAccess) -> None:
    clock, printer = SystemClock(), Printer()
    async with connect(access) as cluster:
        found = await _reader(cluster, clock).describe(name)
    printer.answer(found, form, lambda: print_details(printer, found, clock.now()), found.notes)


def _reader(cluster: Connection, clock: SystemClock) -> RepositoryReader:
    return RepositoryReader(cluster.client, cluster.namespace, now=clock.now)


@repo.command("connect-command", epilog=_CONNECT_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@cluster_options
def _connect_command(name: str, access: ClusterAccess) -> None:
    """Print the shell lines that connect kopia to one backup repository, read-only."""
    asyncio.run(_run_connect_command(name, access))


async def _run_connect_command(name: str, access: ClusterAccess) -> None:
    async with connect(access) as cluster:
        repository = await read_repository(cluster.client, cluster.namespace, name)
        location_name = repository.spec.backup_storage_location
        location = await read_location(cluster.client, cluster.namespace, location_name)
    printer = Printer()
    given = (("--context", access.kubecontext), ("--kubeconfig", access.kubeconfig))
    for line in build_connect_lines(repository, location, [f"{flag}={value}" for flag, value in given if value]):
        printer.line(line)


@repo.command("report", epilog=_REPORT_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=_complete_names)
@click.option(
    "--timeout",
    type=DURATION,
    metavar="DURATION",
    default=_REPORT_TIMEOUT,
    help=f"how long the Job may take (default: {format_age(_REPORT_TIMEOUT)})",
)
@output_option
@cluster_options
def _report(name: str, timeout: timedelta, form: OutputFormat, access: ClusterAccess) -> None:
    """List kopia snapshots of one backup repository that no backup refers to."""
    asyncio.run(_run_report(name, timeout, form, access))


async def _run_report(name: str, timeout: timedelta, form: OutputFormat, access: ClusterAccess) -> None:  # noqa: ASYNC109 - of the Job
    printer = Printer()
    async with connect(access) as cluster:
        with printer.progress(f"preparing the report of {name}") as show:
            tools = build_job_tools(cluster, show, printer.note)
            found = await report_snapshots(tools, name, timeout=timeout)
    printer.answer(found, form, lambda: print_report(printer, found, wide=form is OutputFormat.WIDE), found.notes)
