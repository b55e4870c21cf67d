"""The rules for a transfer that waits: whether it gets another attempt, when it is checked again, why it is pending.

Pure, but for `PendingRecords`, which holds nothing that the API server does not show: a restarted agent has none.
"""

import re
import signal
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from core.clock import Clock
from core.contract import FENCE_TIMEOUT
from core.errors import FencedError, KopiaCrashError, StorageOutageError
from core.kube.types import Pod
from core.models.names import ATTEMPT_LABEL
from core.models.phases import Attempts, InterruptionCause, RetryRules
from core.models.reasons import PendingReason
from core.models.units import format_duration
from exposer.model import Pending
from exposer.pod_status import LOST_CONTAINER, PodEnd, explain_exit, find_condition, mover_end, parse_pod_end, signal_of
from nodeagent.runtime.workqueue import LONGEST_BACKOFF_SECONDS, Timers
from nodeagent.transfers.mover_pod import explain_loss, rejection_reason, stop_words, was_stopped

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
NOTHING: Final = Pending("", "")
"""What a transfer is pending for that waits for nothing."""


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """What is known about one pending transfer; times are readings of a monotonic clock, in seconds.

    `current` is what the transfer is pending for since `since_seconds`, reported or not. `checks` is the number of
    checks for that reason, `quick_checks` of quick ones since `quick_since_seconds`. `reported` is what the status
    shows since `reported_at_seconds`. No check is needed before `paused_until_seconds` unless the reason changes.
    """

    current: Pending = NOTHING
    since_seconds: float = 0.0
    checks: int = 0
    quick_checks: int = 0
    quick_since_seconds: float = 0.0
    reported: Pending = NOTHING
    reported_at_seconds: float = 0.0
    paused_until_seconds: float = 0.0


_EMPTY: Final = PendingRecord()


@dataclass(frozen=True)
class PendingReport:
    """What is to be written: the message in the status, an Event, or nothing."""

    message: bool = False
    event: bool = False


def _without_numbers(pending: Pending) -> str:
    """Return what two messages about one cause have in common."""
    return _NUMBERS.sub("", pending.message)


