"""The rules for reporting why a transfer is pending, and for when to check it again.

Each rule takes what is known about one pending transfer and returns it as it is afterward.
`PendingRecords` applies the rules to the transfers of one agent, by uid. It holds nothing that the
API server does not show: a restarted agent begins with empty records.
"""

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from core.clock import Clock
from exposer.model import Pending
from nodeagent.runtime.timers import Timers

__all__ = [
    "PendingRecord",
    "PendingRecords",
    "PendingReport",
    "count_check",
    "decide_report",
    "mark_reported",
    "next_check",
    "observe",
    "pause_checks",
    "seconds_to_report",
]

_CHECK_SECONDS: Final = 5.0
"""Source: Velero v1.18 retries a constrained transfer after 5 s."""

_QUICK_SECONDS: Final = (0.25, 0.75, 1.0, 2.0, 4.0)
"""Pauses after a step of this agent: what the step started is mostly done by then. A restore has four such steps after
its data is complete."""

_QUICK_CHECKS: Final = 10
_QUICK_WINDOW_SECONDS: Final = 60.0
"""Quick checks of one transfer are limited in this time: alternating reasons must not become a busy loop."""

_GRACE_SECONDS: Final = 3.0
"""A shorter wait is part of every healthy transfer: to report it would only cost writes."""

_SAME_REASON_PAUSE_SECONDS: Final = 10.0
"""Between two messages for one reason: some messages count seconds."""

_OTHER_CAUSE_PAUSE_SECONDS: Final = 4.0
"""Between two messages that name different causes of one blocked reason: less than the pause between checks."""

_NUMBERS: Final = re.compile(r"\d+")
_NOTHING: Final = Pending("", "")


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """What is known about one pending transfer; times are readings of a monotonic clock, in seconds.

    `current` is what the transfer is pending for since `since_seconds`, reported or not. `checks` is
    the number of checks for that reason, `quick_checks` of quick ones since
    `quick_since_seconds`. `reported` is what the status shows since `reported_at_seconds`. No check
    is needed before `paused_until_seconds` unless the reason changes.
    """

    current: Pending = _NOTHING
    since_seconds: float = 0.0
    checks: int = 0
    quick_checks: int = 0
    quick_since_seconds: float = 0.0
    reported: Pending = _NOTHING
    reported_at_seconds: float = 0.0
    paused_until_seconds: float = 0.0


_EMPTY: Final = PendingRecord()


@dataclass(frozen=True)
class PendingReport:
    """What is to be written: the message in the status, an Event, or nothing."""

    message: bool = False
    event: bool = False


def decide_report(
    record: PendingRecord, pending: Pending, now: float, *, immediately: bool = False
) -> tuple[PendingRecord, PendingReport]:
    """Return `record` with `pending` observed at `now`, and what is to be reported.

    Args:
        record: what was known before.
        pending: what the transfer is pending for.
        now: the monotonic time in seconds.
        immediately: the transfer is not checked again soon, so an unfinished grace period counts as over.
    """
    if pending.reason != record.current.reason:
        record = replace(record, since_seconds=now, checks=0, paused_until_seconds=0.0)
    elif _without_numbers(pending) != _without_numbers(record.current):
        # Another step, such as another object that is being deleted.
        record = replace(record, checks=0)
    record = replace(record, current=pending)
    if pending.reason != record.reported.reason:
        lasts = immediately or pending.blocked or now >= record.since_seconds + _GRACE_SECONDS
        return record, PendingReport(message=lasts, event=lasts)
    other_cause = pending.blocked and _without_numbers(pending) != _without_numbers(record.reported)
    pause_seconds = _OTHER_CAUSE_PAUSE_SECONDS if other_cause else _SAME_REASON_PAUSE_SECONDS
    pause_over = now - record.reported_at_seconds >= pause_seconds
    changed = pending.message != record.reported.message
    return record, PendingReport(message=changed and pause_over, event=other_cause and pause_over)


def observe(record: PendingRecord, pending: Pending) -> PendingRecord:
    """Return `record` with `pending`, which is not reported; a change of it is checked soon."""
    if pending == record.current:
        return record
    return replace(record, current=pending, checks=0, paused_until_seconds=0.0)


def mark_reported(record: PendingRecord, pending: Pending, now: float) -> PendingRecord:
    """Return `record` with `pending` reported at `now`."""
    return replace(record, reported=pending, reported_at_seconds=now)


