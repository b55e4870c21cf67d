"""The command `nodeagent version`: the versions of this command and of the installed agents."""

from typing import Final

import click

from client.cli.options import UserCommand, cluster_options, output_option
from client.cli.output import GOOD, NONE, WARN, Cell, OutputFormat, Printer, Styled
from client.installation import AgentVersion, read_versions
from core.version import VERSION
from nodeagent.runtime.connection import ClusterAccess, connect

_HEADERS: Final = ("NODE", "VERSION", "READY", "IMAGE", "POD")

_EXAMPLES: Final = """\
examples:
  nodeagent version --client-only
        this command alone; no cluster is needed
  nodeagent version -o json | jq -r '.agents[] | select(.version != "0.1.0") | .node'
        nodes whose agent has another version

The version of an agent is read from its status page through the API server, which needs the permission to get
pods/proxy. Without it, a note says so.
"""


@click.command("version", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--client-only", is_flag=True, help="do not ask the agents")
@output_option
@cluster_options
async def version(access: ClusterAccess, form: OutputFormat, *, client_only: bool) -> None:
    """Show the version of this command and of the agents."""
    printer = Printer()
    if not form.for_programs:
        printer.line(f"client: {VERSION}")
    if client_only:
        if form.for_programs:
            printer.document({"client": VERSION}, form)
        return
    async with connect(access) as cluster:
        found = await read_versions(cluster.client, cluster.namespace)
    if form.for_programs:
        printer.document({"client": VERSION, **found.to_wire()}, form)
        return
    if found.agents:
        printer.table(_HEADERS, [_row(one) for one in found.agents])
    printer.notes(found.notes)


def _row(one: AgentVersion) -> list[Cell]:
    ready: Cell = Styled("yes", GOOD) if one.ready else Styled("no", WARN)
    known: Cell = one.version if one.version == VERSION else Styled(one.version or NONE, WARN)
    return [one.node or NONE, known, ready, one.image or NONE, one.pod]
