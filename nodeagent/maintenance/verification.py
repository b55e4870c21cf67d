"""The verification of a repository by the leader: what was read when, what is due now, and what a Job has found.

Pure. All that a repository has is read once in a period, in fixed shares (`core.models.verification`): each share again
shortly before its last reading is a period old. The record is kept in an annotation of the BackupRepository, so that
another leader goes on from there, and a snapshot is proven once each share was read after it was complete.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar, Final, Self

from msgspec import field as wire_field
from msgspec.structs import replace

from core.models.base import Int64, Time
from core.models.names import VERIFICATION_ANNOTATION
from core.models.storage import BackupRepository
from core.models.verification import SHARES, Verification, VerificationOutcome, VerifiedShare, VerifiedSnapshot
from core.text import some_of
from nodeagent.config.windows import VerificationPlan, Window, is_open, longest_pause, next_start
from nodeagent.maintenance.restore_tests import NEVER, JobTrack, RestoreTests
from nodeagent.maintenance.rules import CLOCKS, Decision, Hold, retry_delay

_NAME_CHARACTERS: Final = 40
_DIGEST_DIGITS: Final = 8

_MOST_DAMAGED: Final = 10
_MOST_COPIES: Final = 3
_FAULT_CHARACTERS: Final = 200
"""The annotation has a few kilobytes at most."""


class RepositoryVerification(JobTrack, omit_defaults=True):
    """What is known of one repository; by default nothing was read yet.

    `at` is the end of the last Job that found something out, by the leader's clock, and `outcome` what it found.
    `shares` has when the Job was created that read each share last, by its number. `damaged` names the first volumes
    with a damaged copy, which the Job of `damaged_at` found. `memory_bytes` is the memory limit of Jobs after
    one that was out of memory. `restore_tests` are of other Jobs; None: there was none.
    """

    annotation: ClassVar[str] = VERIFICATION_ANNOTATION

    at: Time | None = None
    outcome: VerificationOutcome | None = None
    shares: dict[str, Time] = wire_field(default_factory=dict)
    damaged_at: Time | None = None
    damaged: list[str] = wire_field(default_factory=list)
    memory_bytes: Int64 | None = None
    restore_tests: RestoreTests | None = None

    @property
    def tests(self) -> RestoreTests:
        """What is known of the restore tests."""
        return self.restore_tests or RestoreTests()

    @property
    def read_at(self) -> list[datetime | None]:
        """When each share was read last; None: never."""
        return [self.shares.get(str(share)) for share in range(SHARES)]

    @property
    def proven_at(self) -> datetime | None:
        """When all of it was read: what was complete then is proven. None: not all has been read yet."""
        read = [at for at in self.read_at if at is not None]
        return min(read) if len(read) == SHARES else None

    def before(self, latest: datetime) -> Self:
        """Return the record without times after `latest`: a clock was wrong then, and would hold verification.

        Damage that was found then stays until all was read again.
        """
        return replace(
            super().before(latest),
            shares={share: at for share, at in self.shares.items() if at <= latest},
            damaged_at=self.damaged_at and min(self.damaged_at, latest),
            restore_tests=self.restore_tests and self.restore_tests.before(latest),
        )


def verification_of(repository: BackupRepository) -> RepositoryVerification:
    """Return the record in the repository's annotation; an invalid one counts as none."""
    return RepositoryVerification.from_annotations(repository.metadata.annotations) or RepositoryVerification()


@dataclass(frozen=True)
class VerificationView:
    """What the decision about one repository depends on.

    `has_backups`: a completed backup may refer to it. `job_unfinished`: a Job of either kind has not ended. `windows`
    are maintenance's.
    """

    now: datetime
    plan: VerificationPlan
    record: RepositoryVerification = field(default_factory=RepositoryVerification)
    has_backups: bool = True
    ready_once: bool = True
    location_hold: Hold | None = None
    job_unfinished: bool = False
    running_jobs: int = 0
    max_concurrent_jobs: int = 1
    windows: tuple[Window, ...] = ()

    @property
    def all_windows(self) -> tuple[Window, ...]:
        """When reading may begin; none: always."""
        return self.plan.windows or self.windows

    @property
    def opportunities(self) -> tuple[Window, ...]:
        """What begins when reading may begin; none: always."""
        return (self.plan.starts,) if self.plan.starts is not None else self.all_windows


