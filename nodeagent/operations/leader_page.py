"""The maintenance part of the leader's status page, read through the API server."""

import ipaddress
from typing import Final

from msgspec import field

from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import LEASES, PODS
from core.models.base import WireModel
from core.models.names import DISPATCHER_LEASE
from nodeagent.runtime.own_pod import AGENT_SELECTOR
from nodeagent.runtime.settings import ListenAddress, Settings

__all__ = ["LeaderDecision", "LeaderUnavailableError", "read_leader_decisions"]

_PATH: Final = "/status"


class LeaderUnavailableError(AgentError):
    """There is no leader, or its status page cannot be read from here."""


class LeaderDecision(WireModel):
    """What the leader last decided about one repository: why it is not maintained now, and when it is due."""

    hold: str = ""
    due: str = ""
    overdue: bool = False


class _Dispatcher(WireModel):
    leading: bool = False


class _Page(WireModel):
    dispatcher: _Dispatcher = field(default_factory=_Dispatcher)
    maintenance: dict[str, LeaderDecision] = field(default_factory=dict)


async def read_leader_decisions(client: KubeClient, namespace: str, settings: Settings) -> dict[str, LeaderDecision]:
    """Return the leader's last decision about each repository, by the name of its BackupRepository.

    This needs the permission to get `pods/proxy`, beside those to get leases and to list pods. `settings` are those of
    the installed agents.

    Raises:
        LeaderUnavailableError: there is no leader, or its page cannot be reached; the message says why.
        KubeError: the API server, or the leader behind it, rejected a request.
    """
    address = settings.status_address or settings.metrics_address
    if _is_local(address):
        raise LeaderUnavailableError(f"agents serve {_PATH} on {address} only, inside of their pods")
    pod = await _find_pod(client, namespace)
    raw = await client.pod_page(namespace, pod, port=address.port, path=_PATH)
    try:
        page = _Page.from_wire(raw)
    except ContractError as e:
        raise LeaderUnavailableError(f"{_PATH} of Pod {namespace}/{pod} is not that of this version: {e}") from e
    if not page.dispatcher.leading:
        raise LeaderUnavailableError(f"Pod {namespace}/{pod} is not the leader any more")
    return page.maintenance


async def _find_pod(client: KubeClient, namespace: str) -> str:
    """Return the name of the leader's pod: the agent on the node that the holder of the Lease names."""
    place = f"Lease {namespace}/{DISPATCHER_LEASE}"
    lease = await client.read(LEASES, namespace, DISPATCHER_LEASE)
    holder = ((lease or {}).get("spec") or {}).get("holderIdentity") or ""
    if not holder:
        raise LeaderUnavailableError(f"{place} has no holder" if lease else f"{place} does not exist")
    node = str(holder).rpartition("_")[0]
    selection = Selection(PODS, namespace, AGENT_SELECTOR, f"spec.nodeName={node}")
    pods = [pod["metadata"] for pod in await client.list(selection)]
    names = [meta["name"] for meta in pods if not meta.get("deletionTimestamp")]
    if not names:
        raise LeaderUnavailableError(f"{place} is held by node {node}, which has no agent pod")
    return str(names[0])


def _is_local(address: ListenAddress) -> bool:
    """Return whether only processes in the same pod reach the address."""
    if address.host == "localhost":
        return True
    try:
        return address.host is not None and ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False
