"""Whose turn it is, and which node gets it: pure rules.

Knows the order between namespaces and inside one, and how work is spread over agents. Does
not know how many places there are (`nodeagent.leader.admission.ledger`), nor what a load waits for.

Loads that only the queue holds back, each told so once.

Knows who was told, by this dispatcher or one before it. Does not know how a load is looked at
(`nodeagent.leader.admission.examiner`), nor how many places there are (`nodeagent.leader.dispatcher`).

What the dispatcher's queue looks like to whoever reads the status page or the metrics.

Knows counts by kind and phase, and who is at which position in line right now. Does not know
how anybody gets ahead (`nodeagent.leader.dispatcher`).
"""

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from core.clock import Clock
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.reasons import PendingReason
from nodeagent.leader.admission.examiner import Examiner, Look
from nodeagent.leader.index import Entry
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.tasks import attempt

__all__ = ["HeldBack", "QueueView", "in_order", "round_robin"]


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


_LASTS_SECONDS: Final = 10.0
"""So long a node must have had room for a load that it held back, before its reader is told that it is the queue
now: room comes and goes, and each time would be a look and a write."""


class HeldBack:
    """Tells loads that they have to wait for a place."""

    def __init__(
        self, examiner: Examiner, clock: Clock, examine: Callable[[Sequence[Entry]], Awaitable[list[Look]]]
    ) -> None:
        """Look at loads by `examine`, tell them through `examiner`."""
        self._examiner = examiner
        self._clock = clock
        self._examine = examine
        self._told: set[str] = set()
        self._news_at: dict[str, float] = {}

    def __contains__(self, uid: object) -> bool:
        """Whether that load was told."""
        return uid in self._told

    def retain(self, uids: AbstractSet[str]) -> None:
        """Forget all loads but those."""
        self._told &= uids
        self._news_at = {uid: at for uid, at in self._news_at.items() if uid in uids}

    def forget(self, uids: Iterable[str]) -> None:
        """Note that those loads wait for something else."""
        for uid in uids:
            self._told.discard(uid)
            self._news_at.pop(uid, None)

    def has_news(self, line: Iterable[Entry]) -> bool:
        """Whether anybody in `line` is to be looked at now: finding out costs less than bringing all into order."""
        return any(self._is_news(entry) and self._examiner.is_due(entry.uid) for entry in line)

    async def tell(self, line: Iterable[Entry], *, limit: int, most: int) -> int:
        """Look once at those in `line`, in its order, who were not told yet; tell those who could start.

        Args:
            line: who has to wait for a place, in order.
            limit: how many places there are.
            most: how many to look at, at most.

        Returns:
            How many were looked at.
        """
        news = list(islice(((n, entry) for n, entry in enumerate(line, start=1) if self._is_news(entry)), most))
        positions = {entry.uid: position for position, entry in news}
        for look in await self._examine([entry for _, entry in news]):
            if look.ready:
                self._told.add(look.entry.uid)
                told = self._examiner.hold_back(look, limit=limit, position=positions[look.entry.uid])
                await attempt(look.entry.log_fields, told)
        return len(news)

    def _is_news(self, entry: Entry) -> bool:
        if entry.reason == PendingReason.QUEUED:
            # One that a former dispatcher told need not be told again.
            self._told.add(entry.uid)
        if entry.uid in self._told:
            return False
        now = self._clock.monotonic()
        if entry.reason == PendingReason.NODE_BUSY:
            return self._news_at.setdefault(entry.uid, now + _LASTS_SECONDS) <= now
        return True


_SHOW_SECONDS: Final = 1.0
"""Between two looks at the whole queue for the metrics, while it changes; longer for a longer one,"""


_LOADS_A_SECOND: Final = 10_000
"""so that showing 100,000 loads takes no more of a core than showing 10,000: some percent."""


_ON_THE_PAGE: Final = 1000
"""Loads in line that the status page names; the others are counted."""


_IN_METRICS: Final = 100
"""Loads in line that get a time series each: more would make a scraper pay for the queue."""


class QueueView:
    """Shows the queue while this agent is the dispatcher."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        kinds: Sequence[str],
        *,
        entries: Callable[[], Sequence[Entry]],
        order: Callable[[Iterable[Entry]], Iterable[Entry]],
    ) -> None:
        """Show loads of the kinds so called in `metrics`.

        Args:
            metrics: where they are shown.
            clock: what pauses are measured on.
            kinds: the names of the kinds.
            entries: returns all loads.
            order: returns those of them that wait for a place, in order.
        """
        self._metrics = metrics
        self._clock = clock
        self._kinds = kinds
        self._entries = entries
        self._order = order
        self._news = asyncio.Event()

    def note(self) -> None:
        """Note that a load has changed."""
        self._news.set()

    async def run(self) -> None:
        """Keep the metrics at what is seen until canceled; then another agent shows it."""
        try:
            while True:
                self._news.clear()
                shown = self._show()
                await self._news.wait()
                await self._clock.sleep(_SHOW_SECONDS + shown / _LOADS_A_SECOND)
        finally:
            self._show_counts(Counter())
            self._metrics.queue_positions({})

    def report(self) -> JsonDict:
        """Return the same for the status page; `waiting` are those that wait for something else."""
        managed = [entry for entry in self._entries() if entry.managed]
        line = list(self._order(managed))
        positions = {entry.uid: position for position, entry in enumerate(line, start=1)}
        others = [entry for entry in managed if entry.phase is Phase.NEW and entry.uid not in positions]
        return {
            "phases": dict(Counter(str(entry.phase) for entry in managed)),
            "inLine": len(line),
            "line": [_describe(entry) | {"position": positions[entry.uid]} for entry in line[:_ON_THE_PAGE]],
            "waiting": [_describe(entry) | {"reason": entry.reason} for entry in others[:_ON_THE_PAGE]],
        }

    def _show(self) -> int:
        """Show what there is now; return how many loads that are."""
        managed = [entry for entry in self._entries() if entry.managed]
        self._show_counts(Counter((entry.kind, entry.phase) for entry in managed))
        head = enumerate(islice(self._order(managed), _IN_METRICS), start=1)
        self._metrics.queue_positions({(entry.kind, entry.name): position for position, entry in head})
        return len(managed)

    def _show_counts(self, counts: Counter[tuple[str, Phase]]) -> None:
        for kind in self._kinds:
            for phase in Phase:
                if not phase.final:
                    self._metrics.queue_length(kind, str(phase), counts[(kind, phase)])


def _describe(entry: Entry) -> JsonDict:
    return {"kind": entry.kind, "name": entry.name, "volumeNamespace": entry.queue, "created": entry.created}
