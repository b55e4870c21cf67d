"""Shows the backups of volumes in the metrics while this agent is the leader.

And what retention keeps of them, with an Event about a backlog.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from core.models.retention import deletes_by_old_rules
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.plans import PlanReader
from nodeagent.leader.volumes.states import ClaimKey, Plans, Remembered, build_states
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.events import EventLog

__all__ = ["VolumeView"]

_READ_SECONDS: Final = 300.0
"""Between two lists of all PVCs, which take one request and about a megabyte for each 500 of them;"""

_CLAIMS_PER_SECOND: Final = 100
"""longer for more of them, so that 100,000 take less than one request in five seconds."""

_SHOW_SECONDS: Final = 2.0
"""Between two updates while transfers change; longer for more of them,"""

_ENTRIES_PER_SECOND: Final = 5000
"""so that 100,000 take some percent of a core."""


class VolumeView:
    """Keeps the metrics of volumes up to date."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        *,
        plans: PlanReader,
        entries: Callable[[], Sequence[Entry]],
        events: EventLog,
    ) -> None:
        """Show in `metrics` what `entries` returns, with what `plans` reads."""
        self._metrics = metrics
        self._clock = clock
        self._plans = plans
        self._entries = entries
        self._events = events
        self._reported_at: datetime | None = None
        self._changed = asyncio.Event()
        self._memory: dict[ClaimKey, Remembered] = {}

    def observe(self, entry: Entry) -> None:
        """Request an update if the changed `entry` is a backup that has ended."""
        if entry.copy is not None:
            self._changed.set()

    async def run(self) -> None:
        """Show the volumes until canceled; then none, since another agent shows them."""
        try:
            while True:
                plans = await self._plans.read()
                await self._show_retention(plans)
                due_at = self._clock.monotonic() + _READ_SECONDS + len(plans.claims or ()) / _CLAIMS_PER_SECOND
                while (left := due_at - self._clock.monotonic()) > 0:
                    await self._show_changes(plans, left)
        finally:
            self._metrics.volumes(())
            self._metrics.retention(None, ())

    async def _show_retention(self, plans: Plans) -> None:
        """Show the last report of retention; once for each, record an Event about a backlog on its schedule."""
        report = plans.report
        old = [one["metadata"]["name"] for one in plans.cron_jobs if deletes_by_old_rules(one)]
        self._metrics.retention(report, old)
        if report is None or report.backlog is None or report.at == self._reported_at:
            return
        for one in plans.cron_jobs:
            if one["metadata"]["name"] == report.schedule:
                self._reported_at = report.at
                await self._events.record_warning(one, "RetentionBacklog", report.backlog)

    async def _show_changes(self, plans: Plans, seconds: float) -> None:
        """Show the volumes, then wait for a change or until `seconds` have passed."""
        self._changed.clear()
        entries = self._entries()
        self._metrics.volumes(build_states(entries, plans, self._memory))
        if await wait_for_event(self._changed, seconds):
            await self._clock.sleep(_SHOW_SECONDS + len(entries) / _ENTRIES_PER_SECOND)
