"""The command `nodeagent restore create`: volumes from a bucket into new PVCs."""

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final

import click
from click.core import ParameterSource

from client.backups.moving import explain_end, explain_velero_server
from client.backups.view import BackupList, read_backups, read_named
from client.cli.backup_pages import live_rows
from client.cli.claim_flags import parse_claim
from client.cli.options import UserCommand, command_for, output_option, workload_options
from client.cli.output import OutputFormat, Printer
from client.cli.restore_pages import print_restored_volumes
from client.cli.stored import read_stored
from client.restores.create import (
    check_restore,
    plan_restore,
    start_restore,
)
from client.restores.objects import RequestedRestore
from client.restores.sources import (
    RestoreError,
    SavedVolume,
    Source,
    UnsetRestoreError,
    choose_from_backups,
    choose_stored,
)
from client.restores.view import Restore, read_restore, wait_for_restore
from client.restores.waiting_pods import RestoreTools, delete_waiting_pods
from client.text import format_bytes
from client.volume_check_plan import find_image
from core.clock import SystemClock
from core.errors import AgentError, ConfigError
from core.models.base import format_time
from core.models.names import OBJECT_NAME
from core.models.units import parse_quantity
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

__all__ = ["create"]

_EXAMPLES: Final = """\
examples:
  nodeagent restore create --from-backup night-1 --wait
        all volumes of a backup; wait until they are there
  nodeagent restore create trial --from-backup night-1 --namespace-mappings app:app-trial
        beside the originals, in another namespace, which is created if it does not exist
  nodeagent restore create --from-backup night-1 --pvc app/data --storage-class-mappings fast:standard
        one volume, with another storage class
  nodeagent restore create --from-backup night-1 --from-storage-location default --wait
        by what the bucket holds: no BackupRepository and no transfer of the backup is needed
  nodeagent restore create --from-snapshot 74b385d6f9a60c1f8e2b7d5a3c4e9f10 \\
          --from-storage-location default --size 10Gi
        one snapshot of Velero, whose tags do not have the size of the PVC

New PVCs have the size, class, modes and labels of the old ones. Until a volume is restored, its PVC selects
it by the label velero.io/dynamic-pv-restore, so that no provisioner binds an empty volume. A PVC that exists
is never written to. All volumes are checked before anything is created, and the command may be repeated with
the name of the restore. --wait shows each volume; Ctrl-C ends the waiting, and not the restore.

Volumes of a class with late binding (WaitForFirstConsumer) are restored once a pod uses their PVC. With
--method restore-wait, that is a pod of the agents' image in the namespace of the PVC, which ends then; --wait
deletes it, and so does restore cancel. It runs as root with one capability, which the Pod Security Standard
baseline allows.

exit codes:
  0  created; with --wait: every volume is restored
  1  a volume cannot be restored, or was not; the message names it
  2  invalid command line, or the cluster is not reachable
  3  with --wait: every volume is restored, but one did not take owners, modes or times of its files
"""


_DIRECT: Final = "data-download"
_BY_POD: Final = "restore-wait"
"""Values of `--method`."""


@dataclass
class _Run:
    """One run of the command; `started` is set once something of the restore exists, `again` repeats it."""

    request: RequestedRestore
    source: Source
    location: str
    form: OutputFormat
    wait: bool
    by_pod: bool
    ignore_velero_server: bool
    again: str
    printer: Printer = field(default_factory=Printer)
    started: bool = False


