"""What the next maintenance of a repository depends on, kept in an annotation of its BackupRepository.

Pure: the annotation is read and written elsewhere. Whatever the annotation holds, it only decides when a maintenance
runs and how much memory it gets; the history is in the BackupRepository's status.
"""

from datetime import datetime
from enum import Enum, auto
from typing import ClassVar, Final

from msgspec.structs import replace

from core.contract import MaintenanceMode, MaintenanceResult
from core.models.base import Int64, SparseModel, Time
from core.models.names import MAINTENANCE_ANNOTATION
from core.snapshot_contract import SnapshotTotal

FULLS_AFTER_CHANGE: Final = 4
"""How many full maintenances must succeed after a deletion, until its space is free and there is no more to do.

Source: kopia v0.23.1, repo/maintenance/maintenance_safety.go: each step waits for the one before to be older.
"""


class FailureCause(Enum):
    """What a failed maintenance means for the next one."""

    OTHER = auto()
    NEEDS_CHANGE = auto()
    """Fails again until location, credentials or password change: a wrong password, another owner or unique ID."""
    CLOCK_SKEW = auto()
    OUT_OF_MEMORY = auto()


class RunningJob(SparseModel, omit_defaults=True):
    """The Job that was started last.

    `fingerprint` is of the finished backups before it began, and `inputs` the hash of what decided then whether
    the repository could be opened.
    """

    name: str
    uid: str
    created: Time
    fingerprint: str | None = None
    inputs: str | None = None


class MaintenanceRecord(SparseModel, omit_defaults=True):
    """The facts about one repository. By default there are none: the leader has not maintained it yet.

    `at` is when the last run that succeeded ended, `mode` what it ran, and `seconds` how long; `at` and `last_failure`
    are by the leader's clock. `fingerprint` is of the finished backups when it began, `fulls_since_change` how many
    full ones have succeeded since that changed. `next_quick`, `next_full` and `full_interval_seconds` are kopia's.
    `foreign_at` is when another cluster or a person last maintained it. `memory_bytes` is the memory limit of the next
    attempt after one that was out of memory; None: by the peaks. `blocked_inputs` is the hash of what a failure depends
    on that needs a change. `retry_at_frequency`: the last attempt found a wrong clock. `incomplete_full`: the last full
    maintenance did not finish. Snapshots were last reported at `reported_at`; nothing refers to `orphans`; None: not
    known. `running` is the Job whose end is not stored yet.
    """

    annotation: ClassVar[str] = MAINTENANCE_ANNOTATION

    at: Time | None = None
    mode: MaintenanceMode = MaintenanceMode.NONE
    seconds: float = 0.0
    fingerprint: str | None = None
    fulls_since_change: Int64 = 0
    last_full: Time | None = None
    next_quick: Time | None = None
    next_full: Time | None = None
    full_interval_seconds: float | None = None
    foreign_at: Time | None = None
    contents: Int64 | None = None
    index_blobs: Int64 | None = None
    peak_quick_bytes: Int64 = 0
    peak_full_bytes: Int64 = 0
    memory_bytes: Int64 | None = None
    last_failure: Time | None = None
    blocked_inputs: str | None = None
    retry_at_frequency: bool = False
    incomplete_full: bool = False
    reported_at: Time | None = None
    orphans: SnapshotTotal | None = None
    running: RunningJob | None = None


def after_success(
    record: MaintenanceRecord, result: MaintenanceResult, *, fingerprint: str | None, at: datetime
) -> MaintenanceRecord:
    """Return the record after a maintenance that ended `at` a time by the leader's clock.

    `fingerprint` is of the finished backups before it began.
    """
    facts = replace(
        record,
        at=at,
        mode=result.mode,
        seconds=result.seconds,
        next_quick=result.next_quick,
        next_full=result.next_full,
        full_interval_seconds=result.full_interval_seconds or record.full_interval_seconds,
        foreign_at=max(filter(None, (record.foreign_at, result.foreign_at)), default=None),
        contents=record.contents if result.contents is None else result.contents,
        index_blobs=record.index_blobs if result.index_blobs is None else result.index_blobs,
        last_failure=None,
        blocked_inputs=None,
        retry_at_frequency=False,
        incomplete_full=result.incomplete_full,
    )
    if (report := result.report) is not None:
        facts = replace(facts, reported_at=at, orphans=None if report.unread else report.unreferenced)
    if result.mode is MaintenanceMode.NONE:
        # What has changed is still to be maintained.
        return facts
    fulls = record.fulls_since_change if fingerprint == record.fingerprint else 0
    ran = replace(facts, fingerprint=fingerprint, fulls_since_change=fulls, memory_bytes=None)
    if result.mode is MaintenanceMode.QUICK:
        return replace(ran, peak_quick_bytes=result.peak_bytes or record.peak_quick_bytes)
    return replace(
        ran,
        # No more are counted: the annotation of an idle repository would change with each.
        fulls_since_change=min(fulls + 1, FULLS_AFTER_CHANGE),
        last_full=at,
        peak_full_bytes=result.peak_bytes or record.peak_full_bytes,
    )


def after_failure(
    record: MaintenanceRecord, cause: FailureCause, *, inputs: str | None, limit_bytes: int | None, at: datetime
) -> MaintenanceRecord:
    """Return the record after a maintenance that failed `at` a time by the leader's clock.

    `inputs` is the hash of what decided whether the repository could be opened, if it is known. `limit_bytes` is the
    memory limit that the attempt had; None: none, or it is not known.
    """
    out_of_memory = cause is FailureCause.OUT_OF_MEMORY
    return replace(
        record,
        last_failure=at,
        blocked_inputs=inputs if cause is FailureCause.NEEDS_CHANGE else None,
        retry_at_frequency=cause is FailureCause.CLOCK_SKEW,
        memory_bytes=2 * limit_bytes if out_of_memory and limit_bytes else record.memory_bytes,
    )
