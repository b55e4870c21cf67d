"""What is in a namespace: agents with settings and versions, by their DaemonSet, a Velero server, named objects."""

from collections.abc import Callable
from typing import Final, NamedTuple

from client.text import EventLine, missing
from core.errors import AgentError, ConfigError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, UnauthorizedError, UnreachableError
from core.kube.resources import DAEMON_SETS, EVENTS, PODS, Resource
from core.kube.types import DaemonSet, Event, ObjectT, Pod
from core.kube.velero_server import has_velero_server
from core.models.base import WireModel, parse_time
from core.models.names import AGENT_DAEMONSET, AGENT_SELECTOR
from exposer.pod_status import is_ready
from exposer.template import AgentTemplate, find_agent
from nodeagent.runtime.settings import Settings, parse_serve
from nodeagent.runtime.workqueue import work_in_parallel


async def read_named(client: KubeClient, resource: Resource[ObjectT], namespace: str, name: str) -> ObjectT:
    """Return the object that a user has named.

    Raises:
        NotFoundError: it does not exist; the message has the name that may be meant.
    """
    found = await client.read(resource, namespace, name)
    if found is None:
        known = [one["metadata"]["name"] for one in await client.list(Selection(resource, namespace))]
        raise missing(f"{resource.kind} {namespace}/{name} does not exist", name, known)
    return found


async def read_events(client: KubeClient, namespace: str, uid: str) -> list[EventLine]:
    """Return the Events about the object with that UID, newest first."""
    found = await client.list(Selection(EVENTS, namespace, field_selector=f"involvedObject.uid={uid}"))
    return sorted(map(_event_line, found), key=lambda line: line.last_seen, reverse=True)


def _event_line(raw: Event) -> EventLine:
    seen = raw.get("lastTimestamp") or raw.get("eventTime") or raw["metadata"]["creationTimestamp"]
    return EventLine(
        type=raw.get("type") or "",
        reason=raw.get("reason") or "",
        message=raw.get("message") or "",
        count=raw.get("count") or 1,
        last_seen=parse_time(seen),
    )


async def find_last_warning(client: KubeClient, namespace: str, uid: str) -> EventLine | None:
    """Return the newest Warning about the object with that UID; None: there is none."""
    return next((one for one in await read_events(client, namespace, uid) if one.type == "Warning"), None)


_STARTS: Final = (["serve"], ["node-agent", "server"])
"""The commands that run an agent; the second one is what Velero's DaemonSet runs."""


async def read_settings(client: KubeClient, namespace: str) -> Settings:
    """Return the settings that the agents of the namespace were started with.

    Raises:
        ConfigError: there is no agent, its DaemonSet cannot be read, or this version does not know its arguments.
    """
    return (await read_agents(client, namespace)).settings


class InstalledAgents(NamedTuple):
    """What the DaemonSet of the agents says: their settings, how many there are to be, and how many are ready."""

    settings: Settings
    wanted: int
    ready: int


async def read_agents(client: KubeClient, namespace: str) -> InstalledAgents:
    """Return the same with what its controller says of the pods; see `read_settings`."""
    place = f"DaemonSet {namespace}/{AGENT_DAEMONSET}"
    with Translated(KubeError, ConfigError, f"{place} cannot be read"):
        daemonset = await client.read(DAEMON_SETS, namespace, AGENT_DAEMONSET)
    if daemonset is None:
        raise ConfigError(explain_no_agents(namespace))
    status = daemonset.get("status") or {}
    with Translated(ConfigError, ConfigError, place):
        settings = parse_serve(serve_words(daemonset))
    return InstalledAgents(settings, status.get("desiredNumberScheduled") or 0, status.get("numberReady") or 0)


def explain_no_agents(namespace: str, flag: str = "--agent-namespace") -> str:
    """Return that no agents are installed in the namespace, which the user sets by `flag`."""
    return f"DaemonSet {namespace}/{AGENT_DAEMONSET} does not exist: run nodeagent install, or set {flag}"


