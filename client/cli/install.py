"""The command `nodeagent install`: from flags to objects, which are printed or applied."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import click

from client.cli.install_flags import InstallCommand, find_ignored, install_flags
from client.cli.install_options import build_options, describe_defaults
from client.cli.options import NAMESPACE, cluster_options, command_for
from client.cli.output import OutputFormat, Printer
from client.cli.schedule import renew
from client.install.apply import ApplyTools
from client.install.manifests import build_installation, read_definitions
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

Flags of velero install have the same meaning here; flags of Velero's server are accepted and named in a note.
docs/install.md has more, and the permissions that the command needs.

exit codes:
  0  done
  1  an error of the cluster, or agents that do not come up
  2  invalid command line or configuration, a missing permission, or the cluster is not reachable
"""


@click.command("install", cls=InstallCommand, epilog=_EXAMPLES)
@install_flags
@cluster_options
def install(access: ClusterAccess, **given: Any) -> None:  # noqa: ANN401 - click's
    """Install the node agents, or update them."""
    printer, namespace, options, form = Printer(), access.namespace, None, None
    if not given["crds_only"]:
        namespace = NAMESPACE.read("--namespace", access.namespace)
        options = build_options(given, namespace)
        for note in describe_defaults(given, options):
            printer.note(note)
    if ignored := find_ignored(given):
        printer.note(f"flags of Velero's server have no effect here: {', '.join(ignored)}")
    if given["dry_run"] or given["output"]:
        form = OutputFormat(given["output"] or OutputFormat.YAML)
        objects = [*read_definitions(), *(build_installation(options) if options is not None else ())]
        printer.document({"apiVersion": "v1", "kind": "List", "items": objects}, form)
    if not given["dry_run"]:
        request = InstallRequest(
            namespace=namespace,
            definitions=read_definitions(),
            options=options,
            force_conflicts=given["force_conflicts"],
            timeout=given["timeout"] or _TIMEOUT if given["wait"] else None,
        )
        asyncio.run(_apply(printer, replace(access, namespace=namespace), request, printed=form is not None))


async def _apply(printer: Printer, access: ClusterAccess, request: InstallRequest, *, printed: bool) -> None:
    options = request.options
    async with connect(access) as cluster:
        with printer.progress("checking permissions") as show:
            # Programs that read the objects find nothing else on standard output.
            say = show if printed else printer.line
            tools = ApplyTools(
                client=cluster.client,
                clock=SystemClock(),
                on_result=lambda place, result: say(f"{place}: {result}"),
                on_note=printer.note,
            )
            await run_install(tools, request, show)
            if request.timeout is not None and options is not None:
                say("the agents are ready" + (", and the location is reachable" if options.location else ""))
        if options is not None and not printed:
            await _renew_schedules(printer, access, cluster)


async def _renew_schedules(printer: Printer, access: ClusterAccess, cluster: Connection) -> None:
    """Give schedules the image of the agents; the agents are installed also where that fails."""
    try:
        failures = await renew(cluster, (), printer)
    except AgentError as e:
        failures = [f"schedules were not renewed: {e}"]
    for failure in failures:
        printer.note(f"{failure}: run {command_for(access, 'nodeagent schedule renew')}")
