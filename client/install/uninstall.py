"""Removal of an installation: what is removed, what stays, and what others would lose or would be interrupted.

Objects are recognized by their label; cluster-scoped ones have the name of the namespace in theirs, so that other
installations stay.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from client.install.manifests import build_everything, read_definitions
from client.install.options import place_of, resource_of
from client.permissions import UNINSTALL_PERMISSIONS, delete_permissions
from core.clock import Clock, Deadline
from core.errors import AgentError, ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import ForbiddenError, NotServedError
from core.kube.types import Object, ObjectT, UncheckedObject
from core.kube.velero_server import has_velero_server
from core.models import names as wire
from core.models.phases import FINAL_PHASES, Phase
from core.text import some_of
from exposer.leaked_objects import is_in_namespace
from nodeagent.maintenance.jobs import list_jobs
from nodeagent.runtime.permissions import Permission
from nodeagent.runtime.preflight import missing_permissions

_DAEMON_SETS: Final = (wire.AGENT_DAEMONSET, wire.AGENT_DAEMONSET_WINDOWS)

_RECORDS: Final = (kube.BACKUP_REPOSITORIES, *kube.TRANSFERS)
"""What is deleted with its definition, in all namespaces."""


class Dependents(NamedTuple):
    """What others lose with the namespace, and with the custom resource definitions, as text, if anything."""

    namespace: Sequence[str]
    definitions: Sequence[str]


async def find_other_agents(client: KubeClient, namespace: str) -> list[str]:
    """Return the DaemonSets and pods of agents that no installation of ours created, as text.

    A DaemonSet of Velero may run our image: its agents need Lease, ledger and Jobs as ours do.
    """
    daemon_sets = await client.list(Selection(kube.DAEMON_SETS, namespace))
    pods = await client.list(Selection(kube.PODS, namespace, wire.AGENT_SELECTOR))
    named = [one for one in daemon_sets if one["metadata"]["name"] in _DAEMON_SETS]
    return [place_of(one) for one in (*named, *pods) if not wire.is_ours(one)]


async def find_class_user(client: KubeClient, namespace: str, name: str) -> str | None:
    """Return a Deployment or pod of the namespace that names this PriorityClass, as text; None: none does."""
    for one in await client.list(Selection(kube.DEPLOYMENTS, namespace)):
        if one["spec"]["template"].get("spec", {}).get("priorityClassName") == name:
            return place_of(one)
    for pod in await client.list(Selection(kube.PODS, namespace)):
        if pod["spec"].get("priorityClassName") == name:
            return place_of(pod)
    return None


async def find_dependents(client: KubeClient, namespace: str) -> Dependents:
    """Return what others lose if the namespace, or the definitions, are deleted.

    Raises:
        KubeError: the API server rejected a request, other than for the want of a permission that may be missing.
    """
    here = await find_other_agents(client, namespace)
    if await has_velero_server(client, namespace):
        here.append("the Velero server")
    if backups := await _list(client, kube.BACKUPS, namespace):
        here.append(f"{len(backups)} Backups of Velero")
    unknown, elsewhere = [], []
    for resource in (kube.DAEMON_SETS, *_RECORDS):
        try:
            stored = await _list(client, resource, "")
        except ForbiddenError:
            unknown.append(resource.plural)
            continue
        found = [one for one in stored if one["metadata"]["namespace"] != namespace]
        if resource is kube.DAEMON_SETS:
            elsewhere += [place_of(one) for one in found if wire.is_ours(one)]
        elif found:
            elsewhere.append(f"{len(found)} {resource.kind}s of other namespaces")
    if unknown:
        elsewhere.append(f"unknown objects of other namespaces (no permission to list {', '.join(unknown)} in them)")
    return Dependents(here, [*here, *elsewhere])


async def _list(
    client: KubeClient, resource: kube.Resource[ObjectT], namespace: str, label_selector: str = ""
) -> list[ObjectT]:
    """Return the objects; none of a kind that is not served."""
    try:
        return await client.list(Selection(resource, namespace, label_selector))
    except NotServedError:
        return []


_KEPT: Final = frozenset({"Namespace", "Secret", "BackupStorageLocation"})
"""Of what an installation creates: records and repositories depend on them."""

_PODS_TIMEOUT: Final = timedelta(minutes=2)
"""Agents have 30 seconds to end; a node that does not answer needs longer than this."""

_POLL_SECONDS: Final = 0.5

_SHOWN: Final = 5
"""Unfinished transfers, or missing permissions, that an error names, and base snapshots."""

_OUR_AGENTS: Final = select_labels(wire.AGENT_LABELS | wire.PART_OF_LABELS)
"""The pods of our DaemonSet; Velero's pods, such as its own for Windows, go on."""


