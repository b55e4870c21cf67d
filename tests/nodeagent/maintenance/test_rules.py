"""When a repository is maintained: what forbids it, when it is due, windows and other Jobs."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from core.contract import MaintenanceMode
from core.models.storage import BackupStorageLocation, MaintenanceEntry, MaintenanceOutcome
from nodeagent.config.windows import Window, parse_time_zone
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView, decide_maintenance, find_location_hold
from nodeagent.runtime.settings import MaintenanceSwitch

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)

CURRENT = MaintenanceRecord(
    at=NOW - 3 * HOUR,
    mode=MaintenanceMode.QUICK,
    seconds=60.0,
    fingerprint="now",
    fulls_since_change=4,
    last_full=NOW - DAY,
    next_quick=NOW - 2 * HOUR,
    next_full=NOW + 10 * HOUR,
)
"""Of a repository that has not changed, and was maintained four times since it has."""

DUE = MaintenanceView(
    now=NOW,
    created_at=NOW - 30 * DAY,
    frequency=HOUR,
    last_maintenance=NOW - 3 * HOUR,
    record=CURRENT,
    fingerprint="changed",
    inputs="inputs",
)
"""It is due since two hours, as quick maintenance is in kopia."""


def decide(view: MaintenanceView = DUE, **changes: Any) -> Decision:
    return decide_maintenance(replace(view, **changes))


def with_record(**changes: Any) -> MaintenanceRecord:
    return replaced(CURRENT, **changes)


def failed(*hours_ago: float) -> tuple[MaintenanceEntry, ...]:
    return tuple(entry(MaintenanceOutcome.FAILED, hours) for hours in hours_ago)


def entry(result: MaintenanceOutcome | None, hours_ago: float) -> MaintenanceEntry:
    start = NOW - hours_ago * HOUR
    complete = start if result is MaintenanceOutcome.SUCCEEDED else None
    return MaintenanceEntry(result=result, start_timestamp=start, complete_timestamp=complete)


FORBIDDEN: dict[Hold, dict[str, Any]] = {
    Hold.OFF: {"switch": MaintenanceSwitch.OFF},
    Hold.SERVER: {"server": True},
    Hold.JOB_UNFINISHED: {"job_unfinished": True},
    Hold.SERVER_SEEN: {"no_server_for": 59 * MINUTE},
    Hold.NEVER_READY: {"ready_once": False},
    Hold.LOCATION_MISSING: {"location_hold": Hold.LOCATION_MISSING},
    Hold.LOCATION_READ_ONLY: {"location_hold": Hold.LOCATION_READ_ONLY},
    Hold.LOCATION_UNAVAILABLE: {"location_hold": Hold.LOCATION_UNAVAILABLE},
    Hold.FOREIGN: {"record": with_record(foreign_at=NOW - 2 * DAY)},
    Hold.BLOCKED: {"record": with_record(blocked_inputs="inputs", last_failure=NOW - 3 * HOUR)},
    Hold.BACK_OFF: {"entries": failed(0)},
    Hold.IDLE: {"fingerprint": "now"},
    Hold.NOT_DUE: {"last_maintenance": NOW - 59 * MINUTE},
    Hold.WINDOW: {"windows": (Window("0 22 * * *", parse_time_zone("UTC"), HOUR),)},
    Hold.CONCURRENCY: {"running_jobs": 1},
}
"""What alone forbids a maintenance, in the order in which it is reported."""

WITHOUT_TIME = {
    Hold.OFF,
    Hold.SERVER,
    Hold.JOB_UNFINISHED,
    Hold.NEVER_READY,
    Hold.LOCATION_MISSING,
    Hold.LOCATION_READ_ONLY,
    Hold.LOCATION_UNAVAILABLE,
    Hold.CONCURRENCY,
}


def test_every_hold_is_covered() -> None:
    assert set(FORBIDDEN) == set(Hold) - {Hold.REJECTED, Hold.NOT_OBSERVED}


@pytest.mark.parametrize("hold", FORBIDDEN)
def test_each_hold_alone_forbids_a_maintenance(hold: Hold) -> None:
    decision = decide(**FORBIDDEN[hold])
    assert decision.hold is hold
    assert (decision.wait_until is None) is (hold in WITHOUT_TIME)
    assert decision.wait_until is None or decision.wait_until > NOW
    assert not decision.may_be_full


def test_of_two_holds_the_first_one_is_reported_whatever_else_holds() -> None:
    """All pairs whose fields differ."""
    pairs = 0
    for first, second in itertools.combinations(FORBIDDEN, 2):
        if FORBIDDEN[first].keys() & FORBIDDEN[second].keys():
            continue
        pairs += 1
        # A repository that fails is not idle.
        expected = Hold.BACK_OFF if (first, second) == (Hold.BACK_OFF, Hold.IDLE) else first
        assert decide(**FORBIDDEN[first], **FORBIDDEN[second]).hold is expected, (first, second)
    assert pairs > 90


@pytest.mark.parametrize("hold", FORBIDDEN)
def test_the_mode_on_waits_for_no_server_to_stay_away_and_overrides_other_clusters(hold: Hold) -> None:
    decision = decide(**({"switch": MaintenanceSwitch.ON} | FORBIDDEN[hold]))
    assert decision.hold is (None if hold in {Hold.SERVER_SEEN, Hold.FOREIGN} else hold)


def test_a_hold_that_time_ends_says_when() -> None:
    assert decide(no_server_for=20 * MINUTE).wait_until == NOW + 40 * MINUTE
    assert decide(no_server_for=HOUR).hold is None
    foreign = with_record(foreign_at=NOW - 2 * DAY)
    assert decide(record=foreign).wait_until == NOW + DAY
    assert decide(record=foreign, now=NOW + DAY).hold is None
    eager = with_record(foreign_at=NOW - 19 * HOUR, full_interval_seconds=21_600.0)
    assert decide(record=eager).hold is None
    blocked = with_record(blocked_inputs="inputs", last_failure=NOW - 3 * HOUR)
    assert decide(record=blocked, entries=failed(3)).hold is Hold.BLOCKED
    assert decide(record=blocked, entries=failed(3), inputs="others").hold is None


@pytest.mark.parametrize(
    ("last_maintenance", "due_at"),
    [(None, NOW - 30 * DAY + HOUR), (NOW - 2 * HOUR, NOW - HOUR), (NOW, NOW + HOUR)],
    ids=["never", "two hours ago", "now"],
)
def test_without_a_record_the_status_decides(last_maintenance: datetime | None, due_at: datetime) -> None:
    decision = decide(last_maintenance=last_maintenance, record=MaintenanceRecord(), fingerprint="now")
    assert decision.due_at == due_at
    assert decision.hold is (None if due_at <= NOW else Hold.NOT_DUE)
    assert decision.may_be_full is (due_at <= NOW)


@pytest.mark.parametrize("last_hours", [0.5, 3.0])
@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("fulls", range(5))
@pytest.mark.parametrize("quick_hours", [None, -2.0, 4.0])
@pytest.mark.parametrize("full_hours", [None, -2.5, 3.0, 10.0])
def test_quick_as_due_after_a_change_and_full_until_four_have_succeeded(
    *, last_hours: float, changed: bool, fulls: int, quick_hours: float | None, full_hours: float | None
) -> None:
    """Enumerated: a hundred and twenty states of record and schedule."""
    quick_at = None if quick_hours is None else NOW + quick_hours * HOUR
    full_at = None if full_hours is None else NOW + full_hours * HOUR
    earliest = NOW - last_hours * HOUR + HOUR
    record = with_record(fulls_since_change=fulls, next_quick=quick_at, next_full=full_at)
    decision = decide(
        last_maintenance=earliest - HOUR, record=record, fingerprint="changed" if changed else record.fingerprint
    )
    idle_at = record.last_full + 7 * DAY if record.last_full else NOW
    candidates = [idle_at]
    if changed:
        candidates.append(quick_at or earliest)
    if changed or fulls < 4:
        candidates.append(full_at or earliest)
    due_at = max(earliest, min(candidates))
    assert decision.due_at == due_at
    if due_at <= NOW:
        assert decision.hold is None
        assert decision.may_be_full is (full_at is None or full_at <= NOW)
    else:
        assert decision.hold is (Hold.IDLE if due_at == idle_at else Hold.NOT_DUE)
        assert decision.wait_until == due_at


def test_an_idle_repository_gets_one_full_maintenance_a_week() -> None:
    last_full = NOW - 7 * DAY + MINUTE
    decision = decide(fingerprint="now", record=with_record(last_full=last_full))
    assert (decision.hold, decision.wait_until) == (Hold.IDLE, NOW + MINUTE)
    later = decide(fingerprint="now", record=with_record(last_full=last_full, next_full=NOW), now=NOW + MINUTE)
    assert (later.hold, later.may_be_full) == (None, True)


@pytest.mark.parametrize(("hours", "due"), [(None, False), (24, False), (6, True)])
def test_a_new_full_interval_is_set_also_where_nothing_has_changed(*, hours: int | None, due: bool) -> None:
    wanted = timedelta(hours=hours) if hours is not None else None
    decision = decide(fingerprint="now", new_full_interval=wanted)
    assert decision.hold is (None if due else Hold.IDLE)


@pytest.mark.parametrize(
    ("mode", "next_quick", "next_full", "due_at"),
    [
        # Full was due when quick ran: it is not enabled.
        (MaintenanceMode.QUICK, NOW + HOUR, NOW - DAY, NOW + HOUR),
        (MaintenanceMode.FULL, NOW + HOUR, NOW - DAY, NOW - 2 * HOUR),
        # Quick was due when nothing ran: neither is enabled.
        (MaintenanceMode.NONE, NOW - DAY, NOW - DAY, NOW + 4 * DAY - MINUTE),
        (MaintenanceMode.QUICK, NOW - DAY, NOW + DAY, NOW - 2 * HOUR),
        # It became due while nothing ran, or by the difference of the clocks.
        (MaintenanceMode.NONE, NOW - 3 * HOUR - 10 * MINUTE, NOW + DAY, NOW - 2 * HOUR),
    ],
)
def test_what_is_not_enabled_in_kopia_is_not_asked_for_again_and_again(
    mode: MaintenanceMode, next_quick: datetime, next_full: datetime, due_at: datetime
) -> None:
    record = with_record(
        at=NOW - 3 * HOUR, mode=mode, next_quick=next_quick, next_full=next_full, last_full=NOW - 3 * DAY - MINUTE
    )
    assert decide(record=record).due_at == due_at


@pytest.mark.parametrize(("failures", "minutes"), [(1, 5), (2, 10), (3, 20), (4, 40), (5, 60), (25, 60)], ids=str)
def test_failures_double_the_pause_up_to_the_frequency(failures: int, minutes: int) -> None:
    entries = (entry(MaintenanceOutcome.SUCCEEDED, 9), *failed(*[5] * (failures - 1), 0))
    decision = decide(entries=entries)
    assert (decision.hold, decision.wait_until) == (Hold.BACK_OFF, NOW + minutes * MINUTE)
    assert decide(entries=entries, now=NOW + minutes * MINUTE).hold is None
    last: dict[str, Any] = {"last_maintenance": NOW - 8 * DAY, "record": with_record(at=NOW - 8 * DAY)}
    hourly = decide(entries=entries, frequency=7 * DAY, **last)
    assert hourly.wait_until == NOW + min(5 * 2 ** (failures - 1) * MINUTE, 7 * DAY)


def test_only_failures_since_the_last_success_count() -> None:
    succeeded = entry(MaintenanceOutcome.SUCCEEDED, 3)
    assert decide(entries=(*failed(9, 8, 7), succeeded)).hold is None
    assert decide(entries=(*failed(9, 8, 7), succeeded, *failed(0))).wait_until == NOW + 5 * MINUTE
    assert decide(entries=(*failed(0), entry(None, 0))).hold is None
    assert decide(entries=(MaintenanceEntry(result=MaintenanceOutcome.FAILED),)).hold is None


def test_a_failed_attempt_is_repeated_also_where_nothing_changes_and_may_be_a_full_one() -> None:
    decision = decide(entries=failed(1), fingerprint="now")
    assert (decision.hold, decision.may_be_full) == (None, True)
    last = NOW - 10 * MINUTE
    decision = decide(entries=failed(0.1), last_maintenance=last)
    assert (decision.hold, decision.wait_until) == (Hold.NOT_DUE, last + HOUR)
    # After an attempt that found a wrong clock, once a frequency.
    assert decide(entries=failed(0), record=with_record(retry_at_frequency=True)).wait_until == NOW + HOUR


def test_the_pause_counts_from_the_end_of_a_long_attempt() -> None:
    record = with_record(last_failure=NOW)
    assert decide(entries=failed(6), record=record).wait_until == NOW + 5 * MINUTE
    assert decide(entries=failed(6)).hold is None
    assert decide(entries=failed(-1), record=record).wait_until == NOW + 5 * MINUTE


_TIMES = ("created_at", "last_maintenance", "entries", "at", "last_full", "last_failure", "foreign_at")


@pytest.mark.parametrize("mode", MaintenanceMode)
def test_times_of_a_clock_that_was_wrong_hold_nothing(mode: MaintenanceMode) -> None:
    for wrong in itertools.product([False, True], repeat=len(_TIMES)):
        ahead: dict[str, Any] = dict.fromkeys(itertools.compress(_TIMES, wrong), NOW + 365 * DAY)
        of_view = {name: ahead.pop(name) for name in _TIMES[:3] if name in ahead}
        if "entries" in of_view:
            of_view["entries"] = failed(-365 * 24)
        blocked = "inputs" if "last_failure" in ahead else None
        record = with_record(mode=mode, blocked_inputs=blocked, **ahead)
        assert decide(record=record, **of_view).hold is None, wrong


@pytest.mark.parametrize("last_maintenance", [NOW + HOUR, NOW - DAY], ids=["a clock ahead", "a clock behind"])
def test_no_run_follows_within_a_frequency_of_the_leaders_own_clock(last_maintenance: datetime) -> None:
    record = with_record(at=NOW - 10 * MINUTE)
    assert decide(last_maintenance=last_maintenance, record=record).wait_until == NOW + 50 * MINUTE


def test_what_was_due_while_another_cluster_held_it_is_due_when_that_ends() -> None:
    held = with_record(
        at=NOW - 2 * DAY,
        mode=MaintenanceMode.NONE,
        seconds=0.0,
        foreign_at=NOW - 3 * DAY,
        next_quick=NOW - 3 * DAY,
        next_full=NOW - 3 * DAY,
        last_full=None,
    )
    assert decide(record=held, last_maintenance=NOW - 4 * DAY, now=NOW - MINUTE).hold is Hold.FOREIGN
    assert decide(record=held, last_maintenance=NOW - 4 * DAY).hold is None


NIGHT = Window("0 22 * * *", parse_time_zone("UTC"), 6 * HOUR)


@pytest.mark.parametrize(("due_days", "overdue"), [(0.0, False), (2.9, False), (3.0, True), (9.0, True)], ids=str)
def test_outside_of_the_windows_nothing_starts_however_overdue(*, due_days: float, overdue: bool) -> None:
    due_at = NOW - due_days * DAY
    record = with_record(at=due_at - 2 * HOUR, next_quick=due_at, next_full=NOW + DAY)
    decision = decide(windows=(NIGHT,), record=record, last_maintenance=due_at - 2 * HOUR)
    assert decision == Decision(Hold.WINDOW, NOW + 10 * HOUR, due_at, overdue)
    assert decide(windows=(NIGHT,), record=record, last_maintenance=due_at, now=NOW + 12 * HOUR).hold is None


def test_overdue_depends_on_the_repositorys_own_interval() -> None:
    record = with_record(next_quick=NOW - 18 * HOUR, at=NOW - 20 * HOUR, full_interval_seconds=21_600.0)
    view = replace(DUE, record=record, last_maintenance=NOW - 20 * HOUR, running_jobs=1)
    assert decide(view) == Decision(Hold.CONCURRENCY, None, NOW - 18 * HOUR, overdue=True)
    # However often it is tried again.
    blocked = replaced(record, blocked_inputs="inputs", last_failure=NOW - HOUR)
    expected = Decision(Hold.BLOCKED, NOW - HOUR + 7 * DAY, NOW - 18 * HOUR, overdue=True)
    assert decide(replace(view, record=blocked, entries=failed(19, 1))) == expected


@pytest.mark.parametrize(("running", "most", "held"), [(0, 1, False), (1, 1, True), (1, 2, False), (3, 2, True)])
def test_as_many_jobs_run_as_may(*, running: int, most: int, held: bool) -> None:
    assert (decide(running_jobs=running, max_concurrent_jobs=most).hold is Hold.CONCURRENCY) is held


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        ({}, {}, None),
        ({}, {"phase": "Available"}, None),
        ({}, {"phase": "Unavailable"}, Hold.LOCATION_UNAVAILABLE),
        ({"accessMode": "ReadWrite"}, {}, None),
        ({"accessMode": "ReadOnly"}, {"phase": "Available"}, Hold.LOCATION_READ_ONLY),
        ({"accessMode": "ReadOnly"}, {"phase": "Unavailable"}, Hold.LOCATION_READ_ONLY),
    ],
)
def test_the_hold_of_a_location(spec: dict[str, str], status: dict[str, str], expected: Hold | None) -> None:
    raw = {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"name": "default", "namespace": "velero"},
        "spec": {"provider": "aws", "objectStorage": {"bucket": "b"}} | spec,
        "status": status,
    }
    assert find_location_hold(BackupStorageLocation.parse(raw)) is expected
    assert find_location_hold(None) is Hold.LOCATION_MISSING
