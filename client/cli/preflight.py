"""The command `nodeagent preflight`: a small volume through the installed agents, to a bucket and back."""

from datetime import timedelta
from typing import Final

import click

from client.cli.options import UserCommand, cluster_options, output_option, size_type, timeout_option, working
from client.cli.output import BAD, GOOD, OutputFormat, Printer, Styled
from client.volume_check import CheckStep, VolumeCheckError, check_volume
from client.volume_check_plan import CheckChoice, plan_check
from core.errors import AgentError
from core.kube.client import KubeClient
from nodeagent.runtime.connection import Connection
from nodeagent.runtime.preflight import judge_definitions, read_definitions

_EXAMPLES: Final = """\
examples:
  nodeagent preflight --storage-class gp3
        write 1 MiB into a volume, take a snapshot, back it up, restore it, and compare
  nodeagent preflight --storage-class gp3 --namespace-for-test team-a
        in a namespace that exists, with its quotas and policies
  nodeagent preflight -o json
        {"steps": [{"name": ..., "seconds": ..., "error": ...}], "snapshotId": ...}

Everything that it creates is deleted, also what an earlier run left, except volumes and snapshots of
classes with the policy Retain: it names them, with the command that deletes them. The BackupRepository
of its namespace stays, too, with 1 MiB of data: nodeagent repo report lists the kopia snapshot, and
how to delete it.

exit codes:
  0  the volume came back as it was
  1  a step failed, or something could not be deleted
  2  it was not started: no agents, location or class, or the cluster is not reachable
"""


_SIZE: Final = size_type("a quantity such as 64Mi or 1Gi, at least 2Mi", 1 << 21)


@click.command("preflight", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--storage-class", metavar="NAME", default="", help="class of the volume (default: the cluster's)")
@click.option(
    "--volume-snapshot-class", metavar="NAME", default="", help="class of the snapshot (default: the driver's)"
)
@click.option("--namespace-for-test", metavar="NAME", default="", help="existing namespace (default: one of its own)")
@click.option("--storage-location", metavar="NAME", default="default", help="BackupStorageLocation (default: default)")
@click.option("--size", type=_SIZE, metavar="QUANTITY", default="", help="size of the claim (default: 64Mi)")
@timeout_option(timedelta(minutes=10), "all steps may take")
@output_option
@cluster_options
async def preflight(
    cluster: Connection, printer: Printer, form: OutputFormat, timeout: timedelta, **chosen: str
) -> None:
    """Check the installed agents by a small volume."""
    choice = CheckChoice(
        storage_class=chosen["storage_class"] or None,
        snapshot_class=chosen["volume_snapshot_class"] or None,
        space=chosen["namespace_for_test"] or None,
        location=chosen["storage_location"],
        size=chosen["size"] or CheckChoice.size,
    )
    with working(cluster, printer, "checking agents, location and classes") as tools:
        plan = await plan_check(cluster.client, cluster.namespace, choice)
        if dropped := await _describe_dropped(cluster.client):
            printer.note(dropped)
        report = await check_volume(
            tools, plan, timeout, lambda step: None if form.for_programs else _print_step(printer, step)
        )
    if form.for_programs:
        printer.document(report.to_wire(), form)
    elif report.snapshot_id:
        repository = f"BackupRepository {plan.space}-{plan.location}-kopia"
        printer.note(f"{repository} stays, with kopia snapshot {report.snapshot_id} (1 MiB)")
    if report.error:
        failed = next(step.name for step in report.steps if step.error)
        raise VolumeCheckError(f"preflight failed at {failed}: {report.error}")


async def _describe_dropped(client: KubeClient) -> str | None:
    try:
        return judge_definitions(await read_definitions(client)).message
    except AgentError as e:
        return f"fields that the definitions drop are not known: {e}"


def _print_step(printer: Printer, step: CheckStep) -> None:
    result = Styled("failed", BAD) if step.error else Styled("ok", GOOD)
    printer.table((), [[f"{step.name:<10}", f"{step.seconds:6.1f} s", result]])
