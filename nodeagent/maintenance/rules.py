"""The rules of maintenance: when a repository is maintained, under which name, and with how much memory.

Pure functions over a frozen view. What runs, quick or full, is decided in the pod, which sees kopia's own schedule.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import chain, takewhile
from typing import Final, NamedTuple

from msgspec.structs import replace

from core.contract import FOREIGN_INTERVALS, MaintenanceMode
from core.kube.types import ResourceRequirements
from core.models.names import REPOSITORY_CREATED_ANNOTATION, REPOSITORY_ID_ANNOTATION
from core.models.storage import (
    FULL_INTERVAL_KEY,
    FULL_INTERVAL_SECONDS,
    BackupRepository,
    BackupStorageLocation,
    MaintenanceEntry,
    MaintenanceOutcome,
    RepositoryPhase,
)
from core.models.units import parse_duration
from nodeagent.config.windows import Window, is_open, next_start
from nodeagent.maintenance.record import FULLS_AFTER_CHANGE, MaintenanceRecord
from nodeagent.maintenance.restore_tests import without_future
from nodeagent.runtime.settings import MaintenanceSwitch

_SERVER_GONE: Final = timedelta(hours=1)
"""How long no server must have been seen: one that is replaced comes back."""

_FIRST_RETRY: Final = timedelta(minutes=5)
_MOST_DOUBLINGS: Final = 30

_REPORT_INTERVAL: Final = timedelta(days=7)

_IDLE: Final = timedelta(days=7)
"""The interval of full maintenance while nothing changes."""

_FULL_INTERVAL: Final = timedelta(days=1)
"""Until the repository's own is known. Source: kopia v0.23.1, repo/maintenance/maintenance_params.go."""

CLOCKS: Final = timedelta(minutes=15)
"""More than the clocks of a pod and of the leader may differ: beyond 5 minutes kopia refuses to run."""

_HISTORY: Final = 25
"""Entries of `status.recentMaintenance`, as with Velero 1.19."""

_LONGEST_NAME: Final = 63
"""Of a Job, whose name is the value of a label of its pod. Source: Kubernetes v1.34, validation of Jobs."""

_SHORTENED: Final = 28
_DIGEST_DIGITS: Final = 6

_MIB: Final = 2**20
_FIRST_QUICK_BYTES: Final = 128 * _MIB
_FIRST_FULL_BYTES: Final = 256 * _MIB


class Hold(StrEnum):
    """Why a repository is not maintained now."""

    OFF = "off"
    SERVER = "server"
    """A Velero server is in the namespace."""
    SERVER_SEEN = "server-seen"
    """One was there less than an hour ago, or this leader has not looked for as long."""
    JOB_UNFINISHED = "job-unfinished"
    NEVER_READY = "never-ready"
    LOCATION_MISSING = "location-missing"
    LOCATION_READ_ONLY = "location-read-only"
    LOCATION_UNAVAILABLE = "location-unavailable"
    FOREIGN = "foreign"
    """Another cluster or a person maintains it."""
    BLOCKED = "blocked"
    """The last attempt fails again until location, credentials or password change."""
    BACK_OFF = "back-off"
    IDLE = "idle"
    """Nothing has changed."""
    NOT_OBSERVED = "not-observed"
    """The leader's caches are behind its own writes."""
    NOT_DUE = "not-due"
    WINDOW = "window"
    CONCURRENCY = "concurrency"
    """As many Jobs run as may."""
    REJECTED = "rejected"
    """The API server rejects the pod of the Job, as a dry run shows: no rule here."""


