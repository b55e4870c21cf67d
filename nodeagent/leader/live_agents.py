"""The live node agents: those with a Ready pod, whether their configurations agree, and the nodes that are passed over.

Each agent announces in annotations of its own pod the hash of its active configuration, and what it can carry out that
earlier versions cannot; the leader reads them from the watch of agent pods, without a request. A pod without the hash
is an agent of Velero, as on Windows nodes, or while a DaemonSet is rolled over: its pods have the same labels.

An agent that fails every transfer at once always has the fewest Accepted ones, and would get all others
as well. What is counted was observed by this leader: another one begins without it.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple, cast

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.kube.types import Object, Pod
from core.models.base import JsonDict
from core.models.names import AGENT_SELECTOR, CONFIG_ANNOTATION, FEATURES_ANNOTATION, label_value
from core.models.phases import Phase
from core.models.reasons import NotPrepared
from core.models.units import format_duration
from exposer.pod_status import is_ready
from nodeagent.leader.index import Entry
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.own_pod import OwnPod, shown
from nodeagent.runtime.workqueue import Timers

_FAILURES: Final = 3
"""In a row; fewer may be chance."""

_FIRST: Final = timedelta(minutes=5)
_LONGEST: Final = timedelta(hours=1)

_DOUBLINGS: Final = 10
"""After this number of times the longest pause applies in any case."""

_PREPARED: Final = frozenset({Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED})


@dataclass
class _Node:
    """The failures of one node in a row: how many, the last cause, how often it was passed over, and until when."""

    failures: int = 0
    cause: str = ""
    times: int = 0
    until_seconds: float = 0.0


class NodeBackoff:
    """The failures of all nodes, by node label, and the nodes to pass over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accepted: dict[str, str] = {}
        self._nodes: dict[str, _Node] = {}
        self._news: list[tuple[str, str]] = []

    def observe(self, entry: Entry) -> None:
        """Count how a transfer left Accepted; `entry` is its newest state."""
        if entry.phase is Phase.ACCEPTED:
            self._accepted[entry.uid] = entry.node_label
            return
        label = self._accepted.pop(entry.uid, "")
        if label and entry.phase in _PREPARED:
            self._nodes.pop(label, None)
        elif label and entry.not_prepared:
            self._count(label, entry.not_prepared)

    def retain(self, entries: Iterable[Entry], agents: AbstractSet[str]) -> None:
        """Forget transfers that are not among `entries`, and nodes whose label is not among the live `agents`."""
        accepted = {entry.uid for entry in entries if entry.phase is Phase.ACCEPTED}
        for uid in self._accepted.keys() - accepted:
            del self._accepted[uid]
        for label in self._nodes.keys() - agents:
            del self._nodes[label]

    def labels(self) -> frozenset[str]:
        """Return the node labels of the nodes to pass over now."""
        now = self._clock.monotonic()
        return frozenset(label for label, node in self._nodes.items() if node.until_seconds > now)

    def take_news(self) -> list[tuple[str, str]]:
        """Return node label and message for each node that is passed over since the last call."""
        news, self._news = self._news, []
        return news

    def report(self, names: Mapping[str, str]) -> list[JsonDict]:
        """Return the nodes that are passed over for the status page; `names` are node names by node label."""
        now = self._clock.monotonic()
        return [
            {
                "node": names.get(label, label),
                "failures": node.failures,
                "cause": node.cause,
                "seconds": round(node.until_seconds - now),
            }
            for label, node in sorted(self._nodes.items())
            if node.until_seconds > now
        ]

    def _count(self, label: str, cause: NotPrepared) -> None:
        """Count a failure; one that began before the node was passed over does not make that longer."""
        node, now = self._nodes.setdefault(label, _Node()), self._clock.monotonic()
        node.failures += 1
        node.cause = cause
        if node.failures < _FAILURES or node.until_seconds > now:
            return
        pause = min(_FIRST * (1 << min(node.times, _DOUBLINGS)), _LONGEST)
        node.times += 1
        node.until_seconds = now + pause.total_seconds()
        failed = f"the last {node.failures} transfers of this node failed before Prepared"
        message = f"other nodes are preferred for {format_duration(pause)}: {failed}, the last one because of {cause}"
        self._news.append((label, message))


class _LiveAgent(NamedTuple):
    """The cached part of an agent's pod: name, uid and node, the hash of its configuration, and its features.

    `live`: it may be assigned transfers. `velero`: it is one of Velero's, and runs, also while it is being deleted.
    """

    name: str
    uid: str
    node: str
    live: bool
    velero: bool
    config: str
    features: str


_UNSEEN_SECONDS: Final = 10.0
"""Count of an unavailable agent at most between two looks at it: this process may have been frozen in between."""


