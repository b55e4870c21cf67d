"""Which nodes have a node agent that works.

Knows the agents' pods: Ready, on a node, not being deleted. Does not know what is given to
whom (`nodeagent.leader.admission.queue`).

Whether all node agents have the same configuration in force.

Knows that each agent writes the hash of its own on its own pod, once for each change: a patch an
agent and an edit, which reaches the dispatcher through the watch of the agents' pods that it has
anyway. Does not know what the configurations say.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import CONFIG_ANNOTATION, label_value
from core.models.phases import Phase
from nodeagent.leader.index import Entry
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.own_pod import AGENT_SELECTOR, AgentReporter, shown

__all__ = ["ConfigAgreement", "LiveAgents", "choose_node", "count_accepted", "describe_difference"]


class _LiveAgent(NamedTuple):
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

    def _on_pod(self, _: _LiveAgent) -> None:
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


def _trim(pod: JsonDict) -> _LiveAgent:
    meta = pod["metadata"]
    node = (pod.get("spec") or {}).get("nodeName", "")
    conditions = (pod.get("status") or {}).get("conditions") or []
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
    live = bool(node) and ready and not meta.get("deletionTimestamp")
    config = (meta.get("annotations") or {}).get(CONFIG_ANNOTATION, "")
    return _LiveAgent(node, live, config)


_LOOK_SECONDS: Final = 10.0
"""Between two looks at what the watch brought; no request is made for one."""


_PATIENCE_SECONDS: Final = 60.0
"""An edit reaches all agents within seconds; one that started badly stays different."""


class ConfigAgreement:
    """The dispatcher's look at the configurations of all agents."""

    def __init__(self, clock: Clock, voice: AgentReporter) -> None:
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
                    await self._voice.report(
                        "ConfigsAgree", "all node agents have the same configuration in force again"
                    )
                differ_since, told = None, False
            elif differ_since is None:
                differ_since = now
            elif now - differ_since >= _PATIENCE_SECONDS and not told:
                told = True
                await self._voice.report("ConfigsDiffer", difference, warning=True)
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


def count_accepted(entries: Iterable[Entry]) -> Counter[str]:
    """Return how many loads are Accepted under each node label."""
    return Counter(entry.node_label for entry in entries if entry.phase is Phase.ACCEPTED)


def choose_node(agents: Mapping[str, str], accepted: Mapping[str, int]) -> str | None:
    """Return the node label of the live agent with the fewest Accepted loads; None without agents.

    Args:
        agents: the node names of all live agents, by node label.
        accepted: how many loads are Accepted, by node label.
    """
    return min(agents, key=lambda label: (accepted.get(label, 0), label), default=None)