@dataclass(frozen=True)
class MaintenanceView:
    """What the decision about one repository depends on, from reads made now.

    `created_at` is the BackupRepository's creation, `last_maintenance` its `status.lastMaintenanceTime`, and `entries`
    its `status.recentMaintenance`. `no_server_for` is how long this leader has looked without seeing a server.
    `ready_once`: the repository was Ready at some time. `inputs` is the hash of what decides whether it can be opened,
    `fingerprint` is of its finished backups. `job_unfinished`: a Job of the repository, ours or Velero's, has not
    ended. `running_jobs` are our Jobs that have not ended, of all repositories. `new_full_interval` is to be kopia's;
    None: it stays as it is.
    """

    now: datetime
    created_at: datetime
    frequency: timedelta
    last_maintenance: datetime | None = None
    entries: tuple[MaintenanceEntry, ...] = ()
    record: MaintenanceRecord = field(default_factory=MaintenanceRecord)
    fingerprint: str | None = None
    inputs: str | None = None
    switch: MaintenanceSwitch = MaintenanceSwitch.AUTO
    server: bool = False
    no_server_for: timedelta = _SERVER_GONE
    ready_once: bool = True
    location_hold: Hold | None = None
    job_unfinished: bool = False
    running_jobs: int = 0
    max_concurrent_jobs: int = 1
    windows: tuple[Window, ...] = ()
    new_full_interval: timedelta | None = None

    @property
    def full_interval(self) -> timedelta:
        """How often kopia's full maintenance is due."""
        return timedelta(seconds=self.record.full_interval_seconds or 0) or _FULL_INTERVAL


@dataclass(frozen=True)
class Decision:
    """Run now, or `hold`.

    `wait_until` is when time alone may end the hold; None: something else must change. `due_at` is when the
    maintenance is or was due; None: not known, since it would not run then either. `overdue`: it has been due for three
    full intervals. `may_be_full`: the pod may decide for a full one.
    """

    hold: Hold | None = None
    wait_until: datetime | None = None
    due_at: datetime | None = None
    overdue: bool = False
    may_be_full: bool = False


def find_location_hold(location: BackupStorageLocation | None) -> Hold | None:
    """Return why nothing can be written to the location now; a `location` of None does not exist."""
    if location is None:
        return Hold.LOCATION_MISSING
    if location.read_only:
        return Hold.LOCATION_READ_ONLY
    return None if location.available else Hold.LOCATION_UNAVAILABLE


def decide_maintenance(view: MaintenanceView) -> Decision:
    """Return whether the repository is maintained now, and if not, why, and until when."""
    view = _before_now(view)
    if (hold := _find_hold(view)) is not None:
        return hold
    due = _find_due(view)
    overdue = _is_overdue(view, due.at)
    if view.now < due.at:
        return Decision(due.hold, due.at, due.at)
    if not is_open(view.windows, view.now):
        return Decision(Hold.WINDOW, next_start(view.windows, view.now), due.at, overdue)
    if view.running_jobs >= view.max_concurrent_jobs:
        return Decision(Hold.CONCURRENCY, None, due.at, overdue)
    return Decision(None, None, due.at, overdue, may_be_full=_may_be_full(view))


def _before_now(view: MaintenanceView) -> MaintenanceView:
    """Return the view without times after now: a clock was wrong then, and would hold maintenance until them."""
    past, record = partial(without_future, latest=view.now + CLOCKS), view.record
    times = {name: past(getattr(record, name)) for name in ("at", "last_full", "last_failure", "foreign_at")}
    return changed(
        view,
        created_at=past(view.created_at) or view.now - view.frequency,
        last_maintenance=past(view.last_maintenance),
        entries=tuple(entry for entry in view.entries if past(entry.start_timestamp) == entry.start_timestamp),
        record=replace(record, **times),
    )


def _is_overdue(view: MaintenanceView, due_at: datetime) -> bool:
    return view.now - due_at >= FOREIGN_INTERVALS * view.full_interval


