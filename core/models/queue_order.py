"""The order of the admission queue: restores before backups where that is set, namespaces alternate, oldest first.

Pure. The leader admits transfers in this order; `nodeagent status` shows it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

__all__ = ["Queued", "in_order", "round_robin"]


class Queued(Protocol):
    """What the order depends on: `queue` is the volume namespace, `created` the creation time as the API prints it."""

    @property
    def kind(self) -> str:
        """The kind of the custom resource."""
        ...

    @property
    def queue(self) -> str:
        """The namespace of the volume."""
        ...

    @property
    def created(self) -> str:
        """The creation time, RFC 3339 in UTC with whole seconds: it sorts as time does."""
        ...

    @property
    def name(self) -> str:
        """The name of the custom resource."""
        ...


_Q = TypeVar("_Q", bound=Queued)


def in_order(entries: Iterable[_Q], *, after: str, first: AbstractSet[str] = frozenset()) -> Iterator[_Q]:
    """Yield `entries` in the order in which they are to be admitted.

    All transfers of the kinds named in `first` go before the others. Within both groups namespaces
    alternate.
    """
    preferred: list[_Q] = []
    others: list[_Q] = []
    for entry in entries:
        (preferred if entry.kind in first else others).append(entry)
    yield from round_robin(preferred, after=after)
    yield from round_robin(others, after=after)


def round_robin(entries: Iterable[_Q], *, after: str) -> Iterator[_Q]:
    """Yield `entries` with alternating namespaces, beginning behind the one that was served last (`after`).

    Within a namespace the oldest goes first, then the first by name.
    """
    by_namespace: dict[str, list[_Q]] = {}
    for entry in entries:
        by_namespace.setdefault(entry.queue, []).append(entry)
    names = sorted(by_namespace)
    begin = bisect_right(names, after)
    queues = [
        iter(sorted(by_namespace[name], key=lambda entry: (entry.created, entry.name)))
        for name in names[begin:] + names[:begin]
    ]
    while queues:
        not_empty = []
        for queue in queues:
            oldest = next(queue, None)
            if oldest is not None:
                yield oldest
                not_empty.append(queue)
        queues = not_empty