def decide_verification(view: VerificationView) -> Decision:
    """Return whether shares of the repository are read now, and if not, why, and until when."""
    record, plan, now = view.record, view.plan, view.now

    def is_due() -> bool:
        last = record.succeeded
        # What was never read is spread over the period, unless there is a schedule.
        early = plan.starts is None and last is not None and record.proven_at is None
        too_soon = early and last is not None and now < last + plan.period / SHARES
        return bool(choose_shares(view)) and not too_soon and _has_begun(plan, last, now)

    return _decide(view, record, is_due)


def decide_restore_test(view: VerificationView) -> Decision:
    """Return whether a volume of the repository is restored now, and if not, why, and until when."""
    tests, plan = view.record.tests, view.plan
    if not plan.restore_test:
        return Decision(Hold.OFF)

    def is_due() -> bool:
        late = tests.at is None or tests.at + plan.period < _begins_again(view)
        return late and _has_begun(plan, tests.succeeded, view.now)

    return _decide(view, tests, is_due)


def _decide(view: VerificationView, last: JobTrack, is_due: Callable[[], bool]) -> Decision:
    """Return whether a Job of one kind begins, after the `last` ones of its kind."""
    if view.job_unfinished:
        return Decision(Hold.JOB_UNFINISHED)
    if not view.has_backups:
        return Decision(Hold.IDLE)
    if not view.ready_once:
        return Decision(Hold.NEVER_READY)
    # What is read-only can be read.
    if view.location_hold not in {None, Hold.LOCATION_READ_ONLY}:
        return Decision(view.location_hold)
    if last.failures and last.failed_at is not None:
        retry_at = last.failed_at + retry_delay(last.failures, view.plan.period / SHARES)
        if view.now < retry_at:
            return Decision(Hold.BACK_OFF, retry_at)
    if not is_due():
        return Decision(Hold.NOT_DUE)
    if not is_open(view.all_windows, view.now):
        return Decision(Hold.WINDOW, next_start(view.all_windows, view.now))
    if view.running_jobs >= view.max_concurrent_jobs:
        return Decision(Hold.CONCURRENCY)
    return Decision()


def choose_shares(view: VerificationView) -> tuple[int, ...]:
    """Return the shares that a Job may read now: those never read, then the oldest that would not keep the period.

    These are the ones whose last reading will be a period old when reading may next begin.
    """
    again, read = _begins_again(view), enumerate(view.record.read_at)
    chosen = [(at or NEVER, share) for share, at in read if at is None or at + view.plan.period < again]
    return tuple(share for _, share in sorted(chosen))


def _begins_again(view: VerificationView) -> datetime:
    """Return when a Job may next begin after one that begins now."""
    again = next_start(view.opportunities, view.now) or view.now
    return again if view.plan.starts is not None else max(again, view.now + view.plan.period / SHARES)


def _has_begun(plan: VerificationPlan, last: datetime | None, now: datetime) -> bool:
    """Return whether the schedule, if there is one, has begun since the last Job."""
    if plan.starts is None:
        return True
    # A start that was missed counts.
    since = last or now - longest_pause(plan.starts.schedule, plan.starts.zone, now)
    begins = plan.starts.start_after(since)
    return begins is not None and begins <= now


def least_shares(view: VerificationView) -> int:
    """Return how many shares a Job reads at least, so that all are read in a period."""
    pauses = (longest_pause(one.schedule, one.zone, view.now) for one in view.opportunities)
    pause = min(pauses, default=timedelta())
    return max(1, min(SHARES, math.ceil(pause / view.plan.period * SHARES)))


