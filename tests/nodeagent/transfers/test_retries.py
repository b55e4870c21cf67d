"""Which end of a mover pod another attempt follows, and when; when a pending transfer is reported and checked again."""

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from core.contract import CANCELED_ENDING
from core.models.names import ATTEMPT_LABEL
from core.models.phases import Attempts, Interruption, InterruptionCause, RetryRules
from exposer.model import Pending
from nodeagent.transfers.mover_pod import trim_pod
from nodeagent.transfers.retries import (
    FENCE_SECONDS,
    Ending,
    PendingRecord,
    PendingRecords,
    PendingReport,
    backoff_seconds,
    fence_refusal,
    fence_seconds,
    find_interruption,
    refusal,
)
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.transfers import data_upload, disrupted, ended, mover_pod
from tests.support.objects import JsonDict

Cause = InterruptionCause
_HOUR = 3600.0


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
_GARBAGE_COLLECTED = {"phase": "Failed"} | disrupted("DeletionByPodGC")
_EVICTED = {"reason": "Evicted", "message": "low on memory"}


_ENDS: dict[str, tuple[JsonDict, InterruptionCause, str | None, bool]] = {
    "out of memory": (ended(137, "log", "OOMKilled"), Cause.OUT_OF_MEMORY, "OOMKilled (exit code 137)", True),
    "kopia oom": (ended(15, "kopia: no memory", "OOMKilled"), Cause.OUT_OF_MEMORY, "kopia: no memory", True),
    "then evicted": (ended(137, "", "OOMKilled", **_EVICTED), Cause.OUT_OF_MEMORY, "Evicted: low on memory", True),
    "kopia crashed": (ended(15, "kopia died"), Cause.CRASHED, "kopia died", True),
    "storage outage": (ended(16, "no answer"), Cause.STORAGE_UNAVAILABLE, "no answer", True),
    "fenced": (ended(17, "no API"), Cause.FENCED, "no API", True),
    "both": (ended(17, "no API", **disrupted("DeletionByTaintManager")), Cause.FENCED, None, True),
    "killed": (ended(137, "log"), Cause.KILLED, "killed by signal 9 (exit code 137)", True),
    "crashed": (ended(139, "log"), Cause.CRASHED, "killed by signal 11 (exit code 139)", True),
    "SIGTERM early": (ended(143, "log"), Cause.STOPPED, "killed by signal 15 (exit code 143)", True),
    "no message": (ended(1), Cause.CRASHED, "Error (exit code 1)", True),
    "stopped": (ended(14, _STOPPED), Cause.STOPPED, "got SIGTERM; a checkpoint was saved", True),
    "then killed": (ended(137, _STOPPED), Cause.STOPPED, "got SIGTERM; a checkpoint was saved", True),
    "drained": (
        ended(14, _STOPPED, **disrupted("EvictionByEvictionAPI")),
        Cause.EVICTED,
        "a cause; got SIGTERM; a checkpoint was saved",
        True,
    ),
    "shutdown": (ended(14, _STOPPED) | {"reason": "Terminated"}, Cause.STOPPED, None, True),
    "evicted": (ended(137, **_EVICTED), Cause.EVICTED, "Evicted: low on memory", True),
    "failing too": (ended(12, "reset", **_EVICTED), Cause.EVICTED, "Evicted: low on memory", True),
    "no container": ({"phase": "Failed"} | _EVICTED, Cause.EVICTED, "Evicted: low on memory", False),
    "preempted": (
        ended(137, **disrupted("PreemptionByScheduler")),
        Cause.PREEMPTED,
        "PreemptionByScheduler: a cause",
        True,
    ),
    "preempted by the kubelet": (
        ended(137) | {"reason": "Preempting"} | disrupted("TerminationByKubelet"),
        Cause.PREEMPTED,
        None,
        True,
    ),
    "by the kubelet": (ended(137, **disrupted("TerminationByKubelet")), Cause.EVICTED, None, True),
    "another disruption": (ended(137, **disrupted("Other")), Cause.EVICTED, None, True),
    "node deleted": (_GARBAGE_COLLECTED, Cause.NODE_LOST, "DeletionByPodGC: a cause", False),
    "container not found": (ended(137, "", "ContainerStatusUnknown"), Cause.NODE_LOST, None, False),
    "node rebooted": (ended(255, "", "Unknown"), Cause.NODE_LOST, None, False),
    "still runs": (
        _GARBAGE_COLLECTED | {"containerStatuses": [{"state": {"running": {}}}]},
        Cause.NODE_LOST,
        "DeletionByPodGC: a cause",
        False,
    ),
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
    "more", [{}, _EVICTED, disrupted("PreemptionByScheduler")], ids=["plain", "evicted", "preempted"]
)
def test_a_result_counts_also_of_a_lost_pod(message: str, reason: str, more: JsonDict, *, gone: bool) -> None:
    pod = _pod(ended(0, message, reason, **more), deleted=gone)
    assert find_interruption(None if gone else pod, pod if gone else None) is None


