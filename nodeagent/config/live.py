"""The agent's own configuration at work: what is in force, and what keeps it so.

Knows which parts belong together. Does not know what any of them decides.
"""

import asyncio
from dataclasses import dataclass
from typing import Final, Self

from core.aio import wait_for_event
from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.models.base import JsonDict
from core.models.names import CONFIG_ANNOTATION
from nodeagent.config.current import ConfigWatch, CurrentConfig
from nodeagent.config.priority_class import PriorityClass
from nodeagent.config.repository import RepositoryConfig
from nodeagent.runtime.own_pod import AgentPod, AgentReport

__all__ = ["NO_CONFIG", "ConfigAnnouncer", "ConfigSources", "LiveConfig"]


NO_CONFIG: Final = "none"
"""Announced where no ConfigMap was named."""


_AGAIN_SECONDS: Final = 30.0


class ConfigAnnouncer:
    """Keeps the annotation on the agent's own pod at what is in force."""

    def __init__(self, pod: AgentPod, current: CurrentConfig) -> None:
        """Announce the hash of `current` on `pod`."""
        self._pod = pod
        self._current = current
        self._changed = asyncio.Event()
        current.subscribe(self._changed.set)

    async def run(self) -> None:
        """Announce until canceled."""
        while True:
            self._changed.clear()
            try:
                await self._pod.annotate(CONFIG_ANNOTATION, self._current.digest or NO_CONFIG)
            except KubeError:
                # Nothing but the comparison depends on it.
                await wait_for_event(self._changed, _AGAIN_SECONDS)
            else:
                await self._changed.wait()


@dataclass(frozen=True)
class ConfigSources:
    """The names of the agent's ConfigMaps; empty where none is named."""

    namespace: str
    agent: str
    repositories: str


@dataclass(frozen=True)
class LiveConfig:
    """The configuration in force; whoever needs a setting asks `current` each time."""

    current: CurrentConfig
    watch: ConfigWatch
    announcer: ConfigAnnouncer
    priority: PriorityClass
    repositories: RepositoryConfig

    @classmethod
    def build(
        cls, client: KubeClient, clock: Clock, *, places: ConfigSources, current: CurrentConfig, report: AgentReport
    ) -> Self:
        """Return it for the ConfigMaps at `places`, wired on `client`."""
        place = (places.namespace, places.agent)
        return cls(
            current,
            ConfigWatch(client, clock, place=place, current=current, report=report),
            ConfigAnnouncer(report.pod, current),
            PriorityClass(client, clock, current=current, report=report),
            RepositoryConfig(client, places.namespace, places.repositories),
        )

    async def look(self) -> None:
        """Ask for what the first loads need to know."""
        await self.priority.look()
        await self.repositories.settings()

    async def run(self) -> None:
        """Follow what is configured until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watch.run(), name="configuration")
            group.create_task(self.announcer.run(), name="announced configuration")
            group.create_task(self.priority.run(), name="priority class")

    def report(self) -> JsonDict:
        """Return what `/status` shows of it."""
        current, concurrency = self.current, self.current.config.load_concurrency
        return {
            "hash": current.digest,
            "valid": current.valid,
            "warnings": current.warnings,
            "refused": list(current.refused),
            "loadConcurrency": concurrency.global_config,
            "prepareQueueLength": concurrency.prepare_queue_length,
            "priorityClassName": self.priority.name,
        }
