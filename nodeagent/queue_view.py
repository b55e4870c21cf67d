"""What the dispatcher's queue looks like to whoever reads the status page or the metrics.

Knows counts by kind and phase, and who is at which position in line right now. Does not know
how anybody gets ahead (`nodeagent.dispatcher`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from core.clock import Clock
from core.models.base import JsonDict
from core.models.phases import Phase
from nodeagent.load_index import Entry
from nodeagent.runtime.metrics import Metrics

__all__ = ["QueueView"]

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
            "waiting": [_describe(entry) | {"message": entry.message} for entry in others[:_ON_THE_PAGE]],
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
