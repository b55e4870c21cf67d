"""The command `nodeagent backup verify`: backups are read back from the bucket, or restored and compared."""

from datetime import timedelta
from typing import Any, Final

import click
from click.core import ParameterSource

from client.backups.plan import ClaimName
from client.cli.collection_commands import complete_backups
from client.cli.options import UserCommand, output_option, timeout_option, workload_options
from client.cli.output import BAD, GOOD, WARN, Cell, OutputFormat, Printer, Styled
from client.collections.collection import Backups
from client.mover_jobs import build_job_tools
from client.text import format_bytes
from client.verifications.report import (
    VerificationError,
    VerificationReport,
    VerifiedVolume,
    VolumeOutcome,
    choose_volumes,
    explain_report,
)
from client.verifications.verify import VerificationRequest, VerificationTools, verify_volumes
from core.errors import ConfigError
from core.models.verification import WHOLE_PERCENT
from nodeagent.runtime.connection import ClusterAccess, connect

_EXAMPLES: Final = """\
examples:
  nodeagent backup verify night-1
        read all files of all its volumes back from the bucket
  nodeagent backup verify night-1 --percent 10
        look for all of its data in the bucket, and read a tenth of the files
  nodeagent backup verify night-1 --pvc app/data --restore
        restore a volume into a scratch PVC, compare each file with the backup, remove the PVC again
  nodeagent backup verify night-1 -o json
        {"backup": ..., "volumes": [{"claim": ..., "outcome": ..., "message": ...}], "notes": [...]}

A short-lived Job reads, with the account of the data movers; no workload is touched. Of a block volume,
and where the share is less than one file, all is read. --restore needs room for the largest volume: they
are restored one after the other, into the agents' namespace. The result goes onto each transfer, as the
annotation nodeagent.io/verification and an Event, and so into the metrics and the alerts.

results:
  passed      all that was read was right
  failed      data is missing, damaged, or not the same; the message names file and blob
  unverified  it could not be read, such as without storage or without a pod: nothing is recorded

exit codes:
  0  all volumes passed
  1  one did not, or could not be verified, or an error of the cluster
  2  invalid command line, or the cluster is not reachable
"""

_HEADERS: Final = ("PVC", "METHOD", "RESULT", "SHARE", "FILES", "SIZE", "MESSAGE")
_WIDE_HEADERS: Final = (*_HEADERS, "TRANSFER", "SNAPSHOT", "LOCATION")
_STYLES: Final = {VolumeOutcome.PASSED: GOOD, VolumeOutcome.FAILED: BAD, VolumeOutcome.UNVERIFIED: WARN}


@click.command("verify", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=complete_backups)
@click.option("--pvc", "claims", metavar="NAMESPACE/NAME", multiple=True, help="only this PVC; may be repeated")
@click.option("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for --pvc NAME")
@click.option(
    "--percent",
    type=float,
    metavar="NUMBER",
    default=WHOLE_PERCENT,
    help="share of the files to read, chosen by chance (default: 100)",
)
@click.option("--restore", is_flag=True, help="restore into a scratch PVC, and compare each file")
@timeout_option(timedelta(hours=6), "the Job of one repository may take, or of one restore")
@output_option
@workload_options
async def verify(name: str, access: ClusterAccess, form: OutputFormat, **given: Any) -> None:
    """Verify a backup: read it back from the bucket, or restore and compare it."""
    context = click.get_current_context()
    if given["restore"] and context.get_parameter_source("percent") is ParameterSource.COMMANDLINE:
        raise ConfigError("--percent is for reading back: --restore compares all files")
    # NaN is in no range.
    if not 0 < given["percent"] <= WHOLE_PERCENT:
        raise ConfigError(f"--percent: {given['percent']:g} is not allowed: more than 0, and at most 100")
    claims = [ClaimName.parse(word, given["namespace"]) for word in given["claims"]]
    if given["namespace"] and not claims:
        raise ConfigError("-n is the namespace of --pvc NAME, which is not set")
    request, printer = VerificationRequest(given["percent"], given["restore"], given["timeout"]), Printer()
    async with connect(access) as cluster:
        backup, notes = await Backups(cluster.client, cluster.namespace).find_one(name)
        volumes, skipped = choose_volumes(backup, claims)
        with printer.progress(f"preparing the verification of {name}") as show:
            tools = VerificationTools(build_job_tools(cluster, show, printer.note), cluster.time.now)
            verified = await verify_volumes(tools, volumes, request)
    report = VerificationReport(backup=backup.name, volumes=verified, notes=[*notes, *skipped])
    printer.answer(report, form, lambda: _print_report(printer, report, form), report.notes)
    if failure := explain_report(report):
        raise VerificationError(f"backup {name}: {failure}")


def _print_report(printer: Printer, report: VerificationReport, form: OutputFormat) -> None:
    wide = form is OutputFormat.WIDE
    printer.table(_WIDE_HEADERS if wide else _HEADERS, [_row(one, wide=wide) for one in report.volumes])


def _row(one: VerifiedVolume, *, wide: bool) -> list[Cell]:
    cells: list[Cell] = [
        f"{one.namespace}/{one.claim}",
        str(one.method),
        Styled(str(one.outcome), _STYLES[one.outcome]),
        "restored" if one.restored else f"{one.percent:g}%",
        str(one.files),
        format_bytes(one.bytes),
        one.message,
    ]
    return [*cells, f"{one.kind}/{one.transfer}", one.snapshot_id, one.location] if wide else cells
