"""Follows the one ConfigMap and puts each good edit in force.

Knows what is said of an edit, and where. Does not know what a document means (`nodeagent.config`)
or which of two counts (`nodeagent.current_config`).
"""

from contextlib import aclosing

from core.clock import Clock
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS
from core.kube.watch import watch_one
from core.models.base import JsonDict
from nodeagent.config_map import absent, parse_config_map
from nodeagent.current_config import CurrentConfig, Verdict
from nodeagent.runtime.own_pod import SelfReport

__all__ = ["ConfigWatch"]


class ConfigWatch:
    """Keeps `current` at the ConfigMap's last good content."""

    def __init__(
        self, client: KubeClient, clock: Clock, *, place: tuple[str, str], current: CurrentConfig, report: SelfReport
    ) -> None:
        """Follow the ConfigMap at `place`, its namespace and name; an empty name: there is none."""
        self._client = client
        self._clock = clock
        self._namespace, self._name = place
        self._current = current
        self._report = report
        self._show()

    async def run(self) -> None:
        """Follow until canceled; return at once where there is no ConfigMap to follow.

        Raises:
            KubeError: the ConfigMap may not be watched.
        """
        if not self._name:
            return
        if not self._current.valid:
            told = f"the agent started with a bad configuration: {'; '.join(self._current.warnings)}"
            await self._report.pod.tell("ConfigMistake", told, warning=True)
        states = watch_one(self._client, CONFIG_MAPS, self._namespace, name=self._name, clock=self._clock)
        async with aclosing(states):
            async for config_map in states:
                await self._judge(config_map)

    async def _judge(self, config_map: JsonDict | None) -> None:
        """Put the ConfigMap as it is now in force, or say why not."""
        try:
            if config_map is None:
                raise absent(self._namespace, self._name)
            verdict = self._current.take(parse_config_map(config_map))
        except ConfigError as e:
            verdict = self._current.refuse((str(e),))
        self._show()
        if verdict.changed:
            await self._tell(verdict)

    def _show(self) -> None:
        self._report.metrics.config_valid(self._current.valid)
        self._report.metrics.config_hash(self._current.digest)

    async def _tell(self, verdict: Verdict) -> None:
        digest, pod = self._current.digest, self._report.pod
        if verdict.refused:
            told = f"the ConfigMap is not in force, configuration {digest} is: {'; '.join(verdict.reasons)}"
            await pod.tell("ConfigRefused", told, warning=True)
            return
        noted = f"; noted: {'; '.join(self._current.warnings)}" if self._current.warnings else ""
        told = f"configuration {digest} is in force for loads that start from now on{noted}"
        await pod.tell("ConfigInForce", told, warning=bool(noted))
