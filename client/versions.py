"""The versions of the installed agents: each one's status page has it, and its image."""

import asyncio
from collections.abc import Sequence
from typing import Final

from client.installation import read_settings
from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.kube.types import Pod
from core.models.base import WireModel
from exposer.pod_status import is_ready
from nodeagent.runtime.own_pod import AGENT_SELECTOR

__all__ = ["AgentVersion", "VersionList", "read_versions"]

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
    """Return the agents of the namespace; an agent whose page cannot be read has no version, and a note.

    Raises:
        KubeError: the agents cannot be listed.
    """
    pods = await client.list(Selection(PODS, namespace, AGENT_SELECTOR))
    if not pods:
        return VersionList(agents=[], notes=[f"there are no agents in namespace {namespace}"])
    try:
        settings = await read_settings(client, namespace)
    except AgentError as e:
        return VersionList(
            agents=[_agent(pod, "") for pod in _sorted(pods)], notes=[f"the agents are not of this version: {e}"]
        )
    port, notes = (settings.status_address or settings.metrics_address).port, list[str]()
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def read(pod: Pod) -> AgentVersion:
        name = pod["metadata"]["name"]
        async with gate:
            try:
                page = await client.pod_page(namespace, name, port=port, path="/status")
            except AgentError as e:
                notes.append(f"Pod {namespace}/{name} did not answer: {e}")
                page = {}
        return _agent(pod, str(page.get("version", "")))

    agents = [read(pod) for pod in _sorted(pods)]
    return VersionList(agents=list(await asyncio.gather(*agents)), notes=notes)


def _sorted(pods: Sequence[Pod]) -> list[Pod]:
    return sorted(pods, key=lambda pod: ((pod.get("spec") or {}).get("nodeName", ""), pod["metadata"]["name"]))


def _agent(pod: Pod, version: str) -> AgentVersion:
    spec = pod.get("spec") or {}
    return AgentVersion(
        node=spec.get("nodeName", ""),
        pod=pod["metadata"]["name"],
        version=version,
        image=next((one.get("image", "") for one in spec.get("containers") or []), ""),
        ready=is_ready(pod),
    )
