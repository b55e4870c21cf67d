"""Whose turn it is, and which node gets it: pure rules.

Knows the order between namespaces and inside one, and how work is spread over agents. Does
not know how many places there are (`nodeagent.ledger`), nor what a load waits for.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from core.models.phases import Phase
from nodeagent.load_index import Entry

__all__ = ["choose_node", "count_accepted", "in_order", "round_robin"]


def in_order(waiting: Iterable[Entry], *, after: str, first: AbstractSet[str] = frozenset()) -> Iterator[Entry]:
    """Yield `waiting` in the order in which it is to be admitted.

    All loads of the kinds named in `first` go before the others. Among them, and among the
    others, namespaces take turns.
    """
    preferred: list[Entry] = []
    others: list[Entry] = []
    for entry in waiting:
        (preferred if entry.kind in first else others).append(entry)
    yield from round_robin(preferred, after=after)
    yield from round_robin(others, after=after)


def round_robin(waiting: Iterable[Entry], *, after: str) -> Iterator[Entry]:
    """Yield `waiting` so that namespaces take turns, beginning behind the one served last (`after`).

    Inside one the oldest goes first, then by name.
    """
    queues: dict[str, list[Entry]] = {}
    for entry in waiting:
        queues.setdefault(entry.queue, []).append(entry)
    names = sorted(queues)
    begin = bisect_right(names, after)
    lines = [
        iter(sorted(queues[name], key=lambda entry: (entry.created, entry.name)))
        for name in names[begin:] + names[:begin]
    ]
    while lines:
        going_on = []
        for line in lines:
            first = next(line, None)
            if first is not None:
                yield first
                going_on.append(line)
        lines = going_on


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
