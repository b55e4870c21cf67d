"""Whether all node agents have the same configuration in force.

Knows that each agent writes the hash of its own on its own pod, once for each change: a patch an
agent and an edit, which reaches the dispatcher through the watch of the agents' pods that it has
anyway. Does not know what the configurations say.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

from core.clock import Clock
from nodeagent.runtime.own_pod import Voice, shown

__all__ = ["ConfigAgreement", "describe_difference"]


_LOOK_SECONDS: Final = 10.0
"""Between two looks at what the watch brought; no request is made for one."""


_PATIENCE_SECONDS: Final = 60.0
"""An edit reaches all agents within seconds; one that started badly stays different."""


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
