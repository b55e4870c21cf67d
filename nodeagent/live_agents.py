"""Which nodes have a node agent that works.

Knows the agents' pods: Ready, on a node, not being deleted. Does not know what is given to
whom (`nodeagent.admission_order`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import CONFIG_ANNOTATION, label_value
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.own_pod import AGENT_SELECTOR

__all__ = ["LiveAgents"]


class _Agent(NamedTuple):
    """What is kept of an agent's pod: its node, whether it works, and the hash of its configuration."""

    node: str
    live: bool
    config: str


class LiveAgents:
    """The live agents of one namespace, kept by list and watch."""

    def __init__(self, client: KubeClient, clock: Clock, *, namespace: str, on_change: Callable[[], None]) -> None:
        """Follow the agents' pods; `on_change` is called when a live one came or went."""
        self._clock = clock
        self._on_change = on_change
        self._nodes: Mapping[str, str] | None = None
        self._gone_at_seconds: dict[str, float] = {}
        self._informer = Informer(
            client,
            Selection(PODS, namespace, label_selector=AGENT_SELECTOR),
            clock=clock,
            trim=_trim,
            on_change=self._on_pod,
        )

    async def run(self) -> None:
        """Follow until canceled."""
        await self._informer.run()

    async def wait_synced(self) -> None:
        """Return once the pods were listed."""
        await self._informer.synced.wait()

    def nodes(self) -> Mapping[str, str]:
        """Return the nodes with a live agent: the node label's value, and the node's name."""
        if self._nodes is None:
            names = {agent.node for agent in self._informer.items() if agent.live}
            self._nodes = {label_value(name): name for name in names}
        return self._nodes

    def _on_pod(self, _: _Agent) -> None:
        before, self._nodes = self._nodes, None
        # While the first list comes in nobody asks yet, and counting anew for each would be quadratic.
        if self._informer.synced.is_set() and self.nodes() != before:
            self._on_change()

    def configs(self) -> Mapping[str, str]:
        """Return the hash of the configuration that each live agent says it has in force, by its node."""
        return {agent.node: agent.config for agent in self._informer.items() if agent.live and agent.config}

    def seconds_gone(self, label: str) -> float:
        """Return for how long the agent with that node label has been seen gone; 0 while it lives."""
        if label in self.nodes():
            self._gone_at_seconds.pop(label, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._gone_at_seconds.setdefault(label, now)


def _trim(pod: JsonDict) -> _Agent:
    meta = pod["metadata"]
    node = (pod.get("spec") or {}).get("nodeName", "")
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
    live = bool(node) and ready and not meta.get("deletionTimestamp")
    config = (meta.get("annotations") or {}).get(CONFIG_ANNOTATION, "")
    return _Agent(node, live, config)