@pytest.mark.parametrize(("code", "deleted"), list(product([1, 2, 10, 11, 12, 13, 14, 18, 127, 128], [False, True])))
def test_a_failure_of_the_mover_is_final_also_if_its_pod_is_deleted_then(code: int, *, deleted: bool) -> None:
    pod = _pod(ended(code, "wrong password"), deleted=deleted)
    assert (find_interruption(pod, None), find_interruption(None, pod)) == (None, None)


@pytest.mark.parametrize("status", [{"phase": "Pending"}, _RUNNING, _RUNNING | disrupted("PreemptionByScheduler")])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_pod_that_has_not_ended_is_not_interrupted_yet(status: JsonDict, *, deleted: bool) -> None:
    assert find_interruption(_pod(status, deleted=deleted), None) is None


@pytest.mark.parametrize(
    ("status", "cause", "terminated"),
    [
        pytest.param(None, Cause.DELETED, False, id="unknown"),
        pytest.param(_RUNNING, Cause.DELETED, False, id="ran when last seen"),
        pytest.param(_RUNNING | disrupted("EvictionByEvictionAPI"), Cause.EVICTED, False, id="evicted"),
        pytest.param(_RUNNING | disrupted("DeletionByTaintManager"), Cause.NODE_LOST, False, id="tainted"),
        pytest.param(_RUNNING | {"reason": "NodeLost"}, Cause.NODE_LOST, False, id="node unreachable"),
        pytest.param(ended(14, _STOPPED), Cause.DELETED, True, id="stopped"),
        pytest.param(ended(137), Cause.DELETED, True, id="killed"),
        pytest.param(ended(137, "", "ContainerStatusUnknown"), Cause.NODE_LOST, False, id="container not found"),
        pytest.param(ended(137, "", "OOMKilled"), Cause.OUT_OF_MEMORY, True, id="out of memory"),
        pytest.param(ended(16, "no answer"), Cause.STORAGE_UNAVAILABLE, True, id="storage outage"),
    ],
)
def test_the_loss_of_a_pod_that_is_gone_shows_in_its_last_version(
    status: JsonDict | None, cause: InterruptionCause, *, terminated: bool
) -> None:
    ending = find_interruption(None, None if status is None else _pod(status))
    assert ending is not None
    assert (ending.cause, ending.terminated) == (cause, terminated)
    assert ending.message


@pytest.mark.parametrize(("cause", "limit", "factor"), list(product(Cause, range(4), (1.0, 1.5))))
def test_as_many_retries_are_allowed_as_configured(cause: InterruptionCause, limit: int, factor: float) -> None:
    rules = RetryRules(max_retries=limit, oom_memory_factor=factor)
    given = [not refusal(rules, _interrupted(*[cause] * times), cause, age_seconds=0) for times in range(6)]
    assert given == [cause is Cause.FENCED or times < limit for times in range(6)]


@pytest.mark.parametrize(
    ("rules", "cause", "refused"),
    [
        (RetryRules(), Cause.KILLED, None),
        (RetryRules(max_retries=2), Cause.KILLED, "2 retries (maxRetries)"),
        (RetryRules(max_retries=1), Cause.KILLED, "1 retry (maxRetries)"),
        (RetryRules(max_retries=2), Cause.FENCED, None),
        (RetryRules(enabled=False), Cause.FENCED, "retries are switched off"),
    ],
)
def test_ends_of_fenced_movers_leave_room_for_all_retries(
    rules: RetryRules, cause: InterruptionCause, refused: str | None
) -> None:
    attempts = _interrupted(*[Cause.FENCED] * 5, Cause.KILLED, Cause.KILLED)
    assert refusal(rules, attempts, cause, age_seconds=0) == refused


