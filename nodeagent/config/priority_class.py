"""Whether the priority class that is configured for mover pods can be used.

Knows how to follow the one class by its name, and what to do about one that is not there. Does
not know pods: they get the class as a parameter.
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
from core.kube.watch import watch_one
from core.models.base import JsonDict
from nodeagent.config.current import CurrentConfig
from nodeagent.runtime.own_pod import AgentReport

__all__ = ["PriorityClass"]

_log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 30.0
"""Before a server that refused to tell is asked again."""


class PriorityClass:
    """The configured priority class, as the cluster has it.

    A pod with a class that does not exist would be refused, and a backup must not fail for
    that. While nothing is known of a class, movers go without it.
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
        """Follow the class that `current` names.

        `on_change` is called when the class was found, or was found missing; it must not block.
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
        """The class for a mover pod that is made now; empty: none, the default priority."""
        return self._followed if self._found and self._followed == self._wanted else ""

    @property
    def _wanted(self) -> str:
        return self._current.config.priority_class_name

    async def look(self) -> None:
        """Ask for the class once, so that the first pods can have it."""
        self._follow(self._wanted)
        if not self._followed:
            return
        try:
            selection = Selection(PRIORITY_CLASSES, field_selector=f"metadata.name={self._followed}")
            await self._judge(next(iter(await self._client.list(selection)), None))
        except KubeError as e:
            self._warn_unknown(e)

    async def run(self) -> None:
        """Follow the class until canceled."""
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
        self._show()

    async def _watch(self) -> None:
        """Keep the verdict on the followed class; the last one holds while nobody can be asked."""
        if not self._followed:
            return
        while True:
            states = watch_one(self._client, PRIORITY_CLASSES, "", name=self._followed, clock=self._clock)
            try:
                async with aclosing(states):
                    async for state in states:
                        await self._judge(state)
            except KubeError as e:
                self._warn_unknown(e)
                await self._clock.sleep(_AGAIN_SECONDS)

    async def _judge(self, priority_class: JsonDict | None) -> None:
        """Note whether the class is there, and tell it where that is news."""
        found = priority_class is not None
        if found is self._found:
            return
        first, self._found = self._found is None, found
        self._on_change()
        self._show()
        if priority_class is None:
            told = f"priority class {self._followed} does not exist: data movers get the default priority until it does"
            await self._report.pod.report("PriorityClassMissing", told, warning=True)
            return
        told = f"priority class {self._followed} exists: data movers get it (value {priority_class.get('value', 0)})"
        if first:
            _log.info("%s", told)
        else:
            await self._report.pod.report("PriorityClassFound", told)

    def _show(self) -> None:
        self._report.metrics.priority_class_usable(not self._wanted or self._found is True)

    def _warn_unknown(self, error: KubeError) -> None:
        holds = "the default priority" if not self._found else "it, as it was there when last seen"
        _log.warning("priority class %s cannot be checked; data movers get %s: %s", self._followed, holds, error)
