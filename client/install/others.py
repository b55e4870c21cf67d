"""What others have beside an installation: agents that are not ours, and what they lose if all is deleted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from client.install.objects import place_of
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, NotServedError
from core.kube.resources import Resource
from core.kube.types import Object
from core.kube.velero_server import has_velero_server
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, is_ours
from nodeagent.runtime.own_pod import AGENT_SELECTOR

__all__ = ["Dependents", "find_class_user", "find_dependents", "find_other_agents"]

_DAEMON_SETS: Final = (AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS)

_RECORDS: Final = (
    kube.BACKUP_REPOSITORIES,
    kube.DATA_UPLOADS,
    kube.DATA_DOWNLOADS,
    kube.POD_VOLUME_BACKUPS,
    kube.POD_VOLUME_RESTORES,
)
"""What is deleted with its definition, in all namespaces."""


@dataclass(frozen=True)
class Dependents:
    """What others lose with the namespace, and with the custom resource definitions, as text; empty: nothing."""

    namespace: Sequence[str]
    definitions: Sequence[str]


async def find_other_agents(client: KubeClient, namespace: str) -> list[str]:
    """Return the DaemonSets and pods of agents that no installation of ours created, as text.

    A DaemonSet of Velero may run our image: its agents need Lease, ledger and Jobs as ours do.

    Raises:
        KubeError: the API server rejected a request.
    """
    daemon_sets = await client.list(Selection(kube.DAEMON_SETS, namespace))
    pods = await client.list(Selection(kube.PODS, namespace, AGENT_SELECTOR))
    named = [one for one in daemon_sets if one["metadata"]["name"] in _DAEMON_SETS]
    return [
        *(_place(kube.DAEMON_SETS, one) for one in named if not is_ours(one)),
        *(_place(kube.PODS, one) for one in pods if not is_ours(one)),
    ]


async def find_class_user(client: KubeClient, namespace: str, name: str) -> str:
    """Return a Deployment or pod of the namespace that names this PriorityClass, as text; empty: none does.

    Raises:
        KubeError: the API server rejected a request.
    """
    for one in await client.list(Selection(kube.DEPLOYMENTS, namespace)):
        if one["spec"]["template"].get("spec", {}).get("priorityClassName") == name:
            return _place(kube.DEPLOYMENTS, one)
    for pod in await client.list(Selection(kube.PODS, namespace)):
        if pod["spec"].get("priorityClassName") == name:
            return _place(kube.PODS, pod)
    return ""


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
            elsewhere += [_place(resource, one) for one in found if is_ours(one)]
        elif found:
            elsewhere.append(f"{len(found)} {resource.kind}s of other namespaces")
    if unknown:
        elsewhere.append(f"unknown objects of other namespaces (no permission to list {', '.join(unknown)} in them)")
    return Dependents(here, [*here, *elsewhere])


async def _list(client: KubeClient, resource: Resource, namespace: str) -> list[Object]:
    try:
        return await client.list(Selection(resource, namespace))
    except NotServedError:
        return []


def _place(resource: Resource, obj: Object) -> str:
    return place_of({"kind": resource.kind, **obj})
