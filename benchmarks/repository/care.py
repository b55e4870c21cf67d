"""Maintenance of one real repository when the rules of the leader say so, in simulated time.

The leader's record and history are kept as its Jobs' results change them. Does not know what is measured.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from benchmarks.repository.bucket import Bucket
from core.contract import MaintenanceMode, MaintenanceResult
from core.models.storage import MaintenanceEntry, MaintenanceOutcome
from nodeagent.config.maintenance import MaintenanceSettings
from nodeagent.maintenance.record import MaintenanceRecord, after_success
from nodeagent.maintenance.rules import MaintenanceView, decide_maintenance, decide_memory, merge_history

__all__ = ["Care"]

_START: Final = timedelta(seconds=30)
"""Between the decision and the beginning of the pod."""


@dataclass
class Care:
    """What the leader knows of the repository; `changes` is the number of backups and deletions."""

    bucket: Bucket
    frequency: timedelta
    apart: bool = False
    changes: int = 0
    record: MaintenanceRecord = field(default_factory=MaintenanceRecord)
    entries: tuple[MaintenanceEntry, ...] = ()
    created_at: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.created_at = self.bucket.clock.now()

    async def until(self, moment: datetime) -> AsyncGenerator[MaintenanceResult, None]:
        """Move the clock to `moment`, and yield the result of each Job that runs before.

        Raises:
            BenchmarkError: a Job failed.
        """
        clock = self.bucket.clock
        while True:
            decision = decide_maintenance(self._view())
            if decision.hold is None:
                yield await self._run(may_be_full=decision.may_be_full)
                continue
            if decision.wait_until is None or decision.wait_until >= moment:
                break
            clock.move_to(decision.wait_until)
        clock.move_to(moment)

    def _view(self) -> MaintenanceView:
        last = max((entry.complete_timestamp for entry in self.entries if entry.complete_timestamp), default=None)
        return MaintenanceView(
            now=self.bucket.clock.now(),
            created_at=self.created_at,
            frequency=self.frequency,
            last_maintenance=last,
            entries=self.entries,
            record=self.record,
            fingerprint=str(self.changes),
        )

    async def _run(self, *, may_be_full: bool) -> MaintenanceResult:
        """Run a Job as the leader creates it."""
        clock, fingerprint = self.bucket.clock, str(self.changes)
        most = MaintenanceSettings().memory_limit_max_bytes
        limit = decide_memory(self.record, may_be_full=may_be_full, most_bytes=most).limit_bytes
        created = clock.now()
        clock.move_to(created + _START)
        result = await self.bucket.maintain(self.entries, limit_bytes=limit, apart=self.apart)
        ended = clock.now()
        self.record = after_success(self.record, result, fingerprint=fingerprint, at=ended)
        if result.mode is not MaintenanceMode.NONE:
            entry = MaintenanceEntry(
                result=MaintenanceOutcome.SUCCEEDED, start_timestamp=created, complete_timestamp=ended
            )
            self.entries = merge_history(self.entries, [entry])
        return result
