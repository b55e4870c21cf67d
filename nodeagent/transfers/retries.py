"""The rules for another attempt of a transfer: which end of a data mover allows one, how often, and when.

Pure: knows a mover pod as JSON dict and the attempts so far. Does not know who writes the attempts, nor
what else has to be true before the next one begins.
"""

import signal
from dataclasses import dataclass
from typing import Final

from core.contract import CANCELED_ENDING, FENCE_TIMEOUT
from core.errors import FencedError, KopiaCrashError, StorageOutageError
from core.kube.types import Pod
from core.models.attempts import Attempts, InterruptionCause, RetryRules
from core.models.names import ATTEMPT_LABEL
from core.models.units import format_duration
from exposer.pod_status import LOST_CONTAINER, PodEnd, explain_exit, mover_end, parse_pod_end, signal_of
from nodeagent.transfers.mover_pod import disruption_of, explain_loss, rejection_reason

__all__ = [
    "FENCE_SECONDS",
    "Ending",
    "RetryRules",
    "backoff_seconds",
    "explain_deadline",
    "fence_refusal",
    "fence_seconds",
    "find_interruption",
    "refusal",
]

FENCE_SECONDS: Final = FENCE_TIMEOUT.total_seconds() + 60.0
"""A data mover that writes ends itself by then; a minute more for its processes to end."""

_DOUBLINGS: Final = 30
"""After this number of retries the longest backoff applies in any case."""

_OUT_OF_MEMORY: Final = "OOMKilled"
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
    does not: its own failure was before.

    Args:
        pod: the mover pod, a v1 Pod as JSON dict; None: it no longer exists.
        departed: its last version, if `pod` is None and it is known.
    """
    last = pod if pod is not None else departed
    deleted = pod is None or bool(pod["metadata"].get("deletionTimestamp"))
    if last is None:
        return Ending(InterruptionCause.DELETED, "data mover pod no longer exists", terminated=False)
    end = parse_pod_end(last)
    if end is None:
        return None if pod is not None else _lost_while_running(last)
    cause = _cause_of(last, end, deleted=deleted)
    return None if cause is None else Ending(cause, _explain(last, end, cause), _has_exited(last))


def refusal(rules: RetryRules, attempts: Attempts, cause: InterruptionCause, *, age_seconds: float) -> str:
    """Return why there is no attempt after `attempts`, the last one ended for `cause`; empty if there may be one.

    Args:
        rules: of the transfer's kind.
        attempts: as recorded, without this interruption.
        cause: why the attempt ended.
        age_seconds: of the custom resource, by the clock of the API server.
    """
    if not rules.enabled:
        return "retries are switched off"
    counted = cause is not InterruptionCause.FENCED
    if counted and attempts.retries + 1 > rules.max_retries:
        retries = "1 retry" if rules.max_retries == 1 else f"{rules.max_retries} retries"
        return f"{retries} (maxRetries)"
    return explain_deadline(rules, age_seconds=age_seconds)


def explain_deadline(rules: RetryRules, *, age_seconds: float) -> str:
    """Return why a transfer of that age is too old for an attempt that has not begun; empty if it is not."""
    if rules.deadline is None or age_seconds < rules.deadline.total_seconds():
        return ""
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


def fence_refusal(ending: Ending, pod: Pod | None) -> str:
    """Return why no attempt may follow on one that wrote to its volume and ended so; empty: one may.

    Movers that know no attempts, of Velero or of older versions, do not end themselves when they are cut off. A pod
    that is not known any more was deleted from the API, and the kubelet does that after its containers have ended;
    for one that was deleted by force the delay has to do.

    Args:
        ending: how the attempt ended.
        pod: its mover pod, or the last version of it, a v1 Pod as JSON dict; None: it is not known.
    """
    if ending.terminated or pod is None or ATTEMPT_LABEL in (pod["metadata"].get("labels") or {}):
        return ""
    return "its data mover, of Velero or of an older version, may still write to the volume"


def _lost_while_running(pod: Pod) -> Ending:
    """Return the ending of a pod that no longer exists, and had not ended when it was last seen."""
    cause = _disruption_cause(pod) or InterruptionCause.DELETED
    return Ending(cause, explain_loss(pod) or _DELETED, terminated=False)


def _cause_of(pod: Pod, end: PodEnd, *, deleted: bool) -> InterruptionCause | None:
    """Return why a pod that has ended was interrupted; None if it was not."""
    if end.exit_code == 0:
        return None
    if _container_reason(pod) == _OUT_OF_MEMORY:
        return InterruptionCause.OUT_OF_MEMORY
    if end.exit_code in _OWN_CODES:
        return _OWN_CODES[end.exit_code]
    cause = _disruption_cause(pod)
    if cause is not None:
        return cause
    if _container_reason(pod) in LOST_CONTAINER:
        return InterruptionCause.NODE_LOST
    stopped = _was_stopped(end) or signal_of(end) == signal.SIGTERM
    unexplained = end.exit_code is None or bool(signal_of(end)) or (end.plain and not end.message.strip())
    if not (stopped or unexplained):
        return None
    if deleted:
        return InterruptionCause.DELETED
    if stopped:
        return InterruptionCause.STOPPED
    return InterruptionCause.KILLED if signal_of(end) == signal.SIGKILL else InterruptionCause.CRASHED


def _was_stopped(end: PodEnd) -> bool:
    """Return whether the mover reported that it was stopped, also if it was killed before it had exited."""
    return end.message.strip().endswith(CANCELED_ENDING)


def _disruption_cause(pod: Pod) -> InterruptionCause | None:
    """Return why the cluster ended `pod`; None if its status does not show that it did."""
    reasons = ((pod.get("status") or {}).get("reason"), disruption_of(pod.get("status") or {}).get("reason"))
    known = [_DISRUPTIONS[reason] for reason in reasons if reason in _DISRUPTIONS]
    if known:
        return known[0]
    if rejection_reason(pod) not in {"", "Evicted"}:
        return InterruptionCause.REJECTED
    return InterruptionCause.EVICTED if any(reasons) or disruption_of(pod.get("status") or {}) else None


def _container_reason(pod: Pod) -> str:
    """Return the reason of the mover's terminated container; empty if there is none."""
    return (mover_end(pod) or {}).get("reason", "")


def _has_exited(pod: Pod) -> bool:
    """Return whether the runtime reported the exit of the mover's container, and the kubelet did not only miss it."""
    terminated = mover_end(pod) or {}
    return "exitCode" in terminated and _container_reason(pod) not in LOST_CONTAINER


def _explain(pod: Pod, end: PodEnd, cause: InterruptionCause) -> str:
    """Return what ended the attempt: the mover's words where it chose its end, else the cluster's.

    A mover that did not choose its end leaves the end of its log in the place of the message.
    """
    if cause is InterruptionCause.DELETED:
        return _DELETED
    chosen = end.exit_code in _OWN_CODES or _was_stopped(end)
    words = end.message.strip().removesuffix(CANCELED_ENDING).rstrip(": ") if chosen else ""
    return words or explain_loss(pod) or explain_exit(end)
