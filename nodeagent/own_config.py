"""The agent's own configuration at work: what is in force, and what keeps it so.

Knows which parts belong together. Does not know what any of them decides.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

from core.clock import Clock
from core.kube.client import KubeClient
from core.models.base import JsonDict
from nodeagent.config_agreement import ConfigAnnouncer
from nodeagent.config_watch import ConfigWatch
from nodeagent.current_config import CurrentConfig
from nodeagent.priority import PriorityClass
from nodeagent.repository_config import RepositoryConfig
from nodeagent.runtime.own_pod import SelfReport

__all__ = ["ConfigPlaces", "OwnConfig"]


@dataclass(frozen=True)
class ConfigPlaces:
    """The names of the agent's ConfigMaps; empty where none is named."""

    namespace: str
    agent: str
    repositories: str


@dataclass(frozen=True)
class OwnConfig:
    """The configuration in force; whoever needs a setting asks `current` each time."""

    current: CurrentConfig
    watch: ConfigWatch
    announcer: ConfigAnnouncer
    priority: PriorityClass
    repositories: RepositoryConfig

    @classmethod
    def build(
        cls, client: KubeClient, clock: Clock, *, places: ConfigPlaces, current: CurrentConfig, report: SelfReport
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
