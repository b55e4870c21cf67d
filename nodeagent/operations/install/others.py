"""What others have beside an installation: agents that are not ours, which a removal must not stop."""

from typing import Final

from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS
from nodeagent.operations.install.objects import is_ours, place_of
from nodeagent.runtime.own_pod import AGENT_SELECTOR

__all__ = ["find_other_agents"]

_DAEMON_SETS: Final = (AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS)


async def find_other_agents(client: KubeClient, namespace: str) -> list[str]:
    """Return the DaemonSets and pods of agents that no installation of ours created, as text.

    A DaemonSet of Velero may run our image: its agents need Lease, ledger and Jobs as ours do.

    Raises:
        KubeError: the API server rejected a request.
    """
    names = (AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS)
    sets = [
        one for one in await client.list(Selection(kube.DAEMON_SETS, namespace)) if one["metadata"]["name"] in names
    ]
    pods = await client.list(Selection(kube.PODS, namespace, AGENT_SELECTOR))
    found = [(kube.DAEMON_SETS, one) for one in sets] + [(kube.PODS, one) for one in pods]
    return [place_of({"kind": resource.kind, **one}) for resource, one in found if not is_ours(one)]
