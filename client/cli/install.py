"""The command `nodeagent install`: from flags to objects, which are printed or applied."""

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import click

from client.cli.given_flags import GivenFlags
from client.cli.install_flags import InstallCommand, given_in, install_flags
from client.cli.install_options import build_options, describe_defaults
from client.cli.options import cluster_options, command_for
from client.cli.output import OutputFormat, Printer
from client.cli.schedule import renew
from client.install.apply import ApplyTools
from client.install.manifests import build_installation, read_definitions
from client.install.options import InstallOptions
from client.install.run import InstallRequest, run_install
from core.clock import SystemClock
from core.errors import AgentError
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["install"]

_TIMEOUT: Final = timedelta(minutes=5)

_EXAMPLES: Final = """\
examples:
  nodeagent install --provider aws --bucket backups --backup-location-config region=us-east-2
                    --secret-file ./credentials --image registry.example.com/node-agent:0.1.0 --wait
        agents on every Linux node, with a location; the same command again updates them
  nodeagent install --no-default-backup-location --no-secret --dry-run -o yaml
        the objects of agents that use locations and credentials which exist already
  nodeagent install --crds-only
        only the custom resource definitions, to update them

Flags of velero install have the same meaning here; those of Velero's server are accepted and named in a note.
docs/install.md has more, and the permissions that the command needs.

exit codes:
  0  done
  1  an error of the cluster, or agents that do not come up
  2  invalid command line or configuration, a missing permission, or the cluster is not reachable
"""


@click.command("install", cls=InstallCommand, epilog=_EXAMPLES)
@install_flags
@cluster_options
def install(access: ClusterAccess, **values: Any) -> None:  # noqa: ANN401 - of click
    """Install the node agents, or update them."""
    given, ignored = given_in(values)
    printer, request = Printer(), _read_request(given)
    namespace, options = access.namespace, None
    if not request.crds_only:
        namespace = given.namespace("--namespace", access.namespace)
        options = build_options(given, namespace)
        for note in describe_defaults(given, options):
            printer.note(note)
    if ignored:
        printer.note(f"flags of Velero's server have no effect here: {', '.join(ignored)}")
    if request.form is not None:
        objects = [*read_definitions(), *(build_installation(options) if options is not None else ())]
        printer.document({"apiVersion": "v1", "kind": "List", "items": objects}, request.form)
    if not request.dry_run:
        asyncio.run(_apply(printer, replace(access, namespace=namespace), request, options))


async def _apply(printer: Printer, access: ClusterAccess, request: "_Request", options: InstallOptions | None) -> None:
    async with connect(access) as cluster:
        with printer.progress("checking permissions") as show:
            # Programs that read the objects find nothing else on standard output.
            say = printer.line if request.form is None else show
            tools = ApplyTools(
                client=cluster.client,
                clock=SystemClock(),
                on_result=lambda place, result: say(f"{place}: {result}"),
                on_note=printer.note,
            )
            wanted = InstallRequest(
                namespace=access.namespace,
                definitions=read_definitions(),
                options=options,
                force_conflicts=request.force_conflicts,
                timeout=request.timeout if request.wait else None,
            )
            await run_install(tools, wanted, show)
            if request.wait and options is not None:
                say("the agents are ready" + (", and the location is reachable" if options.location else ""))
        if options is not None and request.form is None:
            await _renew_schedules(printer, access, cluster)


async def _renew_schedules(printer: Printer, access: ClusterAccess, cluster: Connection) -> None:
    """Give schedules the image of the agents; the agents are installed also where that fails."""
    try:
        failures = await renew(cluster, (), printer)
    except AgentError as e:
        failures = [f"schedules were not renewed: {e}"]
    for failure in failures:
        printer.note(f"{failure}: run {command_for(access, 'nodeagent schedule renew')}")


@dataclass(frozen=True)
class _Request:
    """What is done with the objects; `form` is how they are printed, None: not at all."""

    dry_run: bool
    crds_only: bool
    force_conflicts: bool
    wait: bool
    timeout: timedelta
    form: OutputFormat | None


def _read_request(given: GivenFlags) -> _Request:
    # Applying is the default, with or without it.
    given.switch("--apply")
    dry_run, crds_only, form = given.switch("--dry-run"), given.switch("--crds-only"), None
    if dry_run or given.has("--output"):
        form = OutputFormat(given.choice("--output", (OutputFormat.YAML, OutputFormat.JSON), OutputFormat.YAML))
    return _Request(
        dry_run=dry_run,
        crds_only=crds_only,
        force_conflicts=given.switch("--force-conflicts", default=True),
        wait=given.switch("--wait"),
        timeout=_TIMEOUT if crds_only else given.duration("--timeout", _TIMEOUT),
        form=form,
    )
