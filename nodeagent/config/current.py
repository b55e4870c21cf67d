"""The active configuration of an agent, and the tasks that keep it current by watches of ConfigMap and priority class.

An edit with an error is rejected as a whole, and the last valid document stays. The settings of exposers are rebuilt
when one of their parts changes. What a document means is not known here (`nodeagent.config.parse`).
Source: Velero v1.18, pkg/util/kube/priority_class.go: a class that is missing is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from core.errors import ConfigError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import CONFIG_MAPS, PRIORITY_CLASSES
from core.kube.types import ConfigObject, NodeObject, PriorityClassObject
from core.kube.watch import watch_one
from core.models.base import JsonDict
from core.models.names import BLOCK_DATA_MOVER, CONFIG_ANNOTATION, FEATURES_ANNOTATION, NO_CONFIG, RESTORE_IN_PLACE
from core.models.phases import RetryRules
from core.models.transfers import Transfer
from exposer.settings import ExposeSettings
from nodeagent.config.expose_settings import build_expose_settings
from nodeagent.config.keys import AgentConfig, LoadConcurrency
from nodeagent.config.own_keys import rules_of_kind
from nodeagent.config.parse import FLAG, ParsedConfig, absent, parse_config_map
from nodeagent.config.repositories import RepositoryConfig
from nodeagent.metrics import CONFIG_INFO, CONFIG_VALID, PRIORITY_CLASS_USABLE
from nodeagent.runtime.own_pod import AgentReport, OwnPod
from nodeagent.runtime.workqueue import Faults


class CurrentConfig:
    """The active configuration, and why a newer document was rejected: `rejected`, in lines."""

    def __init__(self, parsed: ParsedConfig | None = None) -> None:
        """Start with `parsed`; only at start, an invalid value takes its default without a rejection."""
        self._parsed = parsed or ParsedConfig()
        self._subscribers: list[Callable[[], None]] = []
        self.rejected: tuple[str, ...] = ()

    @property
    def config(self) -> AgentConfig:
        """The active configuration; frozen, so that a holder keeps the one it started with."""
        return self._parsed.config

    def load_concurrency(self) -> LoadConcurrency:
        """Return the active `loadConcurrency`."""
        return self.config.load_concurrency

    def retry_rules(self, cr: Transfer) -> RetryRules:
        """Return the active limits of retries of a transfer; a Velero server waits only for one with an owner."""
        return rules_of_kind(self.config.own.retry, cr.kind_name, velero_server=bool(cr.metadata.owner_references))

    @property
    def digest(self) -> str | None:
        """The fingerprint of the active document; None if there is none."""
        return self._parsed.digest

    @property
    def warnings(self) -> list[str]:
        """The warnings about the active document."""
        return self._parsed.warnings

    @property
    def valid(self) -> bool:
        """Whether the current document is active exactly as it is written."""
        return not self.rejected and not self._parsed.errors

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change of the active configuration; it must not block."""
        self._subscribers.append(on_change)

    def update(self, edited: ParsedConfig) -> bool:
        """Activate an edited document, unless it has errors; return whether that, or why it is not active, is new."""
        # The document that the agent started with may have errors; read again, it is no edit.
        if edited.errors and edited.digest != self.digest:
            return self.reject(tuple(map(str, edited.errors)))
        was_rejected = bool(self.rejected)
        self.rejected = ()
        if edited.digest == self.digest:
            return was_rejected
        self._parsed = edited
        for on_change in self._subscribers:
            on_change()
        return True

    def reject(self, reasons: tuple[str, ...]) -> bool:
        """Keep the active configuration, and store why the current document is not active; return whether it is new."""
        changed = reasons != self.rejected
        self.rejected = reasons
        return changed