class UninstallError(AgentError):
    """Transfers would be interrupted, or agents do not end."""


@dataclass(frozen=True)
class RemovalPlan:
    """What is removed, in order, as JSON dicts; what stays, as text; and the transfers that have not ended.

    `others` are agents that are not ours; `dependents` is what others lose if the rest is deleted.
    """

    namespace: str
    removed: Sequence[Object]
    kept: Sequence[str]
    unfinished: Sequence[str]
    others: Sequence[str]
    dependents: Dependents


async def plan_removal(client: KubeClient, namespace: str) -> RemovalPlan:
    """Return what a removal would do; nothing is changed.

    Raises:
        ConfigError: Helm manages the installation, or a permission is missing; the message names all that is missing.
    """
    await _require(client, namespace, UNINSTALL_PERMISSIONS)
    labeled = await _find_removed(client, namespace)
    # It says which snapshots in buckets are still to be deleted.
    record = [one for one in labeled if one["metadata"]["name"] == wire.DELETIONS_CONFIGMAP]
    removed = [one for one in labeled if one not in record]
    for one in removed:
        if release := wire.helm_release(one):
            raise ConfigError(f"{place_of(one)} belongs to a release of Helm: helm -n {namespace} uninstall {release}")
    kept = [*await _find_kept(client, namespace), *map(place_of, record)]
    shared, others = await _find_shared(client, namespace), await find_other_agents(client, namespace)
    if others:
        kept += [f"{place_of(one)}: {others[0]} is not ours and needs it" for one in shared]
    else:
        removed += shared
    for one in [one for one in removed if place_of(one) == f"PriorityClass {namespace}-server"]:
        if user := await find_class_user(client, namespace, one["metadata"]["name"]):
            removed.remove(one)
            kept.append(f"{place_of(one)}: {user} names it")
    await _require(client, namespace, delete_permissions(removed))
    transfers = await _list_transfers(client, namespace)
    kept += [f"{len(found)} {resource.kind}s" for resource, found in transfers.items() if found]
    dependents = await find_dependents(client, namespace)
    return RemovalPlan(namespace, removed, kept, _find_unfinished(transfers), others, dependents)


async def _require(client: KubeClient, namespace: str, permissions: Iterable[Permission]) -> None:
    needed = [permission for permission in permissions if not permission.without]
    if missing := list((await missing_permissions(client, namespace, needed)).values()):
        raise ConfigError(
            f"nothing was removed: permissions missing in namespace {namespace}: {some_of(missing, _SHOWN, '; ')}: "
            "docs/permissions.md lists what uninstall needs"
        )


async def _list_transfers(client: KubeClient, namespace: str) -> dict[kube.Resource, list[UncheckedObject]]:
    return {resource: await _list(client, resource, namespace) for resource in kube.TRANSFERS}


def _find_unfinished(transfers: dict[kube.Resource, list[UncheckedObject]]) -> list[str]:
    phases = [
        (resource.kind, one["metadata"]["name"], (one.get("status") or {}).get("phase") or Phase.NEW)
        for resource, found in transfers.items()
        for one in found
    ]
    return [f"{kind} {name} ({phase})" for kind, name, phase in phases if phase not in FINAL_PHASES]


def refuse_interruption(unfinished: Sequence[str]) -> None:
    """Raise if there are transfers that have not ended; UninstallError: there are; the message names the first."""
    if unfinished:
        raise UninstallError(
            f"nothing was removed: transfers have not ended, and --force interrupts them: {some_of(unfinished, _SHOWN)}"
        )


async def _find_removed(client: KubeClient, namespace: str) -> list[Object]:
    """Return the objects of the installation, DaemonSets first: agents need all others until they end."""
    removed = [one for one in reversed(build_everything(namespace)) if one["kind"] not in _KEPT]
    known = [(resource_of(one), one["metadata"]["name"]) for one in removed]
    found = []
    for resource in dict.fromkeys(resource for resource, _ in known if resource.namespaced):
        found += await _list(client, resource, namespace, select_labels(wire.PART_OF_LABELS))
    for resource, name in known:
        stored = await client.read(resource, "", name) if not resource.namespaced else None
        if stored is not None and wire.is_ours(stored):
            found.append(stored)
    return found