async def explain_absent_agents(client: KubeClient, namespace: str, on_note: Callable[[str], None]) -> str | None:
    """Return why nothing would ever begin: no agents are installed; None: they are. If none is ready, note that."""
    daemonset = await client.read(DAEMON_SETS, namespace, AGENT_DAEMONSET)
    if daemonset is None:
        return explain_no_agents(namespace)
    if (daemonset.get("status") or {}).get("numberReady") == 0:
        on_note(f"DaemonSet {namespace}/{AGENT_DAEMONSET} has no ready agent: transfers wait for one")
    return None


async def read_ready_image(client: KubeClient, namespace: str, flag: str = "--agent-namespace") -> str:
    """Return the image of the agents.

    Raises:
        ConfigError: there are none, or none is ready; the message names the `flag` of the namespace.
    """
    daemonset = await client.read(DAEMON_SETS, namespace, AGENT_DAEMONSET)
    if daemonset is None:
        raise ConfigError(explain_no_agents(namespace, flag))
    if not (daemonset.get("status") or {}).get("numberReady"):
        raise ConfigError(
            f"DaemonSet {namespace}/{AGENT_DAEMONSET} has no ready agent: nodeagent install --wait says why"
        )
    return AgentTemplate.parse(daemonset).image


def serve_words(daemonset: DaemonSet) -> list[str]:
    """Return the arguments of `serve` in an apps/v1 DaemonSet as JSON dict.

    Raises:
        ConfigError: it does not start an agent.
    """
    container = find_agent((daemonset["spec"].get("template") or {}).get("spec", {}).get("containers") or [])
    words = [*container.get("command", []), *container.get("args", [])] if container else []
    for start in _STARTS:
        for index in range(len(words)):
            if words[index : index + len(start)] == start:
                return words[index + len(start) :]
    raise ConfigError("its container does not start an agent")


async def explain_velero_server(client: KubeClient, namespace: str, what: str, benefit: str) -> str | None:
    """Return why a `what` (backup, restore) is refused: a Velero server is there, or may be; None: it is not."""
    advice = f"--ignore-velero-server creates the {what} nevertheless"
    try:
        found = await has_velero_server(client, namespace)
    except (UnreachableError, UnauthorizedError):
        raise
    except KubeError as e:
        return f"cannot find out whether a Velero server is in namespace {namespace}: {e}: {advice}"
    if not found:
        return None
    return f"a Velero server is in namespace {namespace}: ask it (velero {what} create), {benefit}; {advice}"


_AT_A_TIME: Final = 8
"""Status pages that are read at a time."""


class AgentVersion(WireModel):
    """One agent; an empty `version` is not known."""

    node: str
    pod: str
    version: str
    image: str
    ready: bool


class VersionList(WireModel):
    """The agents of a namespace, by their nodes."""

    agents: list[AgentVersion]
    notes: list[str]


async def read_versions(client: KubeClient, namespace: str) -> VersionList:
    """Return the agents of the namespace; an agent whose page cannot be read has no version, and a note."""
    pods = await client.list(Selection(PODS, namespace, AGENT_SELECTOR))
    pods.sort(key=lambda pod: ((pod.get("spec") or {}).get("nodeName", ""), pod["metadata"]["name"]))
    if not pods:
        return VersionList(agents=[], notes=[f"there are no agents in namespace {namespace}"])
    try:
        settings = await read_settings(client, namespace)
    except AgentError as e:
        agents = [_agent(pod, "") for pod in pods]
        return VersionList(agents=agents, notes=[f"the agents are not of this version: {e}"])
    port, notes = (settings.status_address or settings.metrics_address).port, list[str]()

    async def read(pod: Pod) -> AgentVersion:
        name = pod["metadata"]["name"]
        try:
            page = await client.pod_page(namespace, name, port=port, path="/status")
        except AgentError as e:
            notes.append(f"Pod {namespace}/{name} did not answer: {e}")
            page = {}
        return _agent(pod, str(page.get("version", "")))

    agents = await work_in_parallel(pods, read, at_a_time=_AT_A_TIME, name="status page")
    return VersionList(agents=agents, notes=notes)


def _agent(pod: Pod, version: str) -> AgentVersion:
    spec = pod.get("spec") or {}
    return AgentVersion(
        node=spec.get("nodeName", ""),
        pod=pod["metadata"]["name"],
        version=version,
        image=next((one.get("image", "") for one in spec.get("containers") or []), ""),
        ready=is_ready(pod),
    )