@dataclass(eq=False)
class ConfigWatch:
    """Keeps `current` equal to the last valid content of the ConfigMap.

    That is at `place`, its namespace and name; a name of None: there is none.
    """

    client: KubeClient
    clock: Clock
    _: KW_ONLY
    place: tuple[str, str | None]
    current: CurrentConfig
    report: AgentReport

    def __post_init__(self) -> None:
        """Show the state at the start."""
        self._namespace, self._name = self.place
        self._update_metrics()

    async def run(self) -> None:
        """Watch until canceled; return at once if there is no ConfigMap to watch.

        Raises:
            KubeError: the API server rejected the watch.
        """
        if self._name is None:
            return
        if not self.current.valid:
            message = f"started with an invalid configuration: {'; '.join(self.current.warnings)}"
            await self.report.pod.report("ConfigInvalid", message, warning=True)
        states = watch_one(self.client, CONFIG_MAPS, self._namespace, name=self._name, clock=self.clock)
        async with aclosing(states):
            async for config_map in states:
                await self._update(self._name, config_map)

    async def _update(self, name: str, config_map: ConfigObject | None) -> None:
        """Activate the current ConfigMap, or report why it is rejected."""
        try:
            if config_map is None:
                raise absent(self._namespace, name, FLAG)
            changed = self.current.update(parse_config_map(config_map))
        except ConfigError as e:
            changed = self.current.reject((str(e),))
        self._update_metrics()
        if changed:
            await self._report_update()

    def _update_metrics(self) -> None:
        self.report.metrics.set(CONFIG_VALID, self.current.valid)
        self.report.metrics.show(CONFIG_INFO, {(self.current.digest or "",): 1})

    async def _report_update(self) -> None:
        current, digest, pod = self.current, self.current.digest, self.report.pod
        if current.rejected:
            message = f"ConfigMap rejected, configuration {digest} stays active: {'; '.join(current.rejected)}"
            await pod.report("ConfigRejected", message, warning=True)
            return
        warnings = f"; warnings: {'; '.join(current.warnings)}" if current.warnings else ""
        message = f"configuration {digest} is active for transfers that are exposed from now on{warnings}"
        await pod.report("ConfigActivated", message, warning=bool(warnings))


def resolve_slots(labels: Mapping[str, str], concurrency: LoadConcurrency) -> int:
    """Return the number of slots of a node with `labels`: the smallest number of all matching rules.

    If no rule matches, `globalConfig` applies.
    Source: Velero v1.18, pkg/nodeagent and pkg/cmd/cli/nodeagent/server.go.
    """
    numbers = [rule.number for rule in concurrency.per_node_config if rule.node_selector.matches(labels)]
    return min(numbers, default=concurrency.global_config)


def labels_of(node: NodeObject | None) -> Mapping[str, str]:
    """Return the labels of a node, none if it is not there."""
    return dict(node["metadata"].get("labels") or {}) if node else {}


_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 30.0
"""Delay before a rejected watch is retried."""


