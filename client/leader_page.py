"""The leader's status page, read through the API server."""

import ipaddress
from typing import Final

from msgspec import field

from core.errors import AgentError, ContractError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.resources import LEASES, PODS
from core.models.base import WireModel
from core.models.names import AGENT_SELECTOR, DISPATCHER_LEASE
from nodeagent.runtime.preflight import DefinitionReport
from nodeagent.runtime.settings import ListenAddress, Settings

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


class QueuedTransfer(WireModel):
    """One place of the admission queue; positions count from 1."""

    kind: str
    name: str
    position: int


class LeaderQueue(WireModel):
    """The admission queue: its first thousand places, and why admission fails; empty: it does not."""

    queued: int = 0
    queue: list[QueuedTransfer] = field(default_factory=list)
    last_error: str = ""


class LeaderConfig(WireModel):
    """The leader's active configuration: its hash, and why an edit of it is not active."""

    hash: str = ""
    rejected: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class LeaderPage(WireModel):
    """What commands read of the page."""

    version: str = ""
    dispatcher: _Dispatcher = field(default_factory=_Dispatcher)
    queue: LeaderQueue = field(default_factory=LeaderQueue)
    config: LeaderConfig = field(default_factory=LeaderConfig)
    maintenance: dict[str, LeaderDecision] = field(default_factory=dict)
    definitions: DefinitionReport = field(default_factory=DefinitionReport)


async def read_leader_decisions(client: KubeClient, namespace: str, settings: Settings) -> dict[str, LeaderDecision]:
    """Return the leader's last decision about each repository, by the name of its BackupRepository.

    This needs the permission to get `pods/proxy`, to get leases and to list pods. `settings` are for the
    installed agents.

    Raises:
        LeaderUnavailableError: there is no leader, or its page cannot be reached; the message says why.
    """
    check_reachable(settings)
    pod = await _find_pod(client, namespace)
    return (await read_leader_page(client, namespace, settings, pod)).maintenance


async def read_leader_page(client: KubeClient, namespace: str, settings: Settings, pod: str) -> LeaderPage:
    """Return the status page of the leader, whose pod has that name.

    Raises:
        LeaderUnavailableError: its page cannot be reached, or it is not the leader; the message says why.
    """
    check_reachable(settings)
    raw = await client.pod_page(namespace, pod, port=status_address(settings).port, path=_PATH)
    with Translated(ContractError, LeaderUnavailableError, f"{_PATH} of Pod {namespace}/{pod} is of another version"):
        page = LeaderPage.from_wire(raw)
    if not page.dispatcher.leading:
        raise LeaderUnavailableError(f"Pod {namespace}/{pod} is not the leader any more")
    return page


def status_address(settings: Settings) -> ListenAddress:
    """Return where agents with these settings serve their status page."""
    return settings.status_address or settings.metrics_address


def check_reachable(settings: Settings) -> None:
    """Check that status pages are served outside of their pods; LeaderUnavailableError: they are not."""
    address = status_address(settings)
    if _is_local(address):
        raise LeaderUnavailableError(f"agents serve {_PATH} on {address} only, inside of their pods")


async def _find_pod(client: KubeClient, namespace: str) -> str:
    """Return the name of the leader's pod: the agent on the node that the holder of the Lease names."""
    place = f"Lease {namespace}/{DISPATCHER_LEASE}"
    lease = await client.read(LEASES, namespace, DISPATCHER_LEASE)
    holder = (lease.get("spec") or {}).get("holderIdentity", "") if lease else ""
    if not holder:
        raise LeaderUnavailableError(f"{place} has no holder" if lease else f"{place} does not exist")
    node = node_of_holder(holder)
    selection = Selection(PODS, namespace, AGENT_SELECTOR, f"spec.nodeName={node}")
    pods = [pod["metadata"] for pod in await client.list(selection)]
    names = [meta["name"] for meta in pods if not meta.get("deletionTimestamp")]
    if not names:
        raise LeaderUnavailableError(f"{place} is held by node {node}, which has no agent pod")
    return str(names[0])


def node_of_holder(identity: str) -> str:
    """Return the node of the agent with that identity in the Lease, `<node>_<uuid>`."""
    return identity.rpartition("_")[0]


def _is_local(address: ListenAddress) -> bool:
    """Return whether only processes in the same pod reach the address."""
    if address.host == "localhost":
        return True
    try:
        return address.host is not None and ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False
