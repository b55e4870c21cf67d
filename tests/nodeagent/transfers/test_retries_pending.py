"""When a pending reason is reported, and when a pending transfer is checked again."""

from dataclasses import replace
from datetime import timedelta

import pytest

from exposer.model import Pending
from nodeagent.transfers.retries import PendingRecord, PendingRecords, PendingReport, decide_report, mark_reported
from tests.nodeagent.support.hand_clock import HandClock

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
    record, reports = PendingRecord(), []
    for now, pending, _ in table:
        record, report = decide_report(record, pending, now)
        if report.message:
            record = mark_reported(record, pending, now)
        reports.append(report)
    assert reports == [report for _, _, report in table]


def test_a_transfer_that_is_not_checked_soon_is_reported_immediately() -> None:
    assert decide_report(PendingRecord(), NODES, 0.0, immediately=True)[1] == ALL


def test_a_rule_changes_no_record_in_place() -> None:
    before = PendingRecord(current=NODES, checks=2)
    copy = replace(before)
    decide_report(before, IMAGE, 9.0)
    mark_reported(before, IMAGE, 9.0)
    assert before == copy


def test_checks_become_rarer_up_to_every_five_seconds() -> None:
    records = PendingRecords(HandClock())
    assert [records.count_check("a") for _ in range(7)] == [0.25, 0.75, 1, 2, 4, 5, 5]


def test_the_next_step_of_the_same_reason_is_checked_soon() -> None:
    records = PendingRecords(HandClock())
    for name in ("Pod restore-1", "PersistentVolumeClaim restore-1"):
        records.decide_report("a", Pending("CleaningUp", f"{name} is being deleted"))
        assert [records.count_check("a") for _ in range(3)] == [0.25, 0.75, 1]


def test_another_step_of_the_same_reason_does_not_begin_its_grace_period_again() -> None:
    record, _ = decide_report(PendingRecord(), Pending("CleaningUp", "Pod restore-1 is being deleted"), 1.0)
    other = Pending("CleaningUp", "PersistentVolumeClaim restore-1 is being deleted")
    assert decide_report(record, other, 2.0)[0].since_seconds == 1.0


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


def test_records_of_several_transfers_are_separate_and_can_be_forgotten() -> None:
    records = PendingRecords(HandClock())
    records.decide_report("a", NODES)
    assert [records.get(uid).current.message for uid in ("a", "b")] == [NODES.message, ""]
    assert records.get("a").reported.reason == ""
    records.mark_reported("a", NODES)
    assert records.get("a").reported == NODES
    records.forget("a")
    assert records.get("a") == PendingRecord()


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


def test_nothing_is_remembered_of_transfers_that_are_forgotten() -> None:
    records = PendingRecords(HandClock())
    for uid in ("a", "b", "c"):
        records.decide_report(uid, NODES)
        records.operation_seconds(uid, "cleanup")
    records.operation_seconds("never reported", "cleanup")
    records.forget("a")
    records.retain({"c"})
    assert (list(records._records), len(records._operations)) == (["c"], 1)