def _find_hold(view: MaintenanceView) -> Decision | None:
    """Return what forbids maintenance, due or not; None: nothing."""
    auto = view.switch is MaintenanceSwitch.AUTO
    if view.switch is MaintenanceSwitch.OFF:
        return Decision(Hold.OFF)
    if view.server:
        return Decision(Hold.SERVER)
    if view.job_unfinished:
        # It may be one for ever: the pod of a lost node stays.
        due_at = _find_due(view).at
        return Decision(Hold.JOB_UNFINISHED, None, due_at, _is_overdue(view, due_at))
    if auto and view.no_server_for < _SERVER_GONE:
        return Decision(Hold.SERVER_SEEN, view.now + _SERVER_GONE - view.no_server_for)
    if not view.ready_once:
        return Decision(Hold.NEVER_READY)
    if view.location_hold is not None:
        return Decision(view.location_hold)
    return _find_recorded_hold(view)


def _find_recorded_hold(view: MaintenanceView) -> Decision | None:
    """Return what the last runs say that forbids another one."""
    record, until = view.record, _foreign_until(view)
    if view.switch is MaintenanceSwitch.AUTO and until is not None and view.now < until:
        return Decision(Hold.FOREIGN, until)
    # Without a time, it was blocked by a clock that was wrong.
    if record.blocked_inputs and record.blocked_inputs == view.inputs and record.last_failure is not None:
        # What was corrected may be out of sight, such as the owner.
        again = record.last_failure + _IDLE
        if view.now < again:
            # By the last success: each attempt that fails again would seem to make it due later.
            due_at = _find_due(changed(view, entries=(), record=replace(record, last_failure=None))).at
            return Decision(Hold.BLOCKED, again, due_at, _is_overdue(view, due_at))
    return None


def _foreign_until(view: MaintenanceView) -> datetime | None:
    """Return until when another cluster's maintenance holds ours; None: there was none."""
    foreign_at = view.record.foreign_at
    return None if foreign_at is None else foreign_at + FOREIGN_INTERVALS * view.full_interval


class _Due(NamedTuple):
    """When a maintenance is due, and why it is not before."""

    at: datetime
    hold: Hold


def _find_due(view: MaintenanceView) -> _Due:
    earliest = (view.last_maintenance or view.created_at) + view.frequency
    if view.record.at is not None:
        # A run that had nothing to do moves no time of the status; and those are by other clocks.
        earliest = max(earliest, view.record.at + view.frequency)
    if (retry_at := _retry_at(view)) is not None:
        return _Due(max(earliest, retry_at), Hold.BACK_OFF if retry_at > earliest else Hold.NOT_DUE)
    record = view.record
    if record.at is None:
        return _Due(earliest, Hold.NOT_DUE)
    began = record.at - timedelta(seconds=record.seconds)
    idle_until = max(earliest, (record.last_full or record.at) + _IDLE)
    wanted: list[datetime] = []
    changed, none = view.fingerprint != record.fingerprint, record.mode is MaintenanceMode.NONE
    # A run that was held for another cluster ran nothing, whatever is enabled.
    held = none and began < (_foreign_until(view) or began)
    if changed:
        wanted.append(_when_enabled(record.next_quick, began, ran=held or not none))
    if changed or record.fulls_since_change < FULLS_AFTER_CHANGE:
        wanted.append(_when_enabled(record.next_full, began, ran=held or record.mode is MaintenanceMode.FULL))
    if view.new_full_interval not in (None, view.full_interval):
        wanted.append(earliest)
    soon = max(earliest, min(wanted, default=idle_until))
    return _Due(soon, Hold.NOT_DUE) if soon < idle_until else _Due(idle_until, Hold.IDLE)


def _when_enabled(next_at: datetime | None, began: datetime, *, ran: bool) -> datetime:
    """Return when that mode of maintenance is due by kopia's schedule: not before a week, if it is not enabled.

    It is not, if it was due when the last run `began`, and was not what `ran`.
    """
    if next_at is None:
        return began
    return next_at if ran or next_at > began - CLOCKS else began + _IDLE


