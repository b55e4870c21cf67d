"""The live configuration of an agent: the active settings and the tasks that keep them current.

Knows which parts belong together, and rebuilds the settings of exposers when one of them changes.
Does not know what any of them decides.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.models.base import JsonDict
from core.models.names import BLOCK_DATA_MOVER, CONFIG_ANNOTATION, FEATURES_ANNOTATION, NO_CONFIG, RESTORE_IN_PLACE
from exposer.settings import ExposeSettings
from nodeagent.config.current import ConfigWatch, CurrentConfig, PriorityClass
from nodeagent.config.expose_settings import build_expose_settings
from nodeagent.config.parse import ParsedConfig
from nodeagent.config.repository import RepositoryConfig
from nodeagent.runtime.own_pod import AgentPod, AgentReport

__all__ = ["ConfigAnnouncer", "ConfigSources", "InitialConfig", "LiveConfig"]

_log = logging.getLogger(__name__)

_FEATURES: Final = f"{RESTORE_IN_PLACE} {BLOCK_DATA_MOVER}"

_RETRY_SECONDS: Final = 5.0
"""Delay before an annotation that could not be written is retried."""


class ConfigAnnouncer:
    """Keeps the annotations on the agent's own pod: the hash of the active configuration, and what it can carry out."""

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
                config = {CONFIG_ANNOTATION: self._current.digest or NO_CONFIG}
                await self._pod.annotate(config | {FEATURES_ANNOTATION: _FEATURES})
            except KubeError as e:
                # The leader takes it for an agent of Velero until then.
                _log.warning("could not annotate the agent's pod, so that it gets no transfers, will retry: %s", e)
                await wait_for_event(self._changed, _RETRY_SECONDS)
            else:
                await self._changed.wait()


@dataclass(frozen=True)
class ConfigSources:
    """The names of the agent's ConfigMaps; empty where none is named."""

    namespace: str
    agent: str
    repositories: str


@dataclass(frozen=True)
class InitialConfig:
    """What an agent starts with: the document that was read, and the expose settings that none changes."""

    parsed: ParsedConfig
    expose_defaults: ExposeSettings


class LiveConfig:
    """The active configuration, and the tasks that keep it current."""

    def __init__(
        self, client: KubeClient, clock: Clock, *, sources: ConfigSources, initial: InitialConfig, report: AgentReport
    ) -> None:
        """Start with `initial`, and follow the ConfigMaps of `sources` once `run` is called."""
        self.current = CurrentConfig(initial.parsed)
        self.priority = PriorityClass(
            client, clock, current=self.current, report=report, on_change=self._rebuild_expose_settings
        )
        self.repositories = RepositoryConfig(
            client, sources.namespace, sources.repositories, on_change=self._rebuild_expose_settings
        )
        place = (sources.namespace, sources.agent)
        self._watch = ConfigWatch(client, clock, place=place, current=self.current, report=report)
        self._announcer = ConfigAnnouncer(report.pod, self.current)
        self._expose_defaults = initial.expose_defaults
        self._shares_account = False
        self._rebuild_expose_settings()
        self.current.subscribe(self._rebuild_expose_settings)

    def expose_settings(self) -> ExposeSettings:
        """Return the settings for an expose that begins now; frozen, so that a request keeps them."""
        return self._expose_settings

    async def refresh(self) -> None:
        """Read what the first transfers depend on."""
        await self.priority.refresh()
        await self.repositories.settings()

    async def run(self) -> None:
        """Follow the configuration until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.run(), name="configuration")
            group.create_task(self._announcer.run(), name="announced configuration")
            group.create_task(self.priority.run(), name="priority class")

    def report(self) -> JsonDict:
        """Return the `config` section of `/status`."""
        current, concurrency = self.current, self.current.config.load_concurrency
        return {
            "hash": current.digest,
            "valid": current.valid,
            "warnings": current.warnings,
            "rejected": list(current.rejected),
            "loadConcurrency": concurrency.global_config,
            "prepareQueueLength": concurrency.prepare_queue_length,
            "priorityClassName": self.priority.name,
        }

    def _rebuild_expose_settings(self) -> None:
        self._expose_settings = build_expose_settings(
            self._expose_defaults,
            self.current.config,
            priority_class=self.priority.name,
            cache_limit_mib=self.repositories.cache_limit_mib,
        )
        self._check_account()

    def _check_account(self) -> None:
        """Warn once if mover pods have no ServiceAccount of their own, and again after they had one."""
        shared = not self._expose_settings.pod.service_account
        if shared and not self._shares_account:
            account = self._expose_settings.template.pod_fields.get("serviceAccountName", "default")
            _log.warning(
                "data movers use the agent's own ServiceAccount %s, with all its permissions: neither "
                "--mover-service-account nor moverServiceAccount is set",
                account,
            )
        self._shares_account = shared