@pytest.mark.parametrize(("cause", "seconds"), list(product(Cause, [0.0, 4 * _HOUR - 1, 4 * _HOUR, 40 * _HOUR])))
def test_an_old_transfer_is_not_retried(cause: InterruptionCause, seconds: float) -> None:
    text = None if seconds < 4 * _HOUR else "older than 4h0m0s (deadline)"
    assert refusal(RetryRules(), Attempts(), cause, age_seconds=seconds) == text
    assert refusal(RetryRules(deadline=None), Attempts(), cause, age_seconds=seconds) is None
    assert refusal(RetryRules(), Attempts(), None, age_seconds=seconds) == text


def test_the_backoff_doubles_up_to_its_maximum_whatever_the_cause() -> None:
    for cause in (Cause.KILLED, Cause.FENCED):
        attempts = [_interrupted(*[cause] * times) for times in (*range(1, 8), 1000)]
        assert [backoff_seconds(RetryRules(), each) for each in attempts] == [30, 60, 120, 240, 480, 600, 600, 600]
        limits = [RetryRules(initial_backoff=timedelta(seconds=9), max_backoff=timedelta(seconds=s)) for s in (0, 5)]
        assert [backoff_seconds(rules, attempts[0]) for rules in limits] == [0, 5]


@pytest.mark.parametrize(("cause", "restores", "terminated"), list(product(Cause, [False, True], [False, True])))
def test_only_a_restore_waits_for_its_last_mover(cause: InterruptionCause, *, restores: bool, terminated: bool) -> None:
    last = Interruption(at=datetime(2026, 1, 2, tzinfo=UTC), cause=cause, terminated=terminated)
    expected = FENCE_SECONDS if restores and not terminated else 0.0
    assert fence_seconds(_interrupted(Cause.NODE_LOST).interrupt(last), restores) == expected
    assert fence_seconds(Attempts(), restores) == 0.0


@pytest.mark.parametrize("terminated", [True, False], ids=["terminated", "may run"])
@pytest.mark.parametrize("pod", ["ours", "another's", "unknown"])
def test_no_attempt_follows_on_a_mover_that_may_run_and_knows_no_attempts(pod: str, *, terminated: bool) -> None:
    mover = _pod(_RUNNING)
    if pod == "ours":
        mover["metadata"]["labels"][ATTEMPT_LABEL] = "1"
    refused = fence_refusal(Ending(Cause.NODE_LOST, "lost", terminated), None if pod == "unknown" else mover)
    assert bool(refused) is (pod == "another's" and not terminated)


NODES = Pending("Unschedulable", "0/3 nodes are available")
OTHERS = Pending("Unschedulable", "0/4 nodes are available")
IMAGE = Pending("ImagePullBackOff", "no such image")
TAINT = Pending("Unschedulable", "0/3 nodes are available: 3 had untolerated taint", blocked=True)
MORE_NODES = Pending("Unschedulable", "0/4 nodes are available: 4 had untolerated taint", blocked=True)
FULL = Pending("Unschedulable", "0/4 nodes are available: 4 Insufficient cpu", blocked=True)
NOTHING, STATUS, ALL = PendingReport(), PendingReport(message=True), PendingReport(message=True, event=True)


_REPORTS: dict[str, list[tuple[float, Pending, PendingReport]]] = {
    "a reason that lasts": [(0.0, NODES, NOTHING), (2.9, NODES, NOTHING), (3.0, NODES, ALL)],
    "once": [(0.0, NODES, NOTHING), (3.0, NODES, ALL), (99.0, NODES, NOTHING)],
    "one reason after another": [(0.0, NODES, NOTHING), (5.0, NODES, ALL), (10.0, IMAGE, NOTHING), (13.0, IMAGE, ALL)],
    "alternating reasons": [(0.0, NODES, NOTHING), (2.0, IMAGE, NOTHING), (4.0, NODES, NOTHING)],
    "another message of one reason": [
        (0.0, NODES, NOTHING),
        (3.0, NODES, ALL),
        (12.9, OTHERS, NOTHING),
        (13.0, OTHERS, STATUS),
    ],
    "blocked": [(0.0, TAINT, ALL)],
    "another cause of a blocked reason": [
        (0.0, TAINT, ALL),
        (5.0, MORE_NODES, NOTHING),
        (10.0, MORE_NODES, STATUS),
        (12.0, FULL, NOTHING),
        (15.0, FULL, ALL),
    ],
}