@dataclass(eq=False)
class PriorityClass:
    """The configured priority class, as the cluster has it.

    The API server rejects a pod whose class does not exist, and a backup must not fail because of
    that. Until the class is known to exist, mover pods have the default priority. `on_change`, which must not block, is
    called when the class appears or is missing.
    """

    client: KubeClient
    clock: Clock
    _: KW_ONLY
    current: CurrentConfig
    report: AgentReport
    on_change: Callable[[], None] = lambda: None
    _followed: str | None = field(default=None, init=False)
    _found: bool | None = field(default=None, init=False)
    _renamed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _faults: Faults = field(default_factory=lambda: Faults(_log), init=False)

    def __post_init__(self) -> None:
        """Follow the active configuration."""
        self.current.subscribe(self._on_config)

    @property
    def name(self) -> str | None:
        """The class of a mover pod that is created now; None: the default priority."""
        return self._followed if self._found and self._followed == self._wanted else None

    @property
    def _wanted(self) -> str | None:
        return self.current.config.priority_class_name or None

    async def refresh(self) -> None:
        """Read the class once, so that the first mover pods can have it."""
        self._follow(self._wanted)
        if not self._followed:
            return
        try:
            selection = Selection(PRIORITY_CLASSES, field_selector=f"metadata.name={self._followed}")
            await self._observe(next(iter(await self.client.list(selection)), None))
        except KubeError as e:
            self._warn_unchecked(e)

    async def run(self) -> None:
        """Watch the class until canceled."""
        while True:
            self._renamed.clear()
            self._follow(self._wanted)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._watch(), name=f"priority class {self._followed}")
                await self._renamed.wait()
                task.cancel()

    def _on_config(self) -> None:
        if self._wanted != self._followed:
            self._renamed.set()

    def _follow(self, name: str | None) -> None:
        if name != self._followed:
            self._followed, self._found = name, None
        self._update_metric()

    async def _watch(self) -> None:
        """Observe the watched class; its last state is kept while the API server cannot be reached."""
        if not self._followed:
            return
        while True:
            states = watch_one(self.client, PRIORITY_CLASSES, "", name=self._followed, clock=self.clock)
            try:
                async with aclosing(states):
                    async for state in states:
                        await self._observe(state)
            except KubeError as e:
                self._warn_unchecked(e)
                await self.clock.sleep(_RETRY_SECONDS)

    async def _observe(self, priority_class: PriorityClassObject | None) -> None:
        found = priority_class is not None
        if found is self._found:
            return
        first, self._found = self._found is None, found
        self.on_change()
        self._update_metric()
        if priority_class is None:
            message = (
                f"PriorityClass {self._followed} does not exist: data movers get the default priority until it does"
            )
            await self.report.pod.report("PriorityClassMissing", message, warning=True)
            return
        message = f"PriorityClass {self._followed} exists: data movers get it (value {priority_class.get('value', 0)})"
        if first:
            _log.info("%s", message)
        else:
            await self.report.pod.report("PriorityClassFound", message)

    def _update_metric(self) -> None:
        self.report.metrics.set(PRIORITY_CLASS_USABLE, not self._wanted or self._found is True)

    def _warn_unchecked(self, error: KubeError) -> None:
        used = "it, since it existed when last read" if self._found else "the default priority"
        message = f"cannot check PriorityClass {self._followed}, will retry; data movers get {used}"
        self._faults.report(message, message, error, level=logging.WARNING)


_FEATURES: Final = f"{RESTORE_IN_PLACE} {BLOCK_DATA_MOVER}"

_LIVE_RETRY_SECONDS: Final = 5.0
"""Delay before an annotation that could not be written is retried."""


class ConfigAnnouncer:
    """Keeps the annotations on the agent's own pod: the hash of the active configuration, and what it can carry out."""

    def __init__(self, pod: OwnPod, current: CurrentConfig) -> None:
        self._pod = pod
        self._current = current
        self._faults = Faults(_log)
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
                message = "could not annotate the agent's pod, so that it gets no transfers, will retry"
                self._faults.report("", message, e, level=logging.WARNING)
                await wait_for_event(self._changed, _LIVE_RETRY_SECONDS)
            else:
                self._faults.forget("")
                await self._changed.wait()


class LiveConfig:
    """The active configuration, and the tasks that keep it current."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        place: tuple[str, str | None],
        repository_config_map: str | None,
        parsed: ParsedConfig,
        expose_defaults: ExposeSettings,
        report: AgentReport,
    ) -> None:
        """Start with `parsed`, and follow the ConfigMap at `place`, its namespace and name, once `run` is called.

        `repository_config_map` is the one of new repositories. No document changes `expose_defaults`.
        """
        self.current = CurrentConfig(parsed)
        self.priority = PriorityClass(
            client, clock, current=self.current, report=report, on_change=self._rebuild_expose_settings
        )
        self.repositories = RepositoryConfig(
            client, place[0], repository_config_map, on_change=self._rebuild_expose_settings
        )
        self._watch = ConfigWatch(client, clock, place=place, current=self.current, report=report)
        self._announcer = ConfigAnnouncer(report.pod, self.current)
        self._expose_defaults = expose_defaults
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
            "hash": current.digest or "",
            "valid": current.valid,
            "warnings": current.warnings,
            "rejected": list(current.rejected),
            "loadConcurrency": concurrency.global_config,
            "prepareQueueLength": concurrency.prepare_queue_length,
            "priorityClassName": self.priority.name or "",
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