@click.command("create", cls=UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="[NAME]", default="")
@click.option("--from-backup", metavar="NAME", default="", help="backup; of Velero's in a bucket, the UID")
@click.option("--from-snapshot", metavar="ID", default="", help="one kopia snapshot")
@click.option("--from-storage-location", metavar="NAME", default="", help="look for it in this bucket")
@click.option("--cluster", metavar="UID", default="", help="of which cluster, if several use the bucket")
@click.option("--pvc", "claims", metavar="NAMESPACE/NAME", multiple=True, help="only this PVC; may be repeated")
@click.option("--namespace", "-n", metavar="NAME", default="", help="only PVCs of this namespace")
@click.option("--namespace-mappings", metavar="OLD:NEW,...", default="", help="namespaces of the new PVCs")
@click.option("--storage-class-mappings", metavar="OLD:NEW,...", default="", help="storage classes of the new PVCs")
@click.option(
    "--method",
    type=click.Choice([_DIRECT, _BY_POD]),
    default=_DIRECT,
    help="restore-wait: into the volume of a pod that waits for the data, for late binding (default: data-download)",
)
@click.option("--size", metavar="QUANTITY", default="", help="size of a PVC, if the backup does not say it")
@click.option("--storage-class", metavar="NAME", default="", help="class of such a PVC (default: the cluster's)")
@click.option("--wait", "-w", is_flag=True, help="wait until every volume has ended, and show the progress")
@click.option("--ignore-velero-server", is_flag=True, help="create it although a Velero server is in the namespace")
@output_option
@workload_options
def create(name: str, access: ClusterAccess, form: OutputFormat, **given: Any) -> None:  # noqa: ANN401 - click's
    """Restore volumes into new PVCs."""
    source = _parse_source(given)
    request = RequestedRestore(
        name=name or _default_name(source),
        namespace=access.namespace,
        namespaces=_parse_mappings("--namespace-mappings", given["namespace_mappings"]),
        classes=_parse_mappings("--storage-class-mappings", given["storage_class_mappings"]),
        size=_parse_size(given["size"]),
        storage_class=given["storage_class"],
    )
    if not OBJECT_NAME.fullmatch(request.name):
        raise ConfigError(
            f'"{request.name}" is no name of a restore: lowercase letters, digits, "-" and "." are allowed'
        )
    run = _Run(
        request,
        source,
        given["from_storage_location"],
        form,
        wait=given["wait"],
        by_pod=given["method"] == _BY_POD,
        ignore_velero_server=given["ignore_velero_server"],
        again=_repetition(request.name),
    )
    try:
        asyncio.run(_create(run, access))
    except KeyboardInterrupt:
        if run.started:
            commands = (
                command_for(access, f"nodeagent restore {verb} {request.name}") for verb in ("describe", "cancel")
            )
            pods = " and deletes its pods, also once it has ended" if run.by_pod else ""
            run.printer.note("the restore goes on: {} shows it, {} ends it".format(*commands) + pods)
        raise


def _repetition(name: str) -> str:
    """Return the command that continues this restore, which may have a name that the user did not give."""
    context = click.get_current_context()
    words = ["nodeagent", "restore", "create", name]
    for option in context.command.params:
        key = option.name or ""
        if not isinstance(option, click.Option) or context.get_parameter_source(key) is not ParameterSource.COMMANDLINE:
            continue
        value, flag = context.params[key], max(option.opts, key=len)
        if option.is_flag:
            words.append(flag)
            continue
        for one in value if option.multiple else (value,):
            words += [flag, str(one)]
    return shlex.join(words)


def _parse_source(given: dict[str, Any]) -> Source:
    backup, snapshot = given["from_backup"], given["from_snapshot"]
    if bool(backup) == bool(snapshot):
        raise ConfigError("set either --from-backup or --from-snapshot")
    if given["cluster"] and not given["from_storage_location"]:
        raise ConfigError("--cluster needs --from-storage-location: it is about what a bucket holds")
    claims = tuple(parse_claim(word, given["namespace"]) for word in given["claims"])
    return Source(backup, snapshot, cluster=given["cluster"], namespace=given["namespace"], claims=claims)


def _default_name(source: Source) -> str:
    return f"{source.backup or 'snapshot'}-{SystemClock().now():%Y%m%d%H%M%S}"


def _parse_mappings(flag: str, text: str) -> dict[str, str]:
    pairs = {}
    for part in filter(None, text.split(",")):
        old, colon, new = part.partition(":")
        if not colon or not OBJECT_NAME.fullmatch(old) or not OBJECT_NAME.fullmatch(new):
            raise ConfigError(f'{flag}: "{part}" is not allowed: expected OLD:NEW')
        if old in pairs:
            raise ConfigError(f"{flag}: {old} is given twice")
        pairs[old] = new
    return pairs


