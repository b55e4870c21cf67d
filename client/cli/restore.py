"""The command `nodeagent restore`: volumes of a backup or from a bucket into new PVCs, or into those that exist."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import click
from click.core import ParameterSource

from client.backups.plan import ClaimName
from client.cli import collection_commands as groups
from client.cli import options as cli
from client.cli.output import OutputFormat, Printer
from client.cli.restore_in_place import InPlaceWish, confirm_and_start, in_place_options, parse_in_place
from client.collections.collection import Backups, Restores, WaitingPod, cancel_restore, delete_waiting_pods
from client.collections.models import Restore, RestoreTransfer, explain_end
from client.installation import explain_absent_agents, explain_velero_server, read_ready_image
from client.restores.create import check_name, check_restore, plan_restore, start_restore
from client.restores.manifests import RequestedRestore
from client.restores.sources import (
    RestoreError,
    SavedVolume,
    Source,
    UnsetRestoreError,
    choose_from_backups,
    choose_stored,
)
from client.session import Session
from core.clock import SystemClock
from core.errors import AgentError, ConfigError
from core.models.names import OBJECT_NAME
from nodeagent.runtime.connection import ClusterAccess, Connection, connect

_EXAMPLES: Final = """\
examples:
  nodeagent restore create --from-backup night-1 --wait
        all volumes of a backup; wait until they are there
  nodeagent restore create trial --from-backup night-1 --namespace-mappings app:app-trial
        beside the originals, in another namespace, which is created if it does not exist
  nodeagent restore create --from-backup night-1 --from-storage-location default --wait
        by what the bucket holds: no BackupRepository and no transfer of the backup is needed
  nodeagent restore create --from-snapshot 74b385d6f9a60c1f8e2b7d5a3c4e9f10 \\
          --from-storage-location default --size 10Gi
        one snapshot of Velero, whose tags do not have the size of the PVC
  nodeagent restore create --from-backup night-1 --pvc app/data --in-place --incremental --wait
        into the volume that the PVC has, without files that are equal; a VolumeSnapshot is taken before
  nodeagent restore create --from-backup night-1 --pvc app/data --in-place --incremental --dry-run -o json
        {"restore": ..., "volumes": [{"claim": ..., "plan": {"toWrite": {"files": ..., "bytes": ...}, ...}}]}

New PVCs have the size, class, modes and labels of the old ones. Until a volume is restored, its PVC selects
it by the label velero.io/dynamic-pv-restore, so that no provisioner binds an empty volume. A PVC that exists
is written to with --in-place only, and only while no pod uses it: it is deleted, and recreated as it was
with its volume, which it is bound to again once the restore has ended. All volumes are checked before
anything is created, and the command may be repeated with the name of the restore. Ctrl-C ends no restore.

Volumes of a class with late binding (WaitForFirstConsumer) are restored once a pod uses their PVC. With
--method restore-wait, that is a pod of the agents' image in the namespace of the PVC, which ends then; --wait
deletes it, and so does restore cancel. It runs as root with one capability, which the Pod Security Standard
baseline allows.

exit codes:
  0  created; with --wait: every volume is restored; with --dry-run or a no: the plan is shown
  1  a volume cannot be restored, or was not; the message names it
  2  invalid command line, or the cluster is not reachable
  3  with --wait: every volume is restored, but one did not take owners, modes or times of its files
