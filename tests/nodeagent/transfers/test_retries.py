"""Which end of a mover pod another attempt follows, and when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import TYPE_CHECKING

import pytest

from core.contract import CANCELED_ENDING
from core.models.names import ATTEMPT_LABEL
from core.models.phases import Attempts, Interruption, InterruptionCause, RetryRules
from nodeagent.transfers.mover_pod import trim_pod
from nodeagent.transfers.retries import (
    FENCE_SECONDS,
    Ending,
    backoff_seconds,
    explain_deadline,
    fence_refusal,
    fence_seconds,
    find_interruption,
    refusal,
)
from tests.nodeagent.support.transfers import data_upload, mover_pod

if TYPE_CHECKING:
    from tests.support.objects import JsonDict

Cause = InterruptionCause
_HOUR = 3600.0


def _ended(exit_code: int, text: str = "", why: str = "Error", **status: object) -> JsonDict:
    """Return the status of a pod whose container ended."""
    state = {"terminated": {"exitCode": exit_code, "message": text, "reason": why}}
    return {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": [{"state": state}]} | status


def _disrupted(reason: str) -> JsonDict:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "a cause"}]}


def _pod(status: JsonDict, *, deleted: bool = False) -> JsonDict:
    pod = mover_pod(data_upload(), **status)
    if deleted:
        pod["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    return pod


def _interrupted(*causes: InterruptionCause, terminated: bool = False) -> Attempts:
    attempts, at = Attempts(), datetime(2026, 1, 2, tzinfo=UTC)
    for cause in causes:
        attempts = attempts.interrupt(Interruption(at=at, cause=cause, terminated=terminated))
    return attempts


_STOPPED = f"got SIGTERM; a checkpoint was saved: {CANCELED_ENDING}"
_RUNNING = {"phase": "Running"}
_REJECTED = {"phase": "Failed", "reason": "OutOfcpu", "message": "no room"}
_GARBAGE_COLLECTED = {"phase": "Failed"} | _disrupted("DeletionByPodGC")
_EVICTED = {"reason": "Evicted", "message": "low on memory"}


_ENDS: dict[str, tuple[JsonDict, InterruptionCause, str | None, bool]] = {
    "out of memory": (_ended(137, "log", "OOMKilled"), Cause.OUT_OF_MEMORY, "OOMKilled (exit code 137)", True),
    "kopia oom": (_ended(15, "kopia: no memory", "OOMKilled"), Cause.OUT_OF_MEMORY, "kopia: no memory", True),
    "then evicted": (_ended(137, "", "OOMKilled", **_EVICTED), Cause.OUT_OF_MEMORY, "Evicted: low on memory", True),
    "kopia crashed": (_ended(15, "kopia died"), Cause.CRASHED, "kopia died", True),
    "storage outage": (_ended(16, "no answer"), Cause.STORAGE_UNAVAILABLE, "no answer", True),
    "fenced": (_ended(17, "no API"), Cause.FENCED, "no API", True),
    "both": (_ended(17, "no API", **_disrupted("DeletionByTaintManager")), Cause.FENCED, None, True),
    "killed": (_ended(137, "log"), Cause.KILLED, "killed by signal 9 (exit code 137)", True),
    "crashed": (_ended(139, "log"), Cause.CRASHED, "killed by signal 11 (exit code 139)", True),
    "SIGTERM early": (_ended(143, "log"), Cause.STOPPED, "killed by signal 15 (exit code 143)", True),
    "no message": (_ended(1), Cause.CRASHED, "Error (exit code 1)", True),
    "stopped": (_ended(14, _STOPPED), Cause.STOPPED, "got SIGTERM; a checkpoint was saved", True),
    "then killed": (_ended(137, _STOPPED), Cause.STOPPED, "got SIGTERM; a checkpoint was saved", True),
    "drained": (
        _ended(14, _STOPPED, **_disrupted("EvictionByEvictionAPI")),
        Cause.EVICTED,
        "a cause; got SIGTERM; a checkpoint was saved",
        True,
    ),
    "shutdown": (_ended(14, _STOPPED) | {"reason": "Terminated"}, Cause.STOPPED, None, True),
    "evicted": (_ended(137, **_EVICTED), Cause.EVICTED, "Evicted: low on memory", True),
    "failing too": (_ended(12, "reset", **_EVICTED), Cause.EVICTED, "Evicted: low on memory", True),
    "no container": ({"phase": "Failed"} | _EVICTED, Cause.EVICTED, "Evicted: low on memory", False),
    "preempted": (
        _ended(137, **_disrupted("PreemptionByScheduler")),
        Cause.PREEMPTED,
        "PreemptionByScheduler: a cause",
        True,
    ),
    "preempted by the kubelet": (
        _ended(137) | {"reason": "Preempting"} | _disrupted("TerminationByKubelet"),
        Cause.PREEMPTED,
        None,
        True,
    ),
    "by the kubelet": (_ended(137, **_disrupted("TerminationByKubelet")), Cause.EVICTED, None, True),
    "another disruption": (_ended(137, **_disrupted("Other")), Cause.EVICTED, None, True),
    "node deleted": (_GARBAGE_COLLECTED, Cause.NODE_LOST, "DeletionByPodGC: a cause", False),
    "container not found": (_ended(137, "", "ContainerStatusUnknown"), Cause.NODE_LOST, None, False),
    "node rebooted": (_ended(255, "", "Unknown"), Cause.NODE_LOST, None, False),
    "rejected": (_REJECTED, Cause.REJECTED, "OutOfcpu: no room", False),
    "no container, no reason": ({"phase": "Failed"}, Cause.CRASHED, "Failed", False),
    "no container, no result": ({"phase": "Succeeded"}, Cause.CRASHED, "Succeeded", False),
}


@pytest.mark.parametrize(("status", "cause", "message", "terminated"), _ENDS.values(), ids=_ENDS)
def test_an_interruption_has_the_cause_that_the_pod_shows(
    status: JsonDict, cause: InterruptionCause, message: str | None, *, terminated: bool
) -> None:
    pod = _pod(status)
    ending = find_interruption(pod, None)
    assert ending is not None
    assert (ending.cause, ending.terminated) == (cause, terminated)
    assert ending.message == message or (message is None and ending.message)
    assert find_interruption(trim_pod(pod), None) == ending


@pytest.mark.parametrize("message", ["", "{}", "x"])
@pytest.mark.parametrize("reason", ["Completed", "OOMKilled", "ContainerStatusUnknown", ""])
@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize(
    "more", [{}, _EVICTED, _disrupted("PreemptionByScheduler")], ids=["plain", "evicted", "preempted"]
)
def test_a_result_counts_also_of_a_lost_pod(message: str, reason: str, more: JsonDict, *, gone: bool) -> None:
    pod = _pod(_ended(0, message, reason, **more), deleted=gone)
    assert find_interruption(None if gone else pod, pod if gone else None) is None


@pytest.mark.parametrize(("code", "deleted"), list(product([1, 2, 10, 11, 12, 13, 14, 18, 127, 128], [False, True])))
def test_a_failure_of_the_mover_is_final_also_if_its_pod_is_deleted_then(code: int, *, deleted: bool) -> None:
    pod = _pod(_ended(code, "wrong password"), deleted=deleted)
    assert (find_interruption(pod, None), find_interruption(None, pod)) == (None, None)


@pytest.mark.parametrize("status", [{"phase": "Pending"}, _RUNNING, _RUNNING | _disrupted("PreemptionByScheduler")])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_pod_that_has_not_ended_is_not_interrupted_yet(status: JsonDict, *, deleted: bool) -> None:
    assert find_interruption(_pod(status, deleted=deleted), None) is None


@pytest.mark.parametrize(
    ("status", "cause", "terminated"),
    [
        pytest.param(None, Cause.DELETED, False, id="unknown"),
        pytest.param(_RUNNING, Cause.DELETED, False, id="ran when last seen"),
        pytest.param(_RUNNING | _disrupted("EvictionByEvictionAPI"), Cause.EVICTED, False, id="evicted"),
        pytest.param(_RUNNING | _disrupted("DeletionByTaintManager"), Cause.NODE_LOST, False, id="tainted"),
        pytest.param(_RUNNING | {"reason": "NodeLost"}, Cause.NODE_LOST, False, id="node unreachable"),
        pytest.param(_ended(14, _STOPPED), Cause.DELETED, True, id="stopped"),
        pytest.param(_ended(137), Cause.DELETED, True, id="killed"),
        pytest.param(_ended(137, "", "ContainerStatusUnknown"), Cause.NODE_LOST, False, id="container not found"),
        pytest.param(_ended(137, "", "OOMKilled"), Cause.OUT_OF_MEMORY, True, id="out of memory"),
        pytest.param(_ended(16, "no answer"), Cause.STORAGE_UNAVAILABLE, True, id="storage outage"),
    ],
)
def test_the_loss_of_a_pod_that_is_gone_shows_in_its_last_version(
    status: JsonDict | None, cause: InterruptionCause, *, terminated: bool
) -> None:
    ending = find_interruption(None, None if status is None else _pod(status))
    assert ending is not None
    assert (ending.cause, ending.terminated) == (cause, terminated)
    assert ending.message


def test_a_container_that_runs_when_its_pod_is_given_up_has_not_terminated() -> None:
    state = {"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]} | _disrupted("DeletionByPodGC")
    ending = find_interruption(_pod(state), None)
    assert ending is not None
    assert not ending.terminated


@pytest.mark.parametrize("cause", Cause)
def test_retries_that_are_switched_off_are_refused(cause: InterruptionCause) -> None:
    assert refusal(RetryRules(enabled=False), Attempts(), cause, age_seconds=0) == "retries are switched off"


@pytest.mark.parametrize(("cause", "limit", "factor"), list(product(Cause, range(4), (1.0, 1.5))))
def test_as_many_retries_are_allowed_as_configured(cause: InterruptionCause, limit: int, factor: float) -> None:
    rules = RetryRules(max_retries=limit, oom_memory_factor=factor)
    given = [not refusal(rules, _interrupted(*[cause] * times), cause, age_seconds=0) for times in range(6)]
    assert given == [cause is Cause.FENCED or times < limit for times in range(6)]


def test_ends_of_fenced_movers_leave_room_for_all_retries() -> None:
    attempts = _interrupted(*[Cause.FENCED] * 5, Cause.KILLED, Cause.KILLED)
    assert refusal(RetryRules(), attempts, Cause.KILLED, age_seconds=0) is None
    assert refusal(RetryRules(max_retries=2), attempts, Cause.KILLED, age_seconds=0) == "2 retries (maxRetries)"
    assert refusal(RetryRules(max_retries=2), attempts, Cause.FENCED, age_seconds=0) is None


def test_the_refusal_of_a_single_retry_names_the_limit() -> None:
    assert refusal(RetryRules(max_retries=1), _interrupted(Cause.KILLED), Cause.KILLED, age_seconds=0) == (
        "1 retry (maxRetries)"
    )


@pytest.mark.parametrize(("cause", "seconds"), list(product(Cause, [0.0, 4 * _HOUR - 1, 4 * _HOUR, 40 * _HOUR])))
def test_an_old_transfer_is_not_retried(cause: InterruptionCause, seconds: float) -> None:
    text = None if seconds < 4 * _HOUR else "older than 4h0m0s (deadline)"
    assert refusal(RetryRules(), Attempts(), cause, age_seconds=seconds) == text
    assert refusal(RetryRules(deadline=None), Attempts(), cause, age_seconds=seconds) is None
    assert explain_deadline(RetryRules(), age_seconds=seconds) == text


def test_the_backoff_doubles_up_to_its_maximum() -> None:
    attempts = [_interrupted(*[Cause.KILLED] * times) for times in (*range(1, 8), 1000)]
    assert [backoff_seconds(RetryRules(), each) for each in attempts] == [30, 60, 120, 240, 480, 600, 600, 600]


def test_fenced_movers_are_retried_more_and_more_slowly() -> None:
    attempts = [_interrupted(*[Cause.FENCED] * times) for times in (1, 2, 3)]
    assert [backoff_seconds(RetryRules(), each) for each in attempts] == [30, 60, 120]


@pytest.mark.parametrize("seconds", [0, 5])
def test_the_backoff_never_exceeds_its_maximum(seconds: int) -> None:
    rules = RetryRules(initial_backoff=timedelta(seconds=9), max_backoff=timedelta(seconds=seconds))
    assert backoff_seconds(rules, _interrupted(Cause.KILLED)) == seconds


@pytest.mark.parametrize(("cause", "restores", "terminated"), list(product(Cause, [False, True], [False, True])))
def test_only_a_restore_waits_for_a_mover(cause: InterruptionCause, *, restores: bool, terminated: bool) -> None:
    attempts = _interrupted(cause, terminated=terminated)
    assert fence_seconds(attempts, restores) == (FENCE_SECONDS if restores and not terminated else 0.0)


def test_the_first_attempt_waits_for_nothing() -> None:
    assert fence_seconds(Attempts(), restores=True) == 0.0


@pytest.mark.parametrize("terminated", [True, False], ids=["terminated", "may run"])
@pytest.mark.parametrize("pod", ["ours", "another's", "unknown"])
def test_no_attempt_follows_on_a_mover_that_may_run_and_knows_no_attempts(pod: str, *, terminated: bool) -> None:
    mover = _pod(_RUNNING)
    if pod == "ours":
        mover["metadata"]["labels"][ATTEMPT_LABEL] = "1"
    refused = fence_refusal(Ending(Cause.NODE_LOST, "lost", terminated), None if pod == "unknown" else mover)
    assert bool(refused) is (pod == "another's" and not terminated)


def test_only_the_last_interruption_decides_about_the_fence() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    ended = Interruption(at=at, cause=Cause.KILLED, terminated=True)
    assert fence_seconds(_interrupted(Cause.NODE_LOST).interrupt(ended), restores=True) == 0.0