class LiveAgents:
    """The live agents of one namespace, kept by `informer`; `backoff` are their nodes that are passed over."""

    def __init__(self, client: KubeClient, clock: Clock, *, namespace: str, on_change: Callable[[], None]) -> None:
        """Watch the agents' pods once the informer runs; `on_change` is called when the set of live agents changes."""
        self._namespace = namespace
        self._on_change = on_change
        self._nodes: Mapping[str, str] | None = None
        self._velero_nodes: AbstractSet[str] | None = None
        self.backoff = NodeBackoff(clock)
        selection = Selection(PODS, namespace, label_selector=AGENT_SELECTOR)
        self.informer = Informer(client, selection, clock=clock, trim=_trim, on_change=self._on_pod)
        self._unavailable = Timers(
            clock, most_seconds=_UNSEEN_SECONDS, outdated_seconds=lambda: self.informer.outdated_seconds
        )

    def nodes(self, feature: str | None = None) -> Mapping[str, str]:
        """Return the names of nodes with a live agent that has the feature, by node label value; None: every agent."""
        if feature:
            able = {agent.node for agent in self.informer.items() if agent.live and feature in agent.features.split()}
            return {label_value(name): name for name in able}
        if self._nodes is None:
            names = {agent.node for agent in self.informer.items() if agent.live}
            self._nodes = {label_value(name): name for name in names}
            for label in self._nodes:
                self._unavailable.forget(label)
        return self._nodes

    def velero_nodes(self) -> AbstractSet[str]:
        """Return the node labels of nodes with an agent of Velero that runs: what it has accepted is not touched."""
        if self._velero_nodes is None:
            self._velero_nodes = {label_value(agent.node) for agent in self.informer.items() if agent.velero}
        return self._velero_nodes

    def _on_pod(self, _: _LiveAgent) -> None:
        before, self._nodes, self._velero_nodes = self._nodes, None, None
        # Comparing during the first list would be quadratic, and is of no use yet.
        if self.informer.synced.is_set() and self.nodes() != before:
            self._on_change()

    def configs(self) -> Mapping[str, str]:
        """Return the configuration hash that each live agent announces, by node name."""
        return {agent.node: agent.config for agent in self.informer.items() if agent.live}

    def pod(self, label: str) -> Object | None:
        """Return the live agent's pod with that node label, with its identity only; None if there is none."""
        for agent in self.informer.items():
            if agent.live and label_value(agent.node) == label:
                meta = {"namespace": self._namespace, "name": agent.name, "uid": agent.uid}
                return cast("Object", {"apiVersion": PODS.api_version, "kind": PODS.kind, "metadata": meta})
        return None

    def seconds_unavailable(self, label: str) -> float:
        """Return how long the agent with that node label has been seen unavailable; 0.0 if it is live."""
        return 0.0 if label in self.nodes() else self._unavailable.seconds(label)

    def retain(self, labels: AbstractSet[str]) -> None:
        """Forget how long agents have been unavailable, except those with these node labels."""
        self._unavailable.retain(labels)


def _trim(pod: Pod) -> _LiveAgent:
    meta = pod["metadata"]
    node = (pod.get("spec") or {}).get("nodeName", "")
    runs = bool(node) and is_ready(pod)
    annotations = meta.get("annotations") or {}
    config, features = annotations.get(CONFIG_ANNOTATION, ""), sys.intern(annotations.get(FEATURES_ANNOTATION, ""))
    live, velero = runs and bool(config) and not meta.get("deletionTimestamp"), runs and not config
    return _LiveAgent(meta["name"], meta["uid"], node, live, velero, config, features)


_COMPARE_SECONDS: Final = 10.0
"""Between comparisons of the cached hashes; they cost no request."""

_GRACE_SECONDS: Final = 60.0
"""An edit reaches all agents within seconds; an agent that did not get it stays different."""


async def compare_configs(clock: Clock, own_pod: OwnPod, active: Callable[[], Mapping[str, str]]) -> None:
    """Compare the configurations of all agents until canceled; `active` returns the hash of each live one by node name.

    What differs is reported on `own_pod`.
    """
    timers, reported = Timers(clock), False
    while True:
        difference = describe_difference(active())
        seconds = timers.seconds("", str(bool(difference)))
        if difference and seconds >= _GRACE_SECONDS and not reported:
            reported = True
            await own_pod.report("ConfigsDiffer", difference, warning=True)
        elif reported and not difference:
            reported = False
            await own_pod.report("ConfigsAgree", "all node agents have the same active configuration again")
        await clock.sleep(_COMPARE_SECONDS)


def describe_difference(active: Mapping[str, str]) -> str | None:
    """Return which nodes have which configuration hash, or None if all agree."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for node, digest in sorted(active.items()):
        nodes[digest].append(node)
    if len(nodes) < 2:  # noqa: PLR2004 - two hashes differ
        return None
    by_number = sorted(nodes.items(), key=lambda item: (len(item[1]), item[0]))
    parts = ", ".join(f"{digest} on {len(names)} ({shown(names)})" for digest, names in by_number)
    return f"node agents have had different active configurations for a minute: {parts}: see the logs of the minority"


def count_idle(entries: Iterable[Entry], chosen: Mapping[str, str] | None = None) -> Counter[str]:
    """Return how many transfers are assigned and move no data, by node label.

    `chosen` are node labels, by uid, that `entries` may not show yet.
    """
    return Counter(({entry.uid: entry.node_label for entry in entries if entry.idle} | dict(chosen or {})).values())


def choose_node(
    agents: Mapping[str, str], idle: Mapping[str, int], passed_over: AbstractSet[str] = frozenset()
) -> str | None:
    """Return the node label of the agent with the fewest idle transfers, or None without agents.

    `agents` are node names by node label. A label in `passed_over` is chosen only if there are no others.
    """
    preferred = agents.keys() - passed_over or agents.keys()
    return min(preferred, key=lambda label: (idle.get(label, 0), label), default=None)
