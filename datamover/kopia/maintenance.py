"""kopia's maintenance of a repository: what its schedule says, which mode is due, whether a run left its evidence.

Source: kopia 0.23.1, repo/maintenance/maintenance_run.go and maintenance_schedule.go, cli/command_maintenance_info.go.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from msgspec import field, structs

from core.contract import MaintenanceCause, MaintenanceMode
from core.errors import ContractError, DataPathError, Translated
from core.models.base import Int64, SparseModel, Time, WireModel, format_time
from core.models.storage import FULL_INTERVAL_KEY, FULL_INTERVAL_SECONDS
from datamover.kopia.causes import find_maintenance_cause
from datamover.kopia.creation import OWN_MAINTENANCE
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository

_logger = logging.getLogger(__name__)

_SNAPSHOT_GC: Final = "snapshot-gc"
_ADVANCE_EPOCH: Final = "advance-epoch"
_CLEANUP_LOGS: Final = "cleanup-logs"

_VERIFY: Final = {"KOPIA_MAINTENANCE_CONTENT_VERIFY_PERCENTAGE": "100"}
"""Before and after each task that changes indexes or packs, each entry of the index must find its pack in the bucket.
Source: kopia 0.23.1, repo/maintenance/content_index_to_pack_check.go."""

_FIRST_YEAR: Final = 1970
_MICROSECOND_NANOSECONDS: Final = 1000
_CLOCKS: Final = timedelta(minutes=15)
"""More than two clocks differ: what began later than that in the future, began by one that was wrong."""

_ROUNDING: Final = timedelta(milliseconds=1)
"""Times have nanoseconds in kopia and microseconds here."""

_TOTALS: Final = re.compile(r"^(Count|Total): (\d+)$", re.MULTILINE)
"""Source: kopia 0.23.1, cli/command_blob_stats.go and cli/command_content_stats.go."""

_LONGEST_RUN: Final = timedelta(hours=6)
"""The deadline of a Job, if none is configured: what began earlier is taken for a run that was interrupted. No longer,
since a changed interval shows another beginning than the last run's."""


class MaintenanceError(DataPathError):
    """Maintenance may not run, failed, or left no evidence; the first line is the cause."""


