"""The admission queue: the reports of queued transfers, and what the status page shows of it.

Its order is in `core.models.phases`. The number of transfers that are admitted from it depends on the
quota (`nodeagent.leader.admission.ledger`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from core.clock import Clock
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.reasons import PendingReason
from nodeagent.leader.admission.pending import PendingTransfers
from nodeagent.leader.admission.writer import AdmissionChecks, AdmissionWriter
from nodeagent.leader.index import Entry
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import PENDING, QUEUE_LENGTH, QUEUE_POSITION
from nodeagent.runtime.workqueue import attempt

__all__ = ["QueueReports", "QueueView"]


class QueueReports:
    """Reports, once for each transfer, that it is pending for the queue alone."""

    def __init__(self, pending: PendingTransfers, checks: AdmissionChecks, writer: AdmissionWriter) -> None:
        """Find in `pending` which reports are missing, run `checks` before them, write them through `writer`."""
        self._pending = pending
        self._checks = checks
        self._writer = writer

    def is_any_due(self, entries: Iterable[Entry]) -> bool:
        """Return whether a report is missing: to find out costs less than to bring all `entries` into order."""
        return any(self._pending.needs_queue_report(entry) for entry in self._pending.due(entries))

    async def write(self, queue: Iterable[Entry], *, limit: int, most: int) -> int:
        """Check those in `queue` that were not reported; report those that could start.

        Args:
            queue: the transfers behind those that are admitted, in order.
            limit: the `prepareQueueLength`.
            most: the maximum number of checks.

        Returns:
            The number of checks.
        """
        missing = ((n, e) for n, e in enumerate(queue, start=1) if self._pending.needs_queue_report(e))
        chosen = list(islice(missing, most))
        positions = {entry.uid: position for position, entry in chosen}
        for checked in await self._checks.run([entry for _, entry in chosen]):
            if checked.ready:
                uid = checked.entry.uid
                self._pending.mark_queued(uid)
                report = self._writer.report_queued(checked, limit=limit, position=positions[uid])
                await attempt(checked.entry.log_fields, report)
        return len(chosen)


_SHOW_SECONDS: Final = 1.0
"""Between two updates of the metrics while the queue changes; longer for a longer queue,"""


_ENTRIES_PER_SECOND: Final = 10_000
"""so that 100,000 transfers take no more of a core than 10,000: some percent."""


_ON_STATUS_PAGE: Final = 1000
"""Transfers that the status page lists; the others are counted."""


_IN_METRICS: Final = 100
"""Positions with a time series each: more would make scraping expensive."""


_REASONS: Final = frozenset(PendingReason)
_OTHER_REASON: Final = "Other"
"""The label of reasons that the kubelet, the scheduler or a volume controller defines: there is no list of them."""


class QueueView:
    """Shows the queue in the metrics and on the status page while this agent is the leader."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        kinds: Sequence[str],
        *,
        entries: Callable[[], Sequence[Entry]],
        order: Callable[[Iterable[Entry]], Iterable[Entry]],
    ) -> None:
        """Show transfers of the kinds named in `kinds`.

        Args:
            metrics: the metrics that are set.
            clock: the clock of the pauses.
            kinds: the names of the kinds.
            entries: returns all transfers.
            order: returns the queued ones among its argument, in order.
        """
        self._metrics = metrics
        self._clock = clock
        self._kinds = kinds
        self._entries = entries
        self._order = order
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Request an update: a transfer has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the metrics up to date until canceled; then remove them, since another agent shows the queue."""
        try:
            while True:
                self._changed.clear()
                shown = self._show()
                await self._changed.wait()
                await self._clock.sleep(_SHOW_SECONDS + shown / _ENTRIES_PER_SECOND)
        finally:
            self._metrics.show(PENDING, {})
            self._show_counts(Counter())
            self._metrics.show(QUEUE_POSITION, {})

    def report(self) -> JsonDict:
        """Return the queue for the status page.

        `pending` are the New transfers with another reason, `interrupted` those between two attempts.
        """
        managed = [entry for entry in self._entries() if entry.managed]
        queue = list(self._order(managed))
        positions = {entry.uid: position for position, entry in enumerate(queue, start=1)}
        others = [entry for entry in managed if entry.phase is Phase.NEW and entry.uid not in positions]
        interrupted = [entry for entry in managed if entry.interrupted]
        return {
            "phases": dict(Counter(str(entry.phase) for entry in managed)),
            "queued": len(queue),
            "queue": [_describe(entry) | {"position": positions[entry.uid]} for entry in queue[:_ON_STATUS_PAGE]],
            "pending": [_describe(entry) | {"reason": entry.reason} for entry in others[:_ON_STATUS_PAGE]],
            "interrupted": [_describe_attempt(entry) for entry in interrupted[:_ON_STATUS_PAGE]],
        }

    def _show(self) -> int:
        """Update the metrics; return the number of transfers."""
        managed = [entry for entry in self._entries() if entry.managed]
        self._show_counts(Counter((entry.kind, entry.phase) for entry in managed))
        pending = [entry for entry in managed if entry.reason and not entry.phase.final]
        self._metrics.show(PENDING, Counter((entry.kind, _known_reason(entry)) for entry in pending))
        head = enumerate(islice(self._order(managed), _IN_METRICS), start=1)
        self._metrics.show(QUEUE_POSITION, {(entry.kind, entry.name): position for position, entry in head})
        return len(managed)

    def _show_counts(self, counts: Counter[tuple[str, Phase]]) -> None:
        for kind in self._kinds:
            for phase in Phase:
                if not phase.final:
                    self._metrics.set(QUEUE_LENGTH, counts[(kind, phase)], kind, str(phase))


def _known_reason(entry: Entry) -> str:
    """Return the pending reason as a label: one of those that this project defines, or that others are not."""
    return entry.reason if entry.reason in _REASONS else _OTHER_REASON


def _describe(entry: Entry) -> JsonDict:
    return {"kind": entry.kind, "name": entry.name, "volumeNamespace": entry.queue, "created": entry.created}


def _describe_attempt(entry: Entry) -> JsonDict:
    return _describe(entry) | {"stage": str(entry.stage), "nodeLabel": entry.node_label, "reason": entry.reason}
