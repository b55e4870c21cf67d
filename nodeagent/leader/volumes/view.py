"""Shows the backups of volumes in the metrics while this agent is the leader.

And what retention keeps of them, with an Event about a backlog.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Final

from core.aio import wait_for_event
from core.models.base import format_time
from core.models.retention import HeldBackup, RetentionReport, deletes_by_old_rules
from nodeagent.coverage.states import CoverageRules
from nodeagent.leader.context import Cluster
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.coverage import CoverageReader, PlannedCoverage, hide_coverage, show_coverage
from nodeagent.leader.volumes.plans import PlanReader
from nodeagent.leader.volumes.states import ClaimKey, Plans, Remembered, VolumeState, build_states
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import (
    MAX_VOLUMES,
    RETENTION_HELD_BYTES,
    RETENTION_OLD_RULES,
    RETENTION_WAITING,
    RETENTION_WAITING_UNTIL,
    VOLUME_GAUGES,
    VOLUMES_OMITTED,
)

__all__ = ["VolumeView", "show_retention", "show_volumes"]

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
        cluster: Cluster,
        plans: PlanReader,
        coverage: CoverageReader,
        *,
        entries: Callable[[], Sequence[Entry]],
        rules: Callable[[], CoverageRules] = CoverageRules,
        verification: Callable[[], timedelta | None] = lambda: None,
    ) -> None:
        """Show in the metrics what `entries` returns, with what `plans` and `coverage` read.

        `rules` are active, and `verification` returns how often the leader verifies all backups, None if it does not.
        """
        self._metrics = cluster.metrics
        self._clock = cluster.clock
        self._events = cluster.events
        self._plans = plans
        self._entries = entries
        self._coverage = coverage
        self._rules = rules
        self._verification = verification
        self._now = cluster.now
        self._planned = PlannedCoverage()
        self._reported_at: datetime | None = None
        self._changed = asyncio.Event()
        self._memory: dict[ClaimKey, Remembered] = {}
        self._shown: Sequence[VolumeState] = ()

    def observe(self, entry: Entry) -> None:
        """Request an update if the changed `entry` is a backup that has ended."""
        if entry.copy is not None:
            self._changed.set()

    async def run(self) -> None:
        """Show the volumes until canceled; then none, since another agent shows them."""
        try:
            while True:
                plans = replace(await self._plans.read(), verification=self._verification())
                await self._show_retention(plans)
                self._planned = await self._coverage.read(self._rules())
                due_at = self._clock.monotonic() + _READ_SECONDS + len(plans.claims or ()) / _CLAIMS_PER_SECOND
                while (left := due_at - self._clock.monotonic()) > 0:
                    await self._show_changes(plans, left)
        finally:
            self._shown = show_volumes(self._metrics, (), self._shown)
            show_retention(self._metrics, None, ())
            hide_coverage(self._metrics)

    async def _show_retention(self, plans: Plans) -> None:
        """Show the last report of retention; once for each, record an Event about a backlog on its schedule."""
        report = plans.report
        old = [one["metadata"]["name"] for one in plans.cron_jobs if deletes_by_old_rules(one)]
        show_retention(self._metrics, report, old)
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
        self._shown = show_volumes(self._metrics, build_states(entries, plans, self._memory), self._shown)
        await show_coverage(self._metrics, self._planned, entries, self._now())
        if await wait_for_event(self._changed, seconds):
            await self._clock.sleep(_SHOW_SECONDS + len(entries) / _ENTRIES_PER_SECOND)


def show_volumes(
    metrics: Metrics, states: Sequence[VolumeState], shown: Sequence[VolumeState] = ()
) -> Sequence[VolumeState]:
    """Show these volumes and no others; of too many, those due first, then those with the newest backup.

    `shown` are the ones that are shown now; return those that are from now on.
    """
    chosen = sorted(states, key=_rank)[:MAX_VOLUMES]
    if chosen == shown:
        return shown
    for field, gauge in VOLUME_GAUGES.items():
        value_of = attrgetter(field)
        values = {(state.namespace, state.claim): value_of(state) for state in chosen}
        metrics.show(gauge, {labels: value for labels, value in values.items() if value is not None})
    metrics.show(VOLUMES_OMITTED, {(): len(states) - len(chosen)} if states else {})
    return chosen


def _rank(state: VolumeState) -> tuple[bool, float, float, str, str]:
    """Return what sorts the volumes that alerts are about, and may soon be about, before all others."""
    due_at = [at for at in (state.backup_due_at, state.verification_due_at) if at is not None]
    return (not state.shrunk, min(due_at, default=math.inf), -(state.backup_at or 0.0), state.namespace, state.claim)


def show_retention(metrics: Metrics, report: RetentionReport | None, old_schedules: Sequence[str]) -> None:
    """Show this report, None if there is none, and the schedules that delete by older rules; nothing else."""
    for gauge in (RETENTION_HELD_BYTES, RETENTION_WAITING, RETENTION_WAITING_UNTIL):
        metrics.show(gauge, {})
    metrics.show(RETENTION_OLD_RULES, {(schedule,): 1 for schedule in old_schedules})
    if report is None:
        return
    metrics.set(RETENTION_WAITING, report.waiting, report.waiting_why)
    if report.through is not None:
        metrics.set(RETENTION_WAITING_UNTIL, report.through.timestamp())
    held: dict[tuple[str, str, str], list[HeldBackup]] = {}
    for one in sorted(report.held, key=lambda one: one.created or report.at):
        held.setdefault((one.namespace, one.claim, one.rule), []).append(one)
    for key, backups in held.items():
        oldest = backups[0]
        created = format_time(oldest.created) if oldest.created is not None else ""
        metrics.set(RETENTION_HELD_BYTES, sum(one.bytes for one in backups), *key, oldest.backup, created)