class _Cycle(WireModel):
    """How often a mode is due, in nanoseconds."""

    enabled: bool = False
    interval: Int64 = 0

    @property
    def duration(self) -> timedelta:
        return timedelta(microseconds=self.interval // _MICROSECOND_NANOSECONDS)


class _TaskRun(SparseModel):
    """One run of a task, which is recorded when it ends."""

    start: Time
    success: bool = False
    error: str | None = None


class _Schedule(WireModel):
    """When each mode is due next, written when one begins; the runs of each task, from newest to oldest."""

    next_full_maintenance: Time | None = None
    next_quick_maintenance: Time | None = None
    runs: dict[str, tuple[_TaskRun, ...]] = field(default_factory=dict)


class MaintenanceInfo(SparseModel):
    """The answer of `maintenance info --json`."""

    owner: str | None = None
    quick: _Cycle = field(default_factory=_Cycle)
    full: _Cycle = field(default_factory=_Cycle)
    schedule: _Schedule = field(default_factory=_Schedule)

    @property
    def next_quick(self) -> datetime | None:
        """When quick maintenance is due; None if it never began."""
        return _began_once(self.schedule.next_quick_maintenance)

    @property
    def next_full(self) -> datetime | None:
        """When full maintenance is due; None if it never began."""
        return _began_once(self.schedule.next_full_maintenance)

    def begun(self, now: datetime) -> list[datetime]:
        """Return when the last run of each mode began, if it may still run: kopia records a task when it ends."""
        modes = ((self.next_quick, self.quick), (self.next_full, self.full))
        starts = [due - mode.duration for due, mode in modes if due is not None and mode.enabled]
        return [start for start in starts if now - _LONGEST_RUN <= start <= now]

    def before(self, now: datetime) -> Self:
        """Return it without the runs that a clock has recorded in the future."""
        runs = {
            task: tuple(one for one in some if one.start <= now + _CLOCKS) for task, some in self.schedule.runs.items()
        }
        return structs.replace(self, schedule=structs.replace(self.schedule, runs=runs))

    def succeeded_since(self, task: str, moment: datetime) -> bool:
        """Return whether a run of the task succeeded that started at `moment` or later."""
        return any(run.success and run.start >= moment - _ROUNDING for run in self.schedule.runs.get(task, ()))

    def errors_since(self, moment: datetime) -> list[str]:
        """Return the task and error of each run that failed and started at `moment` or later."""
        return [
            f"{task}: {run.error or 'no success'}"
            for task, runs in sorted(self.schedule.runs.items())
            for run in runs
            if not run.success and run.start >= moment - _ROUNDING
        ]


def _began_once(moment: datetime | None) -> datetime | None:
    """Return `moment`, but None for Go's zero time."""
    return None if moment is None or moment.year < _FIRST_YEAR else moment


class ModeDecision(NamedTuple):
    """The mode that is to run, and why."""

    mode: MaintenanceMode
    reason: str


def decide_mode(info: MaintenanceInfo, now: datetime, *, epochs: bool) -> ModeDecision:
    """Return the mode that is due, or whose last run did not finish: full, else quick, else none.

    kopia writes the next due times when a run begins, so they say nothing about its end. `epochs`: the indexes are in
    some.
    """
    cycles = (
        (MaintenanceMode.FULL, info.full, info.next_full, _CLEANUP_LOGS),
        (MaintenanceMode.QUICK, info.quick, info.next_quick, _last_quick_task(epochs=epochs)),
    )
    waiting = []
    for mode, cycle, due, last_task in cycles:
        if not cycle.enabled:
            waiting.append(f"{mode} maintenance is disabled")
        elif due is None:
            return ModeDecision(mode, f"{mode} maintenance never ran")
        elif now >= due:
            return ModeDecision(mode, f"{mode} maintenance is due since {format_time(due)}")
        elif _is_unfinished(info, cycle, due, last_task):
            return ModeDecision(mode, f"the last {mode} maintenance did not finish")
        elif due - cycle.duration > now + _CLOCKS:
            return ModeDecision(mode, f"{mode} maintenance is due at {format_time(due)}, by a clock that was wrong")
        else:
            waiting.append(f"{mode} maintenance is due at {format_time(due)}")
    return ModeDecision(MaintenanceMode.NONE, f"nothing is due: {', '.join(waiting)}")


def _is_unfinished(info: MaintenanceInfo, cycle: _Cycle, due: datetime, last_task: str) -> bool:
    """Return whether the run after which the next one is `due` has not come to its last task."""
    return not info.succeeded_since(last_task, due - cycle.duration)


def is_full_unfinished(info: MaintenanceInfo) -> bool:
    """Return whether the last full maintenance has begun and not finished."""
    return info.next_full is not None and _is_unfinished(info, info.full, info.next_full, _CLEANUP_LOGS)


def _last_quick_task(*, epochs: bool) -> str:
    return _ADVANCE_EPOCH if epochs else _CLEANUP_LOGS


def find_missing_evidence(
    info: MaintenanceInfo, mode: MaintenanceMode, began: datetime, now: datetime, *, epochs: bool
) -> str | None:
    """Return what the schedule lacks for a success of a run that began then; None: nothing."""
    info = info.before(now)
    if errors := info.errors_since(began):
        return "; ".join(errors)
    full = mode is MaintenanceMode.FULL
    wanted = (_SNAPSHOT_GC, _CLEANUP_LOGS) if full else (_last_quick_task(epochs=epochs),)
    missing = [task for task in wanted if not info.succeeded_since(task, began)]
    return f"kopia exited with code 0, without a success of {', '.join(missing)}" if missing else None


def parse_full_interval(config: Mapping[str, str]) -> timedelta | None:
    """Return the full interval in a BackupRepository's `repositoryConfig`; log a warning if it is invalid."""
    text = config.get(FULL_INTERVAL_KEY, "")
    seconds = FULL_INTERVAL_SECONDS.get(text)
    if text and seconds is None:
        _logger.warning("%s is none of %s: ignored", FULL_INTERVAL_KEY, ", ".join(FULL_INTERVAL_SECONDS))
    return None if seconds is None else timedelta(seconds=seconds)


class Span(NamedTuple):
    """From when to when a Job of this cluster may have run maintenance."""

    start: datetime
    end: datetime


def find_foreign_run(info: MaintenanceInfo, known: Sequence[Span], now: datetime) -> datetime | None:
    """Return the start of the newest run outside of all spans, also of one in progress; None: there is none.

    Whose runs were before the oldest span is not known, because histories are limited. Without any span, each counts,
    but none of the future: a wrong clock would hold maintenance until then.
    """
    oldest = min((span.start for span in known), default=datetime.min.replace(tzinfo=UTC))
    recorded = (run.start for runs in info.before(now).schedule.runs.values() for run in runs)
    foreign = (
        start
        for start in (*recorded, *info.begun(now))
        if start >= oldest and not any(span.start <= start <= span.end for span in known)
    )
    return max(foreign, default=None)


class BucketSize(NamedTuple):
    """The blobs of a repository, and their bytes."""

    blobs: int
    bytes: int


class Maintenance:
    """Runs kopia's maintenance in one repository, and reads what it recorded there.

    Each method but `run` raises a KopiaError if kopia fails, or if its output has another form.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._clock = repository.watchdog.clock

    async def read_info(self) -> MaintenanceInfo:
        """Return kopia's parameters and schedule of maintenance."""
        answer = (await self._call("maintenance", "info", "--json")).check()
        with Translated(ContractError, answer.error, "kopia's output is invalid"):
            return MaintenanceInfo.from_wire(answer.document())

    async def own(self) -> None:
        """Make the identity of Velero and of these agents the owner."""
        (await self._call(*OWN_MAINTENANCE)).check()

    async def set_full_interval(self, interval: timedelta) -> None:
        """Set how often full maintenance is due."""
        seconds = round(interval.total_seconds())
        (await self._call("maintenance", "set", f"--full-interval={seconds}s")).check()

    async def run(self, mode: MaintenanceMode, *, epochs: bool, verify: bool = False) -> MaintenanceInfo:
        """Run maintenance, and return what kopia recorded; `verify`: check before that no pack is missing.

        Raises:
            MaintenanceError: it failed, or there is no evidence that it succeeded.
        """
        began: list[datetime] = []
        arguments = ("maintenance", "run", *(["--full"] if mode is MaintenanceMode.FULL else []))

        async def attempt() -> KopiaAnswer:
            # An attempt that could not open the repository recorded nothing.
            began[:] = [self._clock.now()]
            attempted, more = self._attempted("maintenance"), _VERIFY if verify else {}
            return await self._repository.call_guarded(attempted, *arguments, more=more)

        answer = await self._repository.run(attempt)
        if answer.out_of_memory:
            raise _failure(answer, f"{MaintenanceCause.OUT_OF_MEMORY}: {answer.exit_status}")
        if not answer.succeeded:
            raise _failure(answer, find_maintenance_cause(answer.lines) or answer.exit_status)
        if not answer.mentions(f"Finished {mode} maintenance"):
            # kopia says nothing then, and exits with code 0.
            raise _failure(answer, f"{MaintenanceCause.LOCKED}: another kopia of this pod holds the maintenance lock")
        info = await self.read_info()
        if missing := find_missing_evidence(info, mode, began[0], self._clock.now(), epochs=epochs):
            raise _failure(answer, f"{MaintenanceCause.NOT_RECORDED}: {missing}")
        return info

    async def measure_bucket(self) -> BucketSize:
        """Return the size of the repository in the bucket, by listing it."""
        answer = (await self._call("blob", "stats", "--raw")).check()
        totals = _read_totals(answer)
        return BucketSize(totals["Count"], totals["Total"])

    async def count_contents(self) -> int:
        """Return the number of contents that are not deleted."""
        return _read_totals((await self._call("content", "stats", "--raw")).check())["Count"]

    async def count_index_blobs(self) -> int:
        """Return the number of index blobs that are read to open the repository."""
        answer = (await self._call("index", "list", "--json")).check()
        listed = answer.json()
        if not isinstance(listed, list):
            raise answer.error("kopia's output is not a list")
        return len(listed)

    def _attempted(self, what: str) -> str:
        return f"{self._repository.description}: {what}"

    async def _call(self, *arguments: str) -> KopiaAnswer:
        return await self._repository.call(self._attempted(" ".join(arguments[:2])), *arguments)


def _read_totals(answer: KopiaAnswer) -> dict[str, int]:
    """Return the numbers of `Count` and `Total`; those that are not in the output are 0."""
    found = {name: int(number) for name, number in _TOTALS.findall(answer.output.decode(errors="replace"))}
    if "Count" not in found:
        raise answer.error("no count in kopia's output")
    return {"Total": 0} | found


def _failure(answer: KopiaAnswer, cause: str) -> MaintenanceError:
    return MaintenanceError("\n".join([cause, *answer.shown_lines]))
