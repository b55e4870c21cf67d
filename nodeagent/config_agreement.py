"""Whether all node agents have the same configuration in force.

Knows that each agent writes the hash of its own on its own pod, once for each change: a patch an
agent and an edit, which reaches the dispatcher through the watch of the agents' pods that it has
anyway. Does not know what the configurations say.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from core.kube.errors import KubeError
from core.models.names import CONFIG_ANNOTATION
from nodeagent.current_config import CurrentConfig
from nodeagent.runtime.own_pod import Board, Voice, shown

__all__ = ["NO_CONFIG", "ConfigAgreement", "ConfigAnnouncer", "describe_difference"]


NO_CONFIG: Final = "none"
"""Announced where no ConfigMap was named."""


_AGAIN_SECONDS: Final = 30.0


_LOOK_SECONDS: Final = 10.0
"""Between two looks at what the watch brought; no request is made for one."""


_PATIENCE_SECONDS: Final = 60.0
"""An edit reaches all agents within seconds; one that started badly stays different."""


class ConfigAnnouncer:
    """Keeps the annotation on the agent's own pod at what is in force."""

    def __init__(self, pod: Board, current: CurrentConfig) -> None:
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


class ConfigAgreement:
    """The dispatcher's look at the configurations of all agents."""

    def __init__(self, clock: Clock, voice: Voice) -> None:
        """Tell by `voice` when they have differed for a minute."""
        self._clock = clock
        self._voice = voice

    async def run(self, in_force: Callable[[], Mapping[str, str]]) -> None:
        """Compare until canceled; `in_force` tells the hash of each live agent by its node."""
        differ_since: float | None = None
        told = False
        while True:
            difference = describe_difference(in_force())
            now = self._clock.monotonic()
            if not difference:
                if told:
                    await self._voice.tell("ConfigsAgree", "all node agents have the same configuration in force again")
                differ_since, told = None, False
            elif differ_since is None:
                differ_since = now
            elif now - differ_since >= _PATIENCE_SECONDS and not told:
                told = True
                await self._voice.tell("ConfigsDiffer", difference, warning=True)
            await self._clock.sleep(_LOOK_SECONDS)


def describe_difference(in_force: Mapping[str, str]) -> str:
    """Return who has which configuration, by the hashes of nodes; empty where all have one."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, digest in sorted(in_force.items()):
        nodes[digest].append(node)
    if len(nodes) < 2:  # noqa: PLR2004 - two are different
        return ""
    by_number = sorted(nodes.items(), key=lambda item: (len(item[1]), item[0]))
    parts = [f"{digest} on {len(names)} ({shown(names)})" for digest, names in by_number]
    return (
        "node agents have had different configurations in force for a minute: "
        f"{', '.join(parts)}: the logs of the fewer tell why"
    )
