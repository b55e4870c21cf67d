"""Nodes that are passed over: their last transfers failed before Prepared, for causes that may be the node's.

An agent that fails every transfer at once always has the fewest Accepted ones, and would get all others
as well. What is counted was observed by this leader: another one begins without it.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.reasons import NotPrepared
from core.models.units import format_duration
from nodeagent.leader.index import Entry

__all__ = ["NodeBackoff"]

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
        """Measure on `clock`."""
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
                "failures": self._nodes[label].failures,
                "cause": self._nodes[label].cause,
                "seconds": round(self._nodes[label].until_seconds - now),
            }
            for label in sorted(self.labels())
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
        self._news.append(
            (
                label,
                f"other nodes are preferred for {format_duration(pause)}: {failed}, the last one because of {cause}",
            )
        )