def _retry_at(view: MaintenanceView) -> datetime | None:
    """Return when to try again after the attempts that failed; None: the last one succeeded, or there was none."""
    record = view.record
    # The leader's own time counts, too, where the API server's clock is ahead of it.
    failures = count_failures(view.entries) or int(record.last_failure is not None)
    if not failures:
        return None
    times = [(entry.start_timestamp, entry.complete_timestamp) for entry in view.entries[-1:]]
    moments = [moment for moment in (*chain(*times), record.last_failure) if moment]
    delay = view.frequency if record.retry_at_frequency else retry_delay(failures, view.frequency)
    return max(moments) + delay if moments else view.now


def retry_delay(failures: int, longest: timedelta) -> timedelta:
    """Return the delay after that many failures in a row: 5 minutes, then twice as long each time."""
    delay: timedelta = _FIRST_RETRY * 2 ** min(failures - 1, _MOST_DOUBLINGS)
    return min(delay, longest)


def _may_be_full(view: MaintenanceView) -> bool:
    """Return whether the pod may find a full maintenance due, or one that did not finish."""
    next_full = view.record.next_full
    return bool(count_failures(view.entries)) or next_full is None or next_full <= view.now + CLOCKS


def is_full_incomplete(record: MaintenanceRecord, entries: tuple[MaintenanceEntry, ...]) -> bool:
    """Return whether a full maintenance has begun and none has finished since, as far as is known.

    kopia begins with the one that is due, so an attempt that failed after that time was a full one.
    """
    if not count_failures(entries):
        return record.incomplete_full
    began = entries[-1].start_timestamp
    return record.incomplete_full or (record.next_full is not None and began is not None and began >= record.next_full)


def is_report_due(record: MaintenanceRecord, now: datetime) -> bool:
    """Return whether the next maintenance is to report the snapshots that nothing refers to."""
    reported_at = without_future(record.reported_at, now + CLOCKS)
    return reported_at is None or now - reported_at >= _REPORT_INTERVAL


def count_failures(entries: tuple[MaintenanceEntry, ...]) -> int:
    """Return how many of the last attempts failed in a row, as far as the history shows them."""
    failed = takewhile(lambda entry: entry.result is MaintenanceOutcome.FAILED, reversed(entries))
    return sum(1 for _ in failed)


def merge_history(entries: Iterable[MaintenanceEntry], new: Iterable[MaintenanceEntry]) -> tuple[MaintenanceEntry, ...]:
    """Return the history with the `new` entries, which replace those with the same start; oldest first, 25 at most.

    The newest others stay: a clock that was wrong may have left later ones than the new entries.
    Only a success has a completion: a Velero server would take a failure's for the last maintenance.
    Source: Velero v1.18, consolidateHistory in pkg/controller/backup_repository_controller.go.
    """
    added: dict[datetime | None, MaintenanceEntry] = {}
    for entry in new:
        succeeded = entry.result is MaintenanceOutcome.SUCCEEDED
        change = {"message": None} if succeeded else {"complete_timestamp": None}
        added[entry.start_timestamp] = replace(entry, **change)
    # One without a start is of no use to anybody.
    others = {start: entry for entry in entries if (start := entry.start_timestamp) is not None and start not in added}
    kept = sorted(others)[max(0, len(others) + len(added) - _HISTORY) :]
    merged = {start: others[start] for start in kept} | added
    return tuple(merged[start] for start in sorted(filter(None, merged))[-_HISTORY:])


