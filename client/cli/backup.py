"""The command `nodeagent backup`: makes backups of volumes, verifies them, and shows ours and Velero's."""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import click
from click.core import ParameterSource

from client.backups.manifests import BackupError, BackupRequest, DataMover, Method, parse_pairs
from client.backups.plan import Choice, ClaimName, check_backup, plan_backup, start_backup, sum_up_missing
from client.cli import collection_commands as groups
from client.cli import options as cli
from client.cli.backup_delete import delete
from client.cli.backup_files import copy, ls
from client.cli.output import BAD, GOOD, WARN, Cell, OutputFormat, Printer, Styled
from client.collections.collection import Backups
from client.collections.models import Backup, BackupTransfer, explain_end
from client.session import Session
from client.text import format_bytes
from client.verifications.report import (
    VerificationError,
    VerificationReport,
    VerifiedVolume,
    VolumeOutcome,
    choose_volumes,
    explain_report,
)
from client.verifications.verify import VerificationRequest, verify_volumes
from core.errors import ConfigError
from core.models.verification import WHOLE_PERCENT
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_EXAMPLES: Final = f"""\
examples:
  nodeagent backup create before-upgrade --pvc app/data --wait
        back up one volume, and show the progress
  nodeagent backup describe before-upgrade
        its volumes, and why one of them does not move
  nodeagent backup cp before-upgrade:app/data/etc/app.conf .
        copy a file of it to this machine; backup ls shows what there is

-n is the namespace of PVCs; --agent-namespace where the agents run.

{cli.EXIT_CODES}"""

_GET_EXAMPLES: Final = """\
examples:
  nodeagent backup get -o wide
        all of them, the newest first
  nodeagent backup get -o json
        {"backups": [{"name": ..., "phase": ..., "volumes": [...]}], "notes": [...]}
  nodeagent backup get --from-storage-location default
        the snapshots in the bucket, Velero's too, also if this cluster knows nothing of them

Backups of a Velero server are shown with the volumes whose data the agents move.
"""

_ACKNOWLEDGE_EXAMPLES: Final = """\
examples:
  nodeagent backup acknowledge night-1
        its volumes are as small as it says: nothing is wrong

A backup of a file system is Shrunk if it has less than half of the files or bytes of the newest one
before it that is not Shrunk, and more than 100 files or 64 MiB less. Until you acknowledge it, or the
next backup has nine tenths of its size, status and an alert name it, and that newest one is kept.
"""


@click.group("backup", cls=cli.UserGroup, epilog=_EXAMPLES, no_args_is_help=False)
def backup() -> None:
    """Back up volumes without a Velero server, show and verify backups."""


backup.add_command(delete)
backup.add_command(ls)
backup.add_command(copy)


@backup.command("get", epilog=_GET_EXAMPLES)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=groups.complete_backups)
@click.option("--namespace", "-n", metavar="NAME", default="", help="only those with volumes of this namespace")
@click.option("--from-storage-location", "location", metavar="NAME", default="", help="list what this bucket holds")
@cli.output_option
@cli.workload_options
async def _get(
    names: tuple[str, ...], namespace: str, location: str, form: OutputFormat, cluster: Connection, printer: Printer
) -> None:
    """List backups, or the snapshots in a bucket."""
    if location:
        await groups.get_stored(location, names, namespace, form=form, cluster=cluster, printer=printer)
    else:
        await groups.get_groups(Backups, names, form, cluster, printer, volume_namespace=namespace)


