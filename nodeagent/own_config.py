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
from nodeagent.own_pod import SelfReport
from nodeagent.priority import PriorityClass

__all__ = ["OwnConfig"]


@dataclass(frozen=True)
class OwnConfig:
    """The configuration in force; whoever needs a setting asks `current` each time."""

    current: CurrentConfig
    watch: ConfigWatch
    announcer: ConfigAnnouncer
    priority: PriorityClass

    @classmethod
    def build(
        cls, client: KubeClient, clock: Clock, *, place: tuple[str, str], current: CurrentConfig, report: SelfReport
    ) -> Self:
        """Return it for the ConfigMap at `place`, its namespace and name, wired on `client`."""
        return cls(
            current,
            ConfigWatch(client, clock, place=place, current=current, report=report),
            ConfigAnnouncer(report.pod, current),
            PriorityClass(client, clock, current=current, report=report),
        )

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