class PendingRecords:
    """The records of one agent's transfers, by uid."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, PendingRecord] = {}
        self._operations = Timers(clock, most_seconds=LONGEST_BACKOFF_SECONDS)

    def get(self, uid: str) -> PendingRecord:
        """Return what is known about a transfer."""
        return self._records.get(uid, _EMPTY)

    def decide_report(self, uid: str, pending: Pending, *, immediately: bool = False) -> PendingReport:
        """Record that the transfer is pending for `pending`; return what is to be reported.

        `immediately`: the transfer is not checked again soon, so an unfinished grace period counts as over.
        """
        record, now = self.get(uid), self._clock.monotonic()
        if pending.reason != record.current.reason:
            record = replace(record, since_seconds=now, checks=0, paused_until_seconds=0.0)
        elif _without_numbers(pending) != _without_numbers(record.current):
            # Another step, such as another object that is being deleted.
            record = replace(record, checks=0)
        self._records[uid] = replace(record, current=pending)
        if pending.reason != record.reported.reason:
            lasts = immediately or pending.blocked or now >= record.since_seconds + _GRACE_SECONDS
            return PendingReport(message=lasts, event=lasts)
        other_cause = pending.blocked and _without_numbers(pending) != _without_numbers(record.reported)
        pause_seconds = _OTHER_CAUSE_PAUSE_SECONDS if other_cause else _SAME_REASON_PAUSE_SECONDS
        pause_over = now - record.reported_at_seconds >= pause_seconds
        changed = pending.message != record.reported.message
        return PendingReport(message=changed and pause_over, event=other_cause and pause_over)

    def compare_report(self, uid: str, shown: str | None) -> None:
        """Have the reason of a transfer reported again unless its status shows it; `shown` is the reason there.

        The leader writes its own reason over it while the agent is unavailable, and removes that afterward.
        """
        record = self.get(uid)
        if record.reported.reason and shown not in {record.reported.reason, PendingReason.AGENT_UNAVAILABLE}:
            self._records[uid] = replace(record, reported=NOTHING, paused_until_seconds=0.0)

    def observe(self, uid: str, pending: Pending) -> None:
        """Record that the transfer is pending for `pending`, which is not reported."""
        record = self.get(uid)
        if pending != record.current:
            # A change is checked soon.
            self._records[uid] = replace(record, current=pending, checks=0, paused_until_seconds=0.0)

    def mark_reported(self, uid: str, pending: Pending) -> None:
        """Record that `pending` was reported."""
        self._records[uid] = replace(self.get(uid), reported=pending, reported_at_seconds=self._clock.monotonic())

    def pause_checks(self, uid: str, seconds: float) -> None:
        """Record that no check is needed for so long, as long as the reason stays."""
        self._records[uid] = replace(self.get(uid), paused_until_seconds=self._clock.monotonic() + seconds)

    def count_check(self, uid: str) -> float:
        """Record a check; return the pause before the next one in seconds, which grows with their number."""
        record, now = self.get(uid), self._clock.monotonic()
        if now - record.quick_since_seconds >= _QUICK_WINDOW_SECONDS:
            record = replace(record, quick_checks=0, quick_since_seconds=now)
        quick = record.checks < len(_QUICK_SECONDS) and record.quick_checks < _QUICK_CHECKS
        self._records[uid] = replace(record, checks=record.checks + 1, quick_checks=record.quick_checks + quick)
        return _QUICK_SECONDS[record.checks] if quick else _CHECK_SECONDS

    def paused_seconds(self, uid: str) -> float:
        """Return for how long no check is needed."""
        return max(0.0, self.get(uid).paused_until_seconds - self._clock.monotonic())

    def seconds_to_report(self, uid: str) -> float:
        """Return after how long a reason that is not blocked is reported for the first time."""
        return max(0.0, self.get(uid).since_seconds + _GRACE_SECONDS - self._clock.monotonic())

    def operation_seconds(self, uid: str, operation: str) -> float:
        """Return how long the transfer has been observed pending for `operation`, its only one at a time."""
        return self._operations.seconds(uid, operation)

    def forget(self, uid: str) -> None:
        """Delete the record of a transfer."""
        self._records.pop(uid, None)
        self._operations.forget(uid)

    def retain(self, uids: AbstractSet[str]) -> None:
        """Delete the records of all transfers but those."""
        for uid in self._records.keys() - uids:
            self.forget(uid)
        self._operations.retain(uids)


FENCE_SECONDS: Final = FENCE_TIMEOUT.total_seconds() + 60.0
"""A data mover that writes ends itself by then; a minute more for its processes to end."""

_DOUBLINGS: Final = 30
"""After this number of retries the longest backoff applies in any case."""

_DELETED: Final = "data mover pod was deleted"

_OWN_CODES: Final = {
    KopiaCrashError.exit_code: InterruptionCause.CRASHED,
    StorageOutageError.exit_code: InterruptionCause.STORAGE_UNAVAILABLE,
    FencedError.exit_code: InterruptionCause.FENCED,
}
"""Exit codes by which a data mover says that another attempt may succeed."""

_DISRUPTIONS: Final = {
    "DeletionByPodGC": InterruptionCause.NODE_LOST,
    "DeletionByTaintManager": InterruptionCause.NODE_LOST,
    "NodeLost": InterruptionCause.NODE_LOST,
    "Preempting": InterruptionCause.PREEMPTED,
    "PreemptionByScheduler": InterruptionCause.PREEMPTED,
    "Shutdown": InterruptionCause.STOPPED,
    "Terminated": InterruptionCause.STOPPED,
}
"""Reasons of a pod, or of its condition DisruptionTarget; all others are evictions.

Source: Kubernetes v1.34, pkg/apis/core/types.go and pkg/controller/{podgc,tainteviction} (conditions);
pkg/kubelet/preemption/preemption.go, pkg/kubelet/nodeshutdown (Terminated; in v1.21 Shutdown), pkg/util/node
(NodeLost).
"""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended that another one may follow.

    `terminated`: the kubelet reported the exit of its container, so nothing of it runs any more.
    """

    cause: InterruptionCause
    message: str
    terminated: bool


def find_interruption(pod: Pod | None, departed: Pod | None) -> Ending | None:
    """Return how an attempt was interrupted; None if it runs, has a result, or failed in a way that no retry helps.

    A mover that is disrupted may fail for that very reason with any exit code. One that is only being deleted
    does not: its own failure was before. `departed` is the last version of a `pod` that no longer exists, if known.
    """
    last = pod if pod is not None else departed
    deleted = pod is None or bool(pod["metadata"].get("deletionTimestamp"))
    if last is None:
        return Ending(InterruptionCause.DELETED, "data mover pod no longer exists", terminated=False)
    end = parse_pod_end(last)
    if end is None and pod is None:
        why = _disruption_cause(last) or InterruptionCause.DELETED
        return Ending(why, explain_loss(last) or _DELETED, terminated=False)
    if end is None:
        return None
    cause = _cause_of(last, end, deleted=deleted)
    # If not, the kubelet only missed the container.
    exited = "exitCode" in (mover_end(last) or {}) and _container_reason(last) not in LOST_CONTAINER
    return None if cause is None else Ending(cause, _explain(last, end, cause), exited)


