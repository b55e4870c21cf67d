"""The configured priority class of mover pods, and whether the cluster has it.

Knows how to watch the one class by its name, and what to do if it is missing. Does not know pods:
they get the class as a setting.
Source: Velero v1.18, pkg/util/kube/priority_class.go: a class that is missing is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import PRIORITY_CLASSES
from core.kube.types import PriorityClassObject
from core.kube.watch import watch_one
from nodeagent.config.current import CurrentConfig
from nodeagent.metrics.table import PRIORITY_CLASS_USABLE
from nodeagent.runtime.own_pod import AgentReport

__all__ = ["PriorityClass"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 30.0
"""Delay before a rejected watch is retried."""


class PriorityClass:
    """The configured priority class, as the cluster has it.

    The API server rejects a pod whose class does not exist, and a backup must not fail because of
    that. Until the class is known to exist, mover pods have the default priority.
    """

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        current: CurrentConfig,
        report: AgentReport,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch the class that `current` names.

        `on_change` is called when the class appears or is found missing; it must not block.
        """
        self._client = client
        self._clock = clock
        self._current = current
        self._report = report
        self._on_change = on_change
        self._followed = ""
        self._found: bool | None = None
        self._renamed = asyncio.Event()
        current.subscribe(self._on_config)

    @property
    def name(self) -> str:
        """The class of a mover pod that is created now; empty: the default priority."""
        return self._followed if self._found and self._followed == self._wanted else ""

    @property
    def _wanted(self) -> str:
        return self._current.config.priority_class_name

    async def refresh(self) -> None:
        """Read the class once, so that the first mover pods can have it."""
        self._follow(self._wanted)
        if not self._followed:
            return
        try:
            selection = Selection(PRIORITY_CLASSES, field_selector=f"metadata.name={self._followed}")
            await self._observe(next(iter(await self._client.list(selection)), None))
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

    def _follow(self, name: str) -> None:
        if name != self._followed:
            self._followed, self._found = name, None
        self._update_metric()

    async def _watch(self) -> None:
        """Observe the watched class; its last state is kept while the API server cannot be reached."""
        if not self._followed:
            return
        while True:
            states = watch_one(self._client, PRIORITY_CLASSES, "", name=self._followed, clock=self._clock)
            try:
                async with aclosing(states):
                    async for state in states:
                        await self._observe(state)
            except KubeError as e:
                self._warn_unchecked(e)
                await self._clock.sleep(_RETRY_SECONDS)

    async def _observe(self, priority_class: PriorityClassObject | None) -> None:
        """Update whether the class exists, and report a change."""
        found = priority_class is not None
        if found is self._found:
            return
        first, self._found = self._found is None, found
        self._on_change()
        self._update_metric()
        if priority_class is None:
            message = (
                f"PriorityClass {self._followed} does not exist: data movers get the default priority until it does"
            )
            await self._report.pod.report("PriorityClassMissing", message, warning=True)
            return
        message = f"PriorityClass {self._followed} exists: data movers get it (value {priority_class.get('value', 0)})"
        if first:
            _log.info("%s", message)
        else:
            await self._report.pod.report("PriorityClassFound", message)

    def _update_metric(self) -> None:
        self._report.metrics.set(PRIORITY_CLASS_USABLE, not self._wanted or self._found is True)

    def _warn_unchecked(self, error: KubeError) -> None:
        used = "it, since it existed when last read" if self._found else "the default priority"
        _log.warning("cannot check PriorityClass %s, will retry; data movers get %s: %s", self._followed, used, error)
