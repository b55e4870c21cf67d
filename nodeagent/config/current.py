"""The configuration in force: who needs it asks here each time, and whoever must act hears of a change.

Knows which of two documents counts: an edit with a mistake is refused as a whole, and the last
good one stays. Does not know where documents come from (`nodeagent.config.current`) or what
follows from a setting.

Follows the one ConfigMap and puts each good edit in force.

Knows what is said of an edit, and where. Does not know what a document means (`nodeagent.config.parse`)
or which of two counts (`nodeagent.config.current`).
"""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from core.clock import Clock
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS
from core.kube.watch import watch_one
from core.models.base import JsonDict
from nodeagent.config.models import AgentConfig, LoadConcurrency
from nodeagent.config.parse import ParsedConfig
from nodeagent.config.source import absent, parse_config_map
from nodeagent.runtime.own_pod import AgentReport

__all__ = ["ConfigVerdict", "ConfigWatch", "CurrentConfig", "resolve_slots"]


@dataclass(frozen=True)
class ConfigVerdict:
    """What became of an edit: in force, or refused and why, in one line each.

    `changed` says whether anything is different from before the edit.
    """

    changed: bool
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the last good configuration stays."""
        return bool(self.reasons)


class CurrentConfig:
    """Holds the good configuration in force and what is wrong with the document that is not."""

    def __init__(self, parsed: ParsedConfig | None = None) -> None:
        """Start with `parsed`, mistakes and all: at start a bad value alone takes its default."""
        self._parsed = parsed or ParsedConfig()
        self._refused: tuple[str, ...] = ()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def config(self) -> AgentConfig:
        """The configuration in force; frozen, so a load that holds it keeps what it began with."""
        return self._parsed.config

    def load_concurrency(self) -> LoadConcurrency:
        """Return the active `loadConcurrency`."""
        return self.config.load_concurrency

    @property
    def digest(self) -> str:
        """The fingerprint of the document in force; empty where there is none."""
        return self._parsed.digest

    @property
    def warnings(self) -> list[str]:
        """What an operator should read about the document in force."""
        return self._parsed.warnings

    @property
    def refused(self) -> tuple[str, ...]:
        """Why the document as it is now is not in force; empty where it is."""
        return self._refused

    @property
    def valid(self) -> bool:
        """Whether the document is in force exactly as it is written."""
        return not self._refused and not self._parsed.mistakes

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change of what is in force; it must not block."""
        self._subscribers.append(on_change)

    def take(self, edited: ParsedConfig) -> ConfigVerdict:
        """Put an edited document in force, unless it holds a mistake."""
        if edited.mistakes:
            # The document that the agent started with may hold mistakes: seen again, it is no edit.
            if edited.digest == self.digest and not self._refused:
                return ConfigVerdict(changed=False)
            return self.refuse(tuple(map(str, edited.mistakes)))
        came_back = bool(self._refused)
        self._refused = ()
        if edited.digest == self.digest:
            return ConfigVerdict(changed=came_back)
        self._parsed = edited
        for on_change in self._subscribers:
            on_change()
        return ConfigVerdict(changed=True)

    def refuse(self, reasons: tuple[str, ...]) -> ConfigVerdict:
        """Keep what is in force, and remember why the document is not."""
        changed = reasons != self._refused
        self._refused = reasons
        return ConfigVerdict(changed=changed, reasons=reasons)


class ConfigWatch:
    """Keeps `current` at the ConfigMap's last good content."""

    def __init__(
        self, client: KubeClient, clock: Clock, *, place: tuple[str, str], current: CurrentConfig, report: AgentReport
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
            await self._report.pod.report("ConfigMistake", told, warning=True)
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

    async def _tell(self, verdict: ConfigVerdict) -> None:
        digest, pod = self._current.digest, self._report.pod
        if verdict.refused:
            told = f"the ConfigMap is not in force, configuration {digest} is: {'; '.join(verdict.reasons)}"
            await pod.report("ConfigRefused", told, warning=True)
            return
        noted = f"; noted: {'; '.join(self._current.warnings)}" if self._current.warnings else ""
        told = f"configuration {digest} is in force for loads that start from now on{noted}"
        await pod.report("ConfigInForce", told, warning=bool(noted))


def resolve_slots(labels: Mapping[str, str], concurrency: LoadConcurrency) -> int:
    """Return the number of the rule that selects a node with `labels`, the smallest of several.

    Where none does, `globalConfig` counts.
    Source: Velero v1.18, pkg/nodeagent and pkg/cmd/cli/nodeagent/server.go.
    """
    numbers = [rule.number for rule in concurrency.per_node_config if rule.node_selector.matches(labels)]
    return min(numbers, default=concurrency.global_config)


def labels_of(node: JsonDict | None) -> Mapping[str, str]:
    return dict(((node or {}).get("metadata") or {}).get("labels") or {})