@pytest.mark.parametrize("table", _REPORTS.values(), ids=_REPORTS)
def test_reports_follow_the_table(table: list[tuple[float, Pending, PendingReport]]) -> None:
    clock, reports = HandClock(), []
    records = PendingRecords(clock)
    for clock.seconds, pending, _ in table:
        reports.append(records.decide_report("a", pending))
        if reports[-1].message:
            records.mark_reported("a", pending)
    assert reports == [report for _, _, report in table]
    # A transfer that is not checked soon is reported immediately.
    assert records.decide_report("b", NODES, immediately=True) == ALL


def test_checks_become_rarer_up_to_every_five_seconds() -> None:
    records = PendingRecords(HandClock())
    assert [records.count_check("a") for _ in range(7)] == [0.25, 0.75, 1, 2, 4, 5, 5]


def test_the_next_step_of_the_same_reason_is_checked_soon_and_does_not_begin_its_grace_period_again() -> None:
    clock = HandClock(1.0)
    records = PendingRecords(clock)
    for name in ("Pod restore-1", "PersistentVolumeClaim restore-1"):
        records.decide_report("a", Pending("CleaningUp", f"{name} is being deleted"))
        assert [records.count_check("a") for _ in range(3)] == [0.25, 0.75, 1]
        clock.seconds += 1
    assert records.get("a").since_seconds == 1.0


def test_alternating_reasons_are_no_busy_loop() -> None:
    clock, checks = HandClock(), 0
    records = PendingRecords(clock)
    while clock.seconds < 600:
        records.decide_report("a", NODES if checks % 2 else IMAGE)
        clock.seconds += records.count_check("a")
        checks += 1
    # Every five seconds, and ten quick ones a minute.
    assert checks <= 600 / 5 + 10 * 10


@pytest.mark.parametrize(
    ("pending", "pause", "paused"),
    [
        pytest.param(NODES, 2, 60.0, id="the same"),
        pytest.param(OTHERS, 0.25, 0.0, id="another message"),
        pytest.param(IMAGE, 0.25, 0.0, id="another reason"),
    ],
)
def test_a_change_that_is_not_reported_is_checked_soon(pending: Pending, pause: float, paused: float) -> None:
    records = PendingRecords(HandClock())
    records.observe("a", NODES)
    for _ in range(3):
        records.count_check("a")
    records.pause_checks("a", 60.0)
    records.observe("a", pending)
    assert (records.get("a").current.message, records.paused_seconds("a")) == (pending.message, paused)
    assert records.count_check("a") == pause


def test_another_reason_ends_a_pause_and_another_message_does_not() -> None:
    records = PendingRecords(HandClock())
    records.decide_report("a", NODES)
    records.pause_checks("a", 60.0)
    records.decide_report("a", OTHERS)
    assert records.paused_seconds("a") == 60.0
    records.decide_report("a", IMAGE)
    assert records.paused_seconds("a") == 0.0


def test_the_first_report_is_due_after_the_grace_period() -> None:
    clock = HandClock(10.0)
    records, seconds = PendingRecords(clock), []
    records.decide_report("a", NODES)
    for clock.seconds in (10.0, 12.0, 99.0):
        seconds.append(records.seconds_to_report("a"))
    assert seconds == [3.0, 1.0, 0.0]


@pytest.mark.parametrize("skew", [timedelta(hours=24), timedelta(hours=-24)], ids=["a day ahead", "a day behind"])
def test_an_operation_is_measured_from_its_first_observation(skew: timedelta) -> None:
    clock = HandClock(100.0, skew)
    records = PendingRecords(clock)
    assert records.operation_seconds("a", "deletion of x") == 0.0
    clock.seconds = 101.0
    records.decide_report("a", NODES)
    assert records.operation_seconds("a", "deletion of x") == 1.0
    clock.seconds = 400.0
    assert records.operation_seconds("a", "deletion of x") == 300.0
    clock.seconds = 700.0
    assert records.operation_seconds("a", "deletion of x") == 600.0
    assert records.operation_seconds("a", "readiness of y") == 0.0


def test_records_of_several_transfers_are_separate_and_can_be_forgotten() -> None:
    records = PendingRecords(HandClock())
    for uid in ("a", "b", "c"):
        records.decide_report(uid, NODES)
        records.operation_seconds(uid, "cleanup")
    records.operation_seconds("never reported", "cleanup")
    records.mark_reported("c", NODES)
    assert [records.get(uid).reported for uid in ("b", "c")] == [PendingRecord().reported, NODES]
    records.forget("a")
    assert [records.get(uid).current.message for uid in ("a", "b")] == ["", NODES.message]
    records.retain({"c"})
    assert (list(records._records), list(records._operations._observed)) == (["c"], ["c"])