def slot_of(now: datetime, frequency: timedelta, uid: str) -> int:
    """Return when the slot of `now` began, in milliseconds since 1970, in whole seconds.

    A slot is as long as `frequency`. Two leaders in one slot give their Jobs the same name, so that one is rejected.
    Slots of repositories with different UIDs begin at different times.
    """
    length = max(1, int(frequency.total_seconds()))
    offset = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8]) % length
    return ((int(now.timestamp()) - offset) // length * length + offset) * 1000


def job_name(repository: str, slot_ms: int, failures: int, taken: Collection[str] = ()) -> str:
    """Return the name of the Job of an attempt, which follows that many `failures` in a row, or a later one's.

    No Job that exists has it: their names are `taken`.
    """
    ending = f"-maintain-job-{slot_ms + failures}"
    if len(repository) + len(ending) > _LONGEST_NAME:
        digest = hashlib.sha256(repository.encode()).hexdigest()[:_DIGEST_DIGITS]
        repository = f"{repository[:_SHORTENED].rstrip('.-')}-{digest}"
    name = f"{repository}{ending}"
    return job_name(repository, slot_ms, failures + 1, taken) if name in taken else name


class Memory(NamedTuple):
    """The memory of a Job's container; `too_small`: an attempt was out of memory, and none gets more."""

    request_bytes: int
    limit_bytes: int
    too_small: bool

    @property
    def resources(self) -> ResourceRequirements:
        """The `resources` of the container."""
        return {
            "requests": {"memory": f"{-(-self.request_bytes // _MIB)}Mi"},
            "limits": {"memory": f"{-(-self.limit_bytes // _MIB)}Mi"},
        }


def decide_memory(record: MaintenanceRecord, *, may_be_full: bool, most_bytes: int) -> Memory:
    """Return the memory of the next attempt, by the peaks of earlier ones; `most_bytes` is the highest limit.

    After an attempt that was out of memory, the limit is twice its own.
    """
    request = _request_bytes(record.peak_quick_bytes, _FIRST_QUICK_BYTES)
    if may_be_full:
        request = max(request, _request_bytes(record.peak_full_bytes, _FIRST_FULL_BYTES))
    wanted = record.memory_bytes or 0
    limit = min(max(2 * request, wanted), most_bytes)
    return Memory(min(max(request, limit // 2), limit), limit, too_small=wanted > most_bytes)


def _request_bytes(peak_bytes: int, first_bytes: int) -> int:
    return peak_bytes * 13 // 10 if peak_bytes else first_bytes


DEFAULT_FREQUENCY: Final = timedelta(hours=1)
"""As a Velero server sets it for kopia. Source: tests/recordings/velero-1.18.2/backuprepository.json."""


def record_of(repository: BackupRepository) -> MaintenanceRecord:
    """Return the record in the repository's annotation; an invalid one counts as none."""
    return MaintenanceRecord.from_annotations(repository.metadata.annotations) or MaintenanceRecord()


def was_ready(repository: BackupRepository) -> bool:
    """Return whether the repository was Ready at some time."""
    meta, status = repository.metadata, repository.status
    ready = status.last_maintenance_time is not None or status.phase is RepositoryPhase.READY
    return ready or REPOSITORY_ID_ANNOTATION in meta.annotations


def frequency_of(repository: BackupRepository) -> timedelta:
    """Return how often maintenance may run; an hour if that is invalid or not positive."""
    try:
        frequency = parse_duration(repository.spec.maintenance_frequency)
    except ValueError:
        return DEFAULT_FREQUENCY
    return frequency if frequency > timedelta() else DEFAULT_FREQUENCY


def full_interval_of(repository: BackupRepository) -> timedelta | None:
    """Return the interval that a repository of ours gets; None: the one of any other is left as it is."""
    wanted = repository.spec.repository_config.get(FULL_INTERVAL_KEY, "")
    if repository.metadata.annotations.get(REPOSITORY_CREATED_ANNOTATION) != "true" or not wanted:
        return None
    seconds = FULL_INTERVAL_SECONDS.get(wanted)
    return timedelta(seconds=seconds) if seconds else None


def view_of(repository: BackupRepository, now: datetime) -> MaintenanceView:
    """Return the view of a decision, with what the repository says; the rest has its defaults."""
    meta, status = repository.metadata, repository.status
    return MaintenanceView(
        now=now,
        created_at=meta.creation_timestamp or now,
        frequency=frequency_of(repository),
        last_maintenance=status.last_maintenance_time,
        entries=tuple(status.recent_maintenance),
        record=record_of(repository),
        ready_once=was_ready(repository),
        new_full_interval=full_interval_of(repository),
    )