def refusal(
    rules: RetryRules, attempts: Attempts, cause: InterruptionCause | None, *, age_seconds: float
) -> str | None:
    """Return why there is no attempt after `attempts`, the last one ended for `cause`; None if there may be one.

    `attempts` are without this interruption. Without a `cause` the last one has not begun, and only the age of the
    transfer counts, which is by the clock of the API server.
    """
    if cause is not None and not rules.enabled:
        return "retries are switched off"
    if cause not in {None, InterruptionCause.FENCED} and attempts.retries + 1 > rules.max_retries:
        retries = "1 retry" if rules.max_retries == 1 else f"{rules.max_retries} retries"
        return f"{retries} (maxRetries)"
    if rules.deadline is None or age_seconds < rules.deadline.total_seconds():
        return None
    return f"older than {format_duration(rules.deadline)} (deadline)"


def backoff_seconds(rules: RetryRules, attempts: Attempts) -> float:
    """Return the delay of the attempt that `attempts` names, from its announcement; it doubles with each attempt."""
    doublings = min(max(attempts.number - 2, 0), _DOUBLINGS)
    return min(rules.initial_backoff * (1 << doublings), rules.max_backoff).total_seconds()


def fence_seconds(attempts: Attempts, restores: bool) -> float:  # noqa: FBT001 - the only flag
    """Return how long after its announcement the next attempt may not write yet, since the last one may still.

    A source has no writer, and so needs no delay.
    """
    last = attempts.last
    return FENCE_SECONDS if restores and last is not None and not last.terminated else 0.0


def fence_refusal(ending: Ending, pod: Pod | None) -> str | None:
    """Return why no attempt may follow on one that wrote to its volume and ended so; None: one may.

    Movers that know no attempts, of Velero or of older versions, do not end themselves when they are cut off. A pod
    that is not known any more was deleted from the API, and the kubelet does that after its containers have ended; for
    one that was deleted by force the delay has to do.
    """
    if ending.terminated or pod is None or ATTEMPT_LABEL in (pod["metadata"].get("labels") or {}):
        return None
    return "its data mover, of Velero or of an older version, may still write to the volume"


def _cause_of(pod: Pod, end: PodEnd, *, deleted: bool) -> InterruptionCause | None:
    if end.exit_code == 0:
        return None
    if _container_reason(pod) == InterruptionCause.OUT_OF_MEMORY:
        return InterruptionCause.OUT_OF_MEMORY
    if end.exit_code in _OWN_CODES:
        return _OWN_CODES[end.exit_code]
    cause = _disruption_cause(pod)
    if cause is not None:
        return cause
    if _container_reason(pod) in LOST_CONTAINER:
        return InterruptionCause.NODE_LOST
    stopped = was_stopped(end)
    unexplained = end.exit_code is None or bool(signal_of(end)) or (end.plain and not end.message.strip())
    if not (stopped or unexplained):
        return None
    if deleted:
        return InterruptionCause.DELETED
    if stopped:
        return InterruptionCause.STOPPED
    return InterruptionCause.KILLED if signal_of(end) == signal.SIGKILL else InterruptionCause.CRASHED


def _disruption_cause(pod: Pod) -> InterruptionCause | None:
    status = pod.get("status") or {}
    disruption = find_condition(status, "DisruptionTarget")
    reasons = (status.get("reason"), disruption.get("reason"))
    known = [_DISRUPTIONS[reason] for reason in reasons if reason in _DISRUPTIONS]
    if known:
        return known[0]
    if rejection_reason(pod) not in {None, "Evicted"}:
        return InterruptionCause.REJECTED
    return InterruptionCause.EVICTED if any(reasons) or disruption else None


def _container_reason(pod: Pod) -> str | None:
    return (mover_end(pod) or {}).get("reason")


def _explain(pod: Pod, end: PodEnd, cause: InterruptionCause) -> str:
    """Return what ended the attempt: the mover's words where it chose its end, else the cluster's.

    A mover that did not choose its end leaves the end of its log in the place of the message.
    """
    if cause is InterruptionCause.DELETED:
        return _DELETED
    words = end.message.strip() if end.exit_code in _OWN_CODES else stop_words(end)
    return words or explain_loss(pod) or explain_exit(end)