"""


_DIRECT: Final = "data-download"
_BY_POD: Final = "restore-wait"
"""Values of `--method`."""

_SIZE: Final = cli.size_type("such as 10Gi")


@click.command("create", cls=cli.UserCommand, epilog=_EXAMPLES)
@click.argument("name", metavar="[NAME]", default="")
@click.option("--from-backup", metavar="NAME", default="", help="backup; of Velero's in a bucket, the UID")
@click.option("--from-snapshot", metavar="ID", default="", help="one kopia snapshot")
@click.option("--from-storage-location", metavar="NAME", default="", help="look for it in this bucket")
@click.option("--cluster", metavar="UID", default="", help="UID of the cluster, if several use the bucket")
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
@click.option("--size", type=_SIZE, metavar="QUANTITY", default="", help="size of a PVC, if the backup does not say it")
@click.option("--storage-class", metavar="NAME", default="", help="class of such a PVC (default: the cluster's)")
@in_place_options
@click.option("--wait", "-w", is_flag=True, help="wait until every volume has ended, and show the progress")
@cli.ignore_server_option
@cli.output_option
@cli.workload_options
def create(name: str, access: ClusterAccess, form: OutputFormat, **given: Any) -> None:
    """Restore volumes into new PVCs, or into those that exist."""
    source, in_place = _parse_source(given), parse_in_place(given, form)
    request = RequestedRestore(
        name=name or f"{source.backup or 'snapshot'}-{SystemClock().now():%Y%m%d%H%M%S}",
        namespace=access.namespace,
        namespaces=_parse_mappings("--namespace-mappings", given["namespace_mappings"]),
        classes=_parse_mappings("--storage-class-mappings", given["storage_class_mappings"]),
        size=given["size"] or None,
        storage_class=given["storage_class"] or None,
        in_place=in_place.how if in_place else None,
    )
    if not OBJECT_NAME.fullmatch(request.name):
        raise ConfigError(f'"{request.name}" is no name of a restore: up to 253 lowercase letters, digits, "-" and "."')
    by_pod = given["method"] == _BY_POD
    creation = groups.Creation(Restores, request.name, form, access, Printer(), wait=given["wait"], waiting_pods=by_pod)
    creation.run(_create(creation, request, source, in_place, given))


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
    claims = tuple(ClaimName.parse(word, given["namespace"]) for word in given["claims"])
    return Source(backup, snapshot, cluster=given["cluster"], namespace=given["namespace"], claims=claims)


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


async def _create(
    creation: groups.Creation[RestoreTransfer, Restore],
    request: RequestedRestore,
    source: Source,
    in_place: InPlaceWish | None,
    given: Mapping[str, Any],
) -> None:
    printer, wait = creation.printer, creation.wait
    async with connect(creation.access) as cluster:
        tools = Session.of(cluster, printer.note)
        if not given["ignore_velero_server"]:
            benefit = "and it also restores manifests and runs hooks"
            if text := await explain_velero_server(cluster.client, cluster.namespace, "restore", benefit):
                raise RestoreError(text)
        if text := await explain_absent_agents(cluster.client, cluster.namespace, printer.note):
            raise RestoreError(text)
        volumes = await _find_volumes(source, given["from_storage_location"], cluster, printer)
        if creation.waiting_pods:
            request = replace(request, wait_image=await read_ready_image(cluster.client, cluster.namespace))
        begun = await _begin(creation, in_place, tools=tools, request=request, volumes=volumes)
        if begun is None:
            printer.note("nothing was restored")
            return
        created, pods = begun
        try:
            restore = await creation.follow(cluster)
        except AgentError:
            # The restore may go on: only those that wait for nothing are deleted.
            await delete_waiting_pods(tools, pods if wait else (), timedelta())
            raise
        creation.print(restore, created=created)
        if wait:
            await delete_waiting_pods(tools, pods)
    if wait and (failure := explain_end(restore)):
        raise RestoreError(f"restore {restore.name} is {restore.phase}: {failure}")
    if wait and (noted := [one for one in restore.volumes if one.message]):
        more = f", and {len(noted) - 1} more" if len(noted) > 1 else ""
        raise UnsetRestoreError(f"PVC {noted[0].namespace}/{noted[0].claim} is restored, but {noted[0].message}{more}")


async def _begin(
    creation: groups.Creation[RestoreTransfer, Restore],
    in_place: InPlaceWish | None,
    *,
    tools: Session,
    request: RequestedRestore,
    volumes: Sequence[SavedVolume],
) -> tuple[bool, list[WaitingPod]] | None:
    """Return whether something was created, and the pods that wait; None if the user does not want it."""
    again = _repetition(request.name)
    await check_name(tools, request, volumes)
    try:
        if in_place is not None:
            begun = await confirm_and_start(
                creation, in_place, tools=tools, request=request, volumes=volumes, again=again
            )
            return None if begun is None else (begun, [])
        with creation.printer.progress(f"checking the volumes of {request.name}"):
            planned = await plan_restore(tools, request, volumes)
            await check_restore(tools, planned)
        creation.started = True
        return await start_restore(tools, planned), [one.pod for one in planned if one.by_pod]
    except RestoreError as e:
        if not creation.started:
            raise
        raise RestoreError(f"{e}; to continue: {again}") from e


async def _find_volumes(source: Source, location: str, cluster: Connection, printer: Printer) -> Sequence[SavedVolume]:
    """Return the volumes by the backups in the cluster, or by what the bucket of the location holds."""
    if not location:
        backups = Backups(cluster.client, cluster.namespace)
        found = await backups.list_named(source.backup) if source.backup else None
        if found is None or not found.groups:
            found = await backups.list_all()
        # They name the transfers that cannot be read.
        printer.notes(found.notes)
        chosen = choose_from_backups(found.groups, source)
        printer.notes(f"the backup of PVC {one.name} is in doubt: {one.doubt}" for one in chosen if one.doubt)
        return chosen
    namespaces = {claim.namespace for claim in source.claims} or {source.namespace} - {""}
    stored = await groups.read_stored(cluster, printer, location, sorted(namespaces))
    printer.notes(stored.notes)
    return choose_stored(stored, source)


_RESTORE_EXAMPLES: Final = f"""\
examples:
  nodeagent restore create --from-backup night-1 --wait
        the volumes of a backup, each into a new PVC of its old name
  nodeagent restore describe night-1-20261123020000
        its volumes, and why one of them does not move

{cli.EXIT_CODES}"""


@click.group("restore", cls=cli.UserGroup, epilog=_RESTORE_EXAMPLES, no_args_is_help=False)
def restore() -> None:
    """Restore volumes into new PVCs, and show restores."""


restore.add_command(create)


@restore.command("get", epilog="examples:\n  nodeagent restore get -o json\n")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=groups.complete_restores)
@cli.output_option
@cli.workload_options
async def _get(names: tuple[str, ...], form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """List restores, the newest first. A Velero server's are not shown: velero restore get does that."""
    await groups.get_groups(Restores, names, form, cluster, printer)


@restore.command("describe", epilog="examples:\n  nodeagent restore describe night-1-20261123020000\n")
@click.argument("name", metavar="NAME", shell_complete=groups.complete_restores)
@cli.output_option
@cli.workload_options
async def _describe(name: str, form: OutputFormat, cluster: Connection, printer: Printer) -> None:
    """Show each volume of one restore, its transfer, and what it waits for."""
    await groups.show_group(Restores, name, form, cluster, printer)


@restore.command("cancel", epilog="examples:\n  nodeagent restore cancel night-1-20261123020000\n")
@click.argument("name", metavar="NAME", shell_complete=groups.complete_restores)
@cli.workload_options
async def _cancel(name: str, access: ClusterAccess, cluster: Connection, printer: Printer) -> None:
    """End the transfers of a restore that have not ended. Their PVCs stay without a volume."""
    with cli.working(cluster, printer, f"canceling {name}") as tools:
        canceled, failures = await cancel_restore(tools, name)
    groups.print_canceled(printer, "restore", name, canceled=canceled, failures=failures, access=access)