@backup.command("describe", epilog="examples:\n  nodeagent backup describe night-1\n")
@click.argument("name", metavar="NAME", shell_complete=groups.complete_backups)
@cli.output_option
@cli.workload_options
async def _describe(name: str, form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """Show each volume of one backup, its transfer, and what it waits for."""
    await groups.show_group(Backups, name, form, cluster, printer)


@backup.command("cancel", epilog="examples:\n  nodeagent backup cancel night-1\n")
@click.argument("name", metavar="NAME", shell_complete=groups.complete_backups)
@cli.workload_options
async def _cancel(name: str, access: ClusterAccess, cluster: Connection, printer: Printer) -> None:
    """End the transfers of a backup that have not ended. Volumes that are in the bucket stay there."""
    _, canceled, failures = await Backups(cluster.client, cluster.namespace).cancel(name)
    groups.print_canceled(printer, "backup", name, canceled=canceled, failures=failures, access=access)


@backup.command("acknowledge", epilog=_ACKNOWLEDGE_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=groups.complete_backups)
@cli.workload_options
async def _acknowledge(name: str, cluster: Connection, printer: Printer) -> None:
    """Acknowledge a backup that is Shrunk: that its volumes became so small is right."""
    now = cluster.time.now().replace(microsecond=0)
    volumes, notes, failures = await Backups(cluster.client, cluster.namespace).acknowledge(name, now)
    printer.notes(notes)
    if volumes:
        groups.print_volumes(printer, volumes)
        printer.note(f"acknowledged: older copies of {'it' if len(volumes) == 1 else 'them'} expire as usual")
    elif not failures:
        printer.note(f"no volume of backup {name} is Shrunk: nothing to acknowledge")
    groups.check_changed(printer, failures, f"acknowledged in backup {name}")


_OPTIONS: Final = (
    click.option("--pvc", "claims", metavar="NAMESPACE/NAME", multiple=True, help="PVC to back up; may be repeated"),
    click.option("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for -l and --pvc NAME"),
    click.option("--selector", "-l", metavar="LABELS", default=None, help="PVCs of the namespace with these labels"),
    click.option(
        "--method",
        type=click.Choice([method.value for method in Method]),
        default=Method.AUTO.value,
        help="csi-snapshot, fs-backup from a running pod, or auto: the first that is possible (default: auto)",
    ),
    click.option(
        "--data-mover",
        type=click.Choice([mover.value for mover in DataMover]),
        default=None,
        help="fs: files; block: the volume as a device, by csi-snapshot (default: as nodeagent.io.blockStorageClasses)",
    ),
    click.option(
        "--storage-location",
        metavar="NAME",
        default="",
        help="BackupStorageLocation (default: the one that is default)",
    ),
    click.option("--labels", metavar="KEY=VALUE,...", default="", help="labels of the transfers"),
    click.option("--annotations", metavar="KEY=VALUE,...", default="", help="annotations of the transfers"),
    cli.ignore_server_option,
)


def backup_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add these options; the command gets `choice`, a Choice, and `location`, `labels` and `annotations`."""

    @functools.wraps(function)
    def run(*args: Any, **given: Any) -> object:
        chosen = ("claims", "namespace", "selector", "method", "data_mover", "ignore_velero_server")
        choice = Choice.parse(**{key: given.pop(key) for key in chosen})
        for key in ("labels", "annotations"):
            given[key] = parse_pairs(f"--{key}", given[key])
        return function(*args, choice=choice, location=given.pop("storage_location"), **given)

    return cli.add_options(*_OPTIONS)(run)


_CREATE_EXAMPLES: Final = """\
examples:
  nodeagent backup create before-upgrade --pvc app/data --wait
        one volume; wait until its data is in the bucket
  nodeagent backup create night-1 --pvc app/data --pvc db/data --ttl 720h
        two volumes, to be kept for 30 days; then a schedule with --ttl deletes them
  nodeagent backup create night-1 -n app -l tier=web
        all PVCs of the namespace app with that label; -l "" is all of them
  nodeagent backup create files --pvc app/data --method fs-backup -o json
        from a running pod, without a snapshot

All volumes are checked before anything is created. The command may be repeated: what exists of the
backup stays. --wait shows each volume; Ctrl-C ends the waiting, and not the backup.

A backup has the data of volumes only. It has no manifests, and runs no hooks: stop or flush a database
first, or use Velero. It is crash-consistent with csi-snapshot; fs-backup reads files that may change.

exit codes:
  0  created; with --wait: every volume is in the bucket
  1  a volume cannot be backed up, or is not in the backup; the message names it
  2  invalid command line, or the cluster is not reachable
"""


@backup.command("create", epilog=_CREATE_EXAMPLES)
@click.argument("name", metavar="NAME")
@backup_options
@click.option("--ttl", type=cli.DURATION, metavar="DURATION", help="time to live of a backup (default: none)")
@click.option(
    "--read-all-files", is_flag=True, help="also read files whose size and time are unchanged since the last backup"
)
@click.option("--wait", "-w", is_flag=True, help="wait until every volume has ended, and show the progress")
@cli.output_option
@cli.workload_options
def _create(name: str, access: ClusterAccess, form: OutputFormat, choice: Choice, **given: Any) -> None:
    """Back up volumes: their data only, without manifests and hooks."""
    wait: bool = given.pop("wait")
    request = BackupRequest(name=name, namespace=access.namespace, **given)
    creation = groups.Creation(Backups, name, form, access, Printer(), wait=wait)
    creation.run(_back_up(creation, request, choice))


async def _back_up(creation: groups.Creation[BackupTransfer, Backup], request: BackupRequest, choice: Choice) -> None:
    printer = creation.printer
    async with connect(creation.access) as cluster:
        tools = Session.of(cluster, printer.note)
        with printer.progress(f"checking the volumes of {request.name}"):
            volumes = await plan_backup(tools, request, choice)
            await check_backup(tools, volumes)
        creation.started = True
        missing = await start_backup(tools, volumes)
        # All of them, and before a wait that may be interrupted.
        printer.notes(missing)
        if missing and len(missing) == len(volumes):
            raise BackupError(f"{sum_up_missing(missing)}; nothing was started")
        backup = await creation.follow(cluster)
        creation.print(backup, created=bool(volumes))
        if not creation.form.for_programs:
            printer.note(groups.VOLUMES_ONLY)
    if missing:
        state = f"{len(volumes) - len(missing)} of {len(volumes)} volumes were started"
        raise BackupError(f"{sum_up_missing(missing)}; {state}: repeat the command, or cancel the backup")
    if creation.wait and (failure := explain_end(backup)):
        raise BackupError(f"backup {backup.name} is {backup.phase}: {failure}")


_VERIFY_EXAMPLES: Final = """\
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
  1  one did not, could not be verified, or is not complete, or an error of the cluster
  2  invalid command line, or the cluster is not reachable
"""

_HEADERS: Final = ("PVC", "METHOD", "RESULT", "SHARE", "FILES", "SIZE", "MESSAGE")
_WIDE_HEADERS: Final = (*_HEADERS, "TRANSFER", "SNAPSHOT", "LOCATION")
_STYLES: Final = {VolumeOutcome.PASSED: GOOD, VolumeOutcome.FAILED: BAD, VolumeOutcome.UNVERIFIED: WARN}


@backup.command("verify", epilog=_VERIFY_EXAMPLES)
@click.argument("name", metavar="NAME", shell_complete=groups.complete_backups)
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
@cli.timeout_option(timedelta(hours=6), "the Job of one repository may take, or of one restore")
@cli.output_option
@cli.workload_options
async def _verify(name: str, access: ClusterAccess, form: OutputFormat, **given: Any) -> None:
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
        with cli.working(cluster, printer, f"preparing the verification of {name}") as tools:
            verified = await verify_volumes(tools, volumes, request)
    report = VerificationReport(backup=backup.name, volumes=verified, notes=[*notes, *skipped])
    headers = _WIDE_HEADERS if form is OutputFormat.WIDE else _HEADERS
    rows = [_row(one, wide=form is OutputFormat.WIDE) for one in verified]
    printer.answer(report, form, lambda: printer.table(headers, rows), report.notes)
    if failure := explain_report(report):
        raise VerificationError(f"backup {name}: {failure}")
    if skipped:
        raise VerificationError(f"backup {name} is {backup.phase}: {sum_up_missing(skipped)}")


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
