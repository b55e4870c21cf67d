"""A stand-in for the kopia repository of a Job's pod: its schedule, without data.

It writes what kopia writes, and the mover's own rules read it.
Source: kopia 0.23.1, repo/maintenance/maintenance_run.go and maintenance_schedule.go.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from core.contract import MaintenanceMode, MaintenanceResult
from datamover.kopia.maintenance import MaintenanceInfo, decide_mode

__all__ = ["Schedule", "seconds_of"]

_QUICK: Final = timedelta(hours=1)
_FULL: Final = timedelta(days=1)

_KEPT_RUNS: Final = 50
"""Of each task."""

_TASKS: Final = {
    MaintenanceMode.QUICK: ("advance-epoch",),
    MaintenanceMode.FULL: ("snapshot-gc", "advance-epoch", "cleanup-logs"),
}

_SECONDS: Final = {MaintenanceMode.NONE: 5.0, MaintenanceMode.QUICK: 20.0, MaintenanceMode.FULL: 90.0}


def seconds_of(mode: MaintenanceMode) -> float:
    """Return how long a pod takes for that."""
    return _SECONDS[mode]


@dataclass
class Schedule:
    """When each mode is due, and the runs of each task; `fulls` are the beginnings of full maintenance."""

    next_quick: datetime | None = None
    next_full: datetime | None = None
    runs: dict[str, list[datetime]] = field(default_factory=dict)
    fulls: list[datetime] = field(default_factory=list)

    def begin(self, now: datetime) -> MaintenanceMode:
        """Return what is due, and write when it is due again: kopia does that first."""
        mode = decide_mode(self._info, now, epochs=True).mode
        if mode is not MaintenanceMode.NONE:
            self.next_quick = now + _QUICK
        if mode is MaintenanceMode.FULL:
            self.next_full = now + _FULL
            self.fulls.append(now)
        return mode

    def finish(self, mode: MaintenanceMode, began: datetime) -> MaintenanceResult:
        """Record the tasks of a run that has ended, and return the result of its pod."""
        for task in _TASKS.get(mode, ()):
            self.runs[task] = [began, *self.runs.get(task, [])][:_KEPT_RUNS]
        info = self._info
        return MaintenanceResult(
            mode=mode,
            seconds=seconds_of(mode),
            full_interval_seconds=_FULL.total_seconds(),
            next_quick=info.next_quick,
            next_full=info.next_full,
            index_blobs=1,
        )

    @property
    def early_fulls(self) -> int:
        """How many full runs began less than the interval after the one before."""
        return sum(later - earlier < _FULL for earlier, later in zip(self.fulls, self.fulls[1:], strict=False))

    @property
    def _info(self) -> MaintenanceInfo:
        """What `maintenance info --json` would say."""
        due = {"nextQuickMaintenance": self.next_quick, "nextFullMaintenance": self.next_full}
        runs = {
            task: [{"start": start.isoformat(), "success": True} for start in starts]
            for task, starts in self.runs.items()
        }
        return MaintenanceInfo.from_wire(
            {
                "owner": "default@default",
                "quick": _cycle(_QUICK),
                "full": _cycle(_FULL),
                "schedule": {name: at.isoformat() for name, at in due.items() if at is not None} | {"runs": runs},
            }
        )


def _cycle(interval: timedelta) -> dict[str, object]:
    return {"enabled": True, "interval": interval // timedelta(microseconds=1) * 1000}