def verification_name(repository: BackupRepository, *, restores: bool = False) -> str:
    """Return the name of the Job after what the record says: two leaders that start one choose the same."""
    record = verification_of(repository)
    last: JobTrack = record.tests if restores else record
    seed = f"{repository.uid}/{last.job}/{last.failures}"
    digest = hashlib.sha256(seed.encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{repository.name[:_NAME_CHARACTERS].rstrip('.-')}-{'restore-test' if restores else 'verify'}-{digest}"


def proves(record: RepositoryVerification, completed: datetime, last: Verification | None) -> bool:
    """Return whether all of a snapshot was read since it was `completed`, and since its `last` verification.

    These times are by the clock of a node, which may be behind: what was read just after them may have been before.
    """
    proven, since = record.proven_at, max(completed, last.at) if last is not None else completed
    return proven is not None and proven >= since + CLOCKS


@dataclass(frozen=True)
class VerifiedCopy:
    """A copy of a volume, by names that people know; `found` is what was found out about it, None: nothing."""

    namespace: str
    volume: str
    name: str
    created: datetime
    found: VerifiedSnapshot | None = None
    last: Verification | None = None

    @property
    def damaged(self) -> bool:
        """Whether it was found damaged now."""
        return self.found is not None and self.found.outcome is VerificationOutcome.FAILED

    @property
    def sound(self) -> bool:
        """Whether it was found right now, or by its last verification."""
        if self.found is not None and self.found.outcome is not None:
            return not self.damaged
        return self.last is not None and self.last.passed


def describe_damage(copies: Iterable[VerifiedCopy]) -> list[str]:
    """Return a text for each volume with a damaged copy: its files, and the newest copies that are still right."""
    volumes: dict[tuple[str, str], list[VerifiedCopy]] = {}
    for copy in copies:
        volumes.setdefault((copy.namespace, copy.volume), []).append(copy)
    texts = []
    for (namespace, volume), found in sorted(volumes.items()):
        ordered = sorted(found, key=lambda one: one.created, reverse=True)
        if damaged := [one for one in ordered if one.damaged]:
            sound = [one.name for one in ordered if one.sound]
            right = f"still right: {some_of(sound, _MOST_COPIES)}" if sound else "no copy is known to be right"
            names = some_of([one.name for one in damaged], _MOST_COPIES)
            fault = _first_fault(one.found for one in damaged if one.found is not None)
            texts.append(f"PVC {namespace}/{volume}: damaged: {names}: {fault}; {right}")
    return texts


def describe_unnamed(snapshots: Iterable[VerifiedSnapshot]) -> list[str]:
    """Return a text about damage in snapshots to which no backup of this cluster refers, if there is any."""
    damaged = [one for one in snapshots if one.outcome is VerificationOutcome.FAILED]
    if not damaged:
        return []
    names = some_of([one.id for one in damaged], _MOST_COPIES)
    return [f"kopia snapshots without a backup in this cluster: damaged: {names}: {_first_fault(damaged)}"]


def _first_fault(damaged: Iterable[VerifiedSnapshot]) -> str:
    fault = next((fault for one in damaged for fault in one.faults), "no cause")
    return " ".join(fault.split())[:_FAULT_CHARACTERS]


def after_job(
    record: RepositoryVerification,
    created: datetime,
    shares: Iterable[VerifiedShare],
    *,
    damaged: Sequence[str],
    failure: str | None,
    at: datetime,
    memory_bytes: int | None = None,
) -> RepositoryVerification:
    """Return the record after the end, `at` by the leader's clock, of the Job that was `created` then.

    `damaged` has a text for each volume with a damaged copy. `failure` is why the Job failed; None: it did not.
    `memory_bytes` is the memory limit of those after it; None: as before.
    """
    read = {str(one.share): created for one in shares if 0 <= one.share < SHARES}
    # No peak is known: without it, every second Job would be out of memory.
    memory_bytes = memory_bytes or record.memory_bytes
    after = replace(record.ended(created, failure, at), shares=record.shares | read, memory_bytes=memory_bytes)
    if damaged:
        failed = VerificationOutcome.FAILED
        return replace(after, at=at, outcome=failed, damaged=list(damaged[:_MOST_DAMAGED]), damaged_at=created)
    if failure is not None:
        return after
    if after.damaged_at is not None and (after.proven_at is None or after.proven_at <= after.damaged_at):
        # Not all has been read again.
        return replace(after, at=at)
    return replace(after, at=at, outcome=VerificationOutcome.PASSED, damaged=[], damaged_at=None)


def after_restore_test(
    record: RepositoryVerification, tests: RestoreTests, *, damaged: Sequence[str], at: datetime
) -> RepositoryVerification:
    """Return the record after the end, `at` by the leader's clock, of a Job that has restored a volume.

    `damaged` has a text for each volume with a damaged copy; it stays until all was read again, as damage in shares.
    """
    after = replace(record, restore_tests=tests)
    if not damaged:
        return after
    texts = list(dict.fromkeys([*damaged, *record.damaged]))[:_MOST_DAMAGED]
    return replace(after, at=at, outcome=VerificationOutcome.FAILED, damaged=texts, damaged_at=tests.job)