def _parse_size(text: str) -> str:
    try:
        usable = not text or parse_quantity(text) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f'--size: "{text}" is not allowed: expected such as 10Gi')
    return text


async def _create(run: _Run, access: ClusterAccess) -> None:
    async with connect(access) as cluster:
        tools = RestoreTools(cluster.client, SystemClock(), run.printer.note)
        if not run.ignore_velero_server:
            benefit = "and it also restores manifests and runs hooks"
            if text := await explain_velero_server(cluster.client, cluster.namespace, "restore", benefit):
                raise RestoreError(text)
        volumes, request = await _find_volumes(run, cluster), run.request
        if run.by_pod:
            request = replace(request, wait_image=await find_image(cluster.client, cluster.namespace))
        with run.printer.progress(f"checking the volumes of {request.name}"):
            planned = await plan_restore(tools, request, volumes)
            await check_restore(tools, planned)
        run.started = True
        try:
            created = await start_restore(tools, planned)
        except RestoreError as e:
            raise RestoreError(f"{e}; to continue: {run.again}") from e
        pods = [one.pod for one in planned if one.by_pod]
        try:
            restore = await _follow(run, cluster)
        except AgentError:
            # The restore may go on: only those that wait for nothing are deleted.
            await delete_waiting_pods(tools, cluster.namespace, pods if run.wait else (), timedelta())
            raise
        _print(run, restore, access, created=created)
        if run.wait:
            await delete_waiting_pods(tools, cluster.namespace, pods)
    if run.wait and (failure := explain_end(restore)):
        raise RestoreError(f"restore {restore.name} is {restore.phase}: {failure}")
    if run.wait and (noted := [one for one in restore.volumes if one.message]):
        more = f", and {len(noted) - 1} more" if len(noted) > 1 else ""
        raise UnsetRestoreError(f"PVC {noted[0].namespace}/{noted[0].claim} is restored, but {noted[0].message}{more}")


async def _find_volumes(run: _Run, cluster: Connection) -> Sequence[SavedVolume]:
    source, printer = run.source, run.printer
    if not run.location:
        named = await read_named(cluster.client, cluster.namespace, source.backup) if source.backup else BackupList()
        found = named if named.backups else await read_backups(cluster.client, cluster.namespace)
        return choose_from_backups(found.backups, source)
    namespaces = {claim.namespace for claim in source.claims} or {source.namespace} - {""}
    stored = await read_stored(cluster, printer, run.location, sorted(namespaces))
    for note in stored.notes:
        printer.note(note)
    return choose_stored(stored, source)


async def _follow(run: _Run, cluster: Connection) -> Restore:
    """Wait for the restore if the user asked for it, and return it."""
    name = run.request.name
    if run.wait:
        with run.printer.live() as show:
            return await wait_for_restore(
                cluster.client, SystemClock(), (cluster.namespace, name), lambda rows: show(live_rows(rows))
            )
    return await read_restore(cluster.client, cluster.namespace, name)


def _print(run: _Run, restore: Restore, access: ClusterAccess, *, created: bool) -> None:
    """Print the restore; without `created`, all of it existed before."""
    name, printer = restore.name, run.printer
    if not created:
        since = f" since {format_time(restore.created)}" if restore.created else ""
        printer.note(f"restore {name} exists{since}: nothing was created")
    if run.form.for_programs:
        printer.document(restore.to_wire(), run.form)
        return
    if run.wait:
        size = format_bytes(restore.total_bytes)
        printer.line(f"restore {name} is {restore.phase}: {restore.counted} volumes, {size}")
        return
    print_restored_volumes(printer, restore.volumes)
    command = command_for(access, f"nodeagent restore describe {name}")
    pods = f", {command_for(access, f'nodeagent restore cancel {name}')} deletes its pods once it has ended"
    start = "the restore was started: " if created else ""
    printer.note(f"{start}{command} shows it{pods if run.by_pod else ''}")