async def _find_shared(client: KubeClient, namespace: str) -> list[Object]:
    """Return what agents create and have in common, of any installer; they would create it again."""
    jobs = {job.name for job in (await list_jobs(client, namespace)).all if job.ours}
    found: list[Object] = [one for one in await _list(client, kube.JOBS, namespace) if one["metadata"]["name"] in jobs]
    for resource, name in (
        (kube.LEASES, wire.DISPATCHER_LEASE),
        (kube.LEASES, wire.DELETIONS_LEASE),
        *((kube.CONFIG_MAPS, name) for name in (wire.ADMISSIONS_CONFIGMAP, *wire.HISTORY_CONFIGMAPS)),
    ):
        stored = await client.read(resource, namespace, name)
        if stored is not None:
            found.append(stored)
    return found


async def _find_kept(client: KubeClient, namespace: str) -> list[str]:
    names: list[tuple[kube.Resource, str, str]] = [
        *((kube.CUSTOM_RESOURCE_DEFINITIONS, "", one["metadata"]["name"]) for one in read_definitions()),
        (kube.NAMESPACES, "", namespace),
        *((kube.SECRETS, namespace, name) for name in (wire.CREDENTIALS_SECRET, wire.REPO_CREDENTIALS_SECRET)),
    ]
    found = [await client.read(*name) for name in names]
    kept = [place_of(stored) for stored in found if stored is not None]
    for resource in (kube.BACKUP_STORAGE_LOCATIONS, kube.BACKUP_REPOSITORIES):
        kept += [place_of(one) for one in await _list(client, resource, namespace)]
    with suppress(ForbiddenError):
        schedules = await _list(client, kube.CRON_JOBS, namespace, wire.SCHEDULE_LABEL)
        kept += [f"{place_of(one)}: its runs will fail (nodeagent schedule delete)" for one in schedules]
    return [*kept, *await _find_base_snapshots(client, namespace)]


async def _find_base_snapshots(client: KubeClient, namespace: str) -> list[str]:
    """Return the snapshots on the storage that the next backups by block would be compared with, as text."""
    try:
        found = await _list(client, kube.VOLUME_SNAPSHOT_CONTENTS, "", wire.BASE_SNAPSHOT_LABEL)
    except ForbiddenError as e:
        return [f"base snapshots of backups by block, if there are any: {e}"]
    names = sorted(one["metadata"]["name"] for one in found if is_in_namespace(one, namespace))
    return [f"{len(names)} base snapshots: VolumeSnapshotContent {some_of(names, _SHOWN)}"] if names else []


async def remove(
    client: KubeClient, clock: Clock, plan: RemovalPlan, on_removed: Callable[[str], None], *, force: bool
) -> None:
    """Remove what the plan says; `on_removed` is called with each object as text.

    Raises:
        UninstallError: nothing was removed, because agents of others have started since the plan was made, or transfers
            without `force`; or agents do not end in time, and what they need stays.
    """
    # A question may wait for its answer for long.
    if not force:
        refuse_interruption(_find_unfinished(await _list_transfers(client, plan.namespace)))
    if not plan.others and (others := await find_other_agents(client, plan.namespace)):
        raise UninstallError(f"nothing was removed: {others[0]} is new and not ours: run the command again")
    agents = [one for one in plan.removed if one["kind"] == kube.DAEMON_SETS.kind]
    for one in agents:
        await _delete(client, one, on_removed)
    # Also agents that an earlier run removed without waiting to the end.
    await _wait_agents(client.patiently(), clock, plan.namespace)
    for one in plan.removed:
        if one not in agents:
            await _delete(client, one, on_removed)


async def _delete(client: KubeClient, obj: Object, on_removed: Callable[[str], None]) -> None:
    meta = obj["metadata"]
    await client.delete(resource_of(obj), meta.get("namespace", ""), meta["name"], uid=meta["uid"])
    on_removed(place_of(obj))


async def _wait_agents(client: KubeClient, clock: Clock, namespace: str) -> None:
    deadline = Deadline.after(clock, _PODS_TIMEOUT)
    while pods := await client.list(Selection(kube.PODS, namespace, _OUR_AGENTS)):
        if deadline.expired:
            names = ", ".join(sorted(pod["metadata"]["name"] for pod in pods))
            raise UninstallError(f"agents do not end, and what they need stays: {names}: run the command again")
        await clock.sleep(_POLL_SECONDS)