def pause_checks(record: PendingRecord, seconds: float, now: float) -> PendingRecord:
    """Return `record` without a need for checks for so long, as long as the reason stays."""
    return replace(record, paused_until_seconds=now + seconds)


def next_check(record: PendingRecord, now: float) -> float:
    """Return the pause before the next check in seconds, which grows with their number."""
    quick_checks = 0 if _window_over(record, now) else record.quick_checks
    if record.checks >= len(_QUICK_SECONDS) or quick_checks >= _QUICK_CHECKS:
        return _CHECK_SECONDS
    return _QUICK_SECONDS[record.checks]


def count_check(record: PendingRecord, now: float) -> PendingRecord:
    """Return `record` with one more check at `now`."""
    quick = next_check(record, now) < _CHECK_SECONDS
    if _window_over(record, now):
        record = replace(record, quick_checks=0, quick_since_seconds=now)
    return replace(record, checks=record.checks + 1, quick_checks=record.quick_checks + quick)


def seconds_to_report(record: PendingRecord, now: float) -> float:
    """Return after how long a reason that is not blocked is reported for the first time."""
    return max(0.0, record.since_seconds + _GRACE_SECONDS - now)


def _window_over(record: PendingRecord, now: float) -> bool:
    return now - record.quick_since_seconds >= _QUICK_WINDOW_SECONDS


def _without_numbers(pending: Pending) -> str:
    """Return what two messages about one cause have in common."""
    return _NUMBERS.sub("", pending.message)


class PendingRecords:
    """The records of one agent's transfers, by uid."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._records: dict[str, PendingRecord] = {}
        self._operations = Timers(clock)

    def decide_report(self, uid: str, pending: Pending) -> PendingReport:
        """Record that the transfer is pending for `pending`; return what is to be reported."""
        self._records[uid], report = decide_report(self._of(uid), pending, self._clock.monotonic())
        return report

    def observe(self, uid: str, pending: Pending) -> None:
        """Record that the transfer is pending for `pending`, which is not reported."""
        self._records[uid] = observe(self._of(uid), pending)

    def mark_reported(self, uid: str, pending: Pending) -> None:
        """Record that `pending` was reported."""
        self._records[uid] = mark_reported(self._of(uid), pending, self._clock.monotonic())

    def pause_checks(self, uid: str, seconds: float) -> None:
        """Record that no check is needed for so long, as long as the reason stays."""
        self._records[uid] = pause_checks(self._of(uid), seconds, self._clock.monotonic())

    def count_check(self, uid: str) -> float:
        """Record a check; return the pause before the next one in seconds."""
        record, now = self._of(uid), self._clock.monotonic()
        self._records[uid] = count_check(record, now)
        return next_check(record, now)

    def paused_seconds(self, uid: str) -> float:
        """Return for how long no check is needed."""
        return max(0.0, self._of(uid).paused_until_seconds - self._clock.monotonic())

    def seconds_to_report(self, uid: str) -> float:
        """Return after how long a reason that is not blocked is reported for the first time."""
        return seconds_to_report(self._of(uid), self._clock.monotonic())

    def operation_seconds(self, uid: str, operation: str) -> float:
        """Return how long the transfer has been observed pending for `operation`, its only one at a time."""
        return self._operations.seconds(uid, operation)

    def is_reported(self, uid: str, reason: str) -> bool:
        """Return whether `reason` is what was reported last."""
        return self._of(uid).reported.reason == reason

    def reported_message(self, uid: str) -> str:
        """Return the message that was reported last; empty where there is none."""
        return self._of(uid).reported.message

    def reason(self, uid: str) -> str:
        """Return the reason why the transfer is pending, reported or not; empty where it is unknown."""
        return self._of(uid).current.reason

    def message(self, uid: str) -> str:
        """Return the message that goes with `reason`."""
        return self._of(uid).current.message

    def forget(self, uid: str) -> None:
        """Delete the record of a transfer."""
        self._records.pop(uid, None)
        self._operations.forget(uid)

    def retain(self, uids: AbstractSet[str]) -> None:
        """Delete the records of all transfers but those."""
        for uid in self._records.keys() - uids:
            self.forget(uid)
        self._operations.retain(uids)

    def _of(self, uid: str) -> PendingRecord:
        return self._records.get(uid, _EMPTY)
