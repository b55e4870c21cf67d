"""What the dispatcher's queue looks like to whoever reads the status page or the metrics.

Knows counts by kind and phase, and who is at which position in line right now. Does not know
how anybody gets ahead (`nodeagent.dispatcher`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from core.models.base import JsonDict
from core.models.phases import Phase
from nodeagent.load_index import Entry
from nodeagent.metrics import Metrics

__all__ = ["QueueView"]

_ON_THE_PAGE: Final = 1000
"""Loads in line that the status page names; the others are counted."""

_IN_METRICS: Final = 100
"""Loads in line that get a time series each: more would make a scraper pay for the queue."""


class QueueView:
    """Shows the queue while this agent is the dispatcher."""

    def __init__(self, metrics: Metrics, kinds: Iterable[str]) -> None:
        """Show loads of the kinds so called in `metrics`."""
        self._metrics = metrics
        self._kinds = tuple(kinds)

    def show(self, entries: Sequence[Entry], line: Iterable[Entry]) -> None:
        """Bring the metrics up to date.

        Args:
            entries: all loads.
            line: those that wait for a place, in order.
        """
        counts = Counter((entry.kind, entry.phase) for entry in entries if entry.managed)
        self._show_counts(counts)
        head = islice(line, _IN_METRICS)
        self._metrics.queue_positions(
            {(entry.kind, entry.name): position for position, entry in enumerate(head, start=1)}
        )

    def clear(self) -> None:
        """Show nothing any more: another agent is the dispatcher, and shows it."""
        self._show_counts(Counter())
        self._metrics.queue_positions({})

    def report(self, entries: Iterable[Entry], line: Sequence[Entry]) -> JsonDict:
        """Return the same for the status page; `waiting` is for those that wait for something else."""
        managed = [entry for entry in entries if entry.managed]
        positions = {entry.uid: position for position, entry in enumerate(line, start=1)}
        others = [entry for entry in managed if entry.phase is Phase.NEW and entry.uid not in positions]
        return {
            "phases": dict(Counter(str(entry.phase) for entry in managed)),
            "inLine": len(line),
            "line": [_describe(entry) | {"position": positions[entry.uid]} for entry in line[:_ON_THE_PAGE]],
            "waiting": [_describe(entry) | {"message": entry.message} for entry in others[:_ON_THE_PAGE]],
        }

    def _show_counts(self, counts: Counter[tuple[str, Phase]]) -> None:
        for kind in self._kinds:
            for phase in Phase:
                if not phase.final:
                    self._metrics.queue_length(kind, str(phase), counts[(kind, phase)])


def _describe(entry: Entry) -> JsonDict:
    return {"kind": entry.kind, "name": entry.name, "volumeNamespace": entry.queue, "created": entry.created}
