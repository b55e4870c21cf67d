"""When shares of a repository are read, which volume is restored next, and what is known and said of both."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from core.models.verification import SHARES, Verification, VerificationOutcome, VerifiedShare, VerifiedSnapshot
from nodeagent.config.windows import VerificationPlan, Window, parse_time_zone
from nodeagent.maintenance.restore_tests import RestorableCopy, RestoreTests, choose_copy
from nodeagent.maintenance.rules import CLOCKS, Hold
from nodeagent.maintenance.verification import (
    RepositoryVerification,
    VerificationView,
    VerifiedCopy,
    after_job,
    after_restore_test,
    choose_shares,
    decide_restore_test,
    decide_verification,
    describe_damage,
    describe_unnamed,
    least_shares,
    proves,
)

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_UTC = parse_time_zone("UTC")
_PASSED, _FAILED = VerificationOutcome.PASSED, VerificationOutcome.FAILED

PLAN = VerificationPlan(30 * DAY)
VIEW = VerificationView(NOW, PLAN)


@pytest.mark.parametrize(
    ("changes", "hold"),
    [
        ({}, None),
        ({"job_unfinished": True}, Hold.JOB_UNFINISHED),
        ({"has_backups": False}, Hold.IDLE),
        ({"ready_once": False}, Hold.NEVER_READY),
        ({"location_hold": Hold.LOCATION_MISSING}, Hold.LOCATION_MISSING),
        ({"location_hold": Hold.LOCATION_UNAVAILABLE}, Hold.LOCATION_UNAVAILABLE),
        # It only reads.
        ({"location_hold": Hold.LOCATION_READ_ONLY}, None),
        ({"running_jobs": 1}, Hold.CONCURRENCY),
        ({"windows": (Window("0 22 * * *", _UTC, 8 * HOUR),)}, Hold.WINDOW),
        ({"plan": replace(PLAN, windows=(Window("0 11 * * *", _UTC, 2 * HOUR),))}, None),
        ({"record": RepositoryVerification(failures=1, failed_at=NOW - timedelta(minutes=4))}, Hold.BACK_OFF),
        ({"record": RepositoryVerification(failures=1, failed_at=NOW - timedelta(minutes=5))}, None),
        ({"record": RepositoryVerification(shares={str(share): NOW for share in range(SHARES)})}, Hold.NOT_DUE),
    ],
)
def test_what_holds_a_verification(changes: dict[str, Any], hold: Hold | None) -> None:
    assert decide_verification(replace(VIEW, **changes)).hold is hold


def _simulate(plan: VerificationPlan, days: int, *, most: int) -> tuple[list[datetime], timedelta]:
    """Look every two hours; return when Jobs ran, and the longest time in which a share was not read."""
    record, jobs, longest = RepositoryVerification(), list[datetime](), timedelta()
    for hour in range(0, days * 24, 2):
        now = NOW + hour * HOUR
        view = VerificationView(now, plan, record)
        if decide_verification(view).hold is None:
            read = choose_shares(view)[: max(most, least_shares(view))]
            jobs.append(now)
            record = _read(record, now, *read)
        longest = max([longest, *(now - (at or NOW) for at in record.read_at)])
    return jobs, longest


def _read(record: RepositoryVerification, at: datetime, *shares: int) -> RepositoryVerification:
    found = [VerifiedShare(share=share) for share in shares]
    return after_job(record, at, found, damaged=[], failure=None, at=at)


@pytest.mark.parametrize(
    ("plan", "most", "jobs_in_a_period"),
    [
        pytest.param(PLAN, 1, 17, id="a large repository is read in sixteen pieces"),
        pytest.param(PLAN, SHARES, 1.1, id="a small one in one piece"),
        pytest.param(VerificationPlan(28 * DAY, Window("0 2 * * 6", _UTC, timedelta())), 1, 4, id="every Saturday"),
        pytest.param(VerificationPlan(30 * DAY, Window("0 2 * * *", _UTC, timedelta())), 1, 17, id="every night"),
        pytest.param(
            VerificationPlan(30 * DAY, windows=(Window("0 22 * * 6", _UTC, 8 * HOUR),)), 1, 5, id="in a window a week"
        ),
    ],
)
def test_each_share_is_read_once_in_a_period(plan: VerificationPlan, most: int, jobs_in_a_period: float) -> None:
    jobs, longest = _simulate(plan, 3 * plan.period.days, most=most)
    assert longest <= plan.period
    assert len(jobs) <= 3 * jobs_in_a_period + 1


def test_a_snapshot_is_proven_once_every_share_was_read_after_it() -> None:
    record = RepositoryVerification()
    for share in range(SHARES):
        record = _read(record, NOW + share * HOUR, share)
    assert record.proven_at == NOW
    assert proves(record, NOW - CLOCKS, None)
    # By a clock that is behind: it was completed later.
    assert not proves(record, NOW - CLOCKS / 2, None)
    assert not proves(record, NOW - DAY, Verification(at=NOW - CLOCKS / 2, outcome=_FAILED))
    assert not proves(record, NOW + HOUR / 2, None)
    assert proves(record, NOW - DAY, Verification(at=NOW - HOUR, outcome=_FAILED))
    # Some shares were read before it was recorded.
    assert not proves(record, NOW - DAY, Verification(at=NOW + HOUR, outcome=_PASSED))
    # New data changes nothing that was read: only the one new share is missing.
    assert proves(_read(record, NOW + DAY, 0), NOW + HOUR / 2, None)


def test_a_job_that_failed_leaves_what_was_read_and_is_tried_again_later_each_time() -> None:
    record = _read(RepositoryVerification(), NOW, 3)
    delays = []
    for number in range(1, 14):
        record = after_job(
            record, NOW + number * HOUR, [], damaged=[], failure="no answer" * 1000, at=NOW, memory_bytes=5
        )
        retry = decide_verification(VerificationView(NOW, PLAN, record)).wait_until
        delays.append(retry - NOW if retry else None)
    assert record.read_at[3] == NOW
    assert (delays[0], delays[1], delays[-1]) == (5 * HOUR / 60, 10 * HOUR / 60, PLAN.period / SHARES)
    assert (record.failures, record.memory_bytes, len(record.message)) == (13, 5, 1000)
    assert len(record.to_json()) < 2000
    after = _read(record, NOW + DAY, 4)
    assert (after.failures, after.memory_bytes, after.message, after.outcome) == (0, 5, "", _PASSED)


def test_times_of_a_clock_that_was_wrong_hold_nothing() -> None:
    ahead = _read(RepositoryVerification(), NOW + 400 * DAY, *range(SHARES))
    assert decide_verification(VerificationView(NOW, PLAN, ahead)).hold is Hold.NOT_DUE
    record = ahead.before(NOW)
    assert (record.job, record.proven_at) == (None, None)
    assert decide_verification(VerificationView(NOW, PLAN, record)).hold is None
    damaged = after_job(ahead, NOW + 400 * DAY, [], damaged=["PVC shop/data"], failure=None, at=NOW)
    right = _read(damaged.before(NOW), NOW + DAY, *range(SHARES))
    assert (right.outcome, right.damaged, right.damaged_at) == (_PASSED, [], None)
    failed = after_job(ahead, NOW, [], damaged=[], failure="no answer", at=NOW + 400 * DAY)
    later = NOW + PLAN.period / SHARES
    assert decide_verification(VerificationView(later, PLAN, failed.before(later))).hold is None


def test_damage_stays_until_all_was_read_again() -> None:
    all_shares = [VerifiedShare(share=share) for share in range(SHARES)]
    texts = [f"PVC shop/{number}" for number in range(20)]
    damaged = after_job(RepositoryVerification(), NOW, all_shares, damaged=texts, failure=None, at=NOW)
    assert (damaged.outcome, len(damaged.damaged)) == (_FAILED, 10)
    later = _read(damaged, NOW + DAY, *range(SHARES - 1))
    assert (later.outcome, len(later.damaged)) == (_FAILED, 10)
    assert later.at == NOW + DAY
    right = _read(later, NOW + 2 * DAY, SHARES - 1)
    assert (right.outcome, right.damaged, right.damaged_at) == (_PASSED, [], None)


def _copy(volume: str, day: int, outcome: VerificationOutcome | None, *, last: bool | None = None) -> VerifiedCopy:
    found = (
        None if outcome is None else VerifiedSnapshot(id="k1", outcome=outcome, faults=["db/wal: invalid\nchecksum"])
    )
    verified = None if last is None else Verification(at=NOW, outcome=_PASSED if last else _FAILED)
    return VerifiedCopy("shop", volume, f"backup {volume}-{day}", NOW + day * DAY, found, verified)


def test_damage_names_volumes_files_and_the_copies_that_are_right() -> None:
    copies = [
        _copy("data", 1, _PASSED),
        _copy("data", 2, _FAILED),
        _copy("data", 3, None, last=True),
        _copy("data", 4, None),
        _copy("logs", 1, _FAILED, last=True),
        _copy("web", 1, _PASSED),
    ]
    assert describe_damage(copies) == [
        "PVC shop/data: damaged: backup data-2: db/wal: invalid checksum; still right: backup data-3, backup data-1",
        "PVC shop/logs: damaged: backup logs-1: db/wal: invalid checksum; no copy is known to be right",
    ]


def test_damage_in_snapshots_without_a_backup_is_named_too() -> None:
    found = [
        VerifiedSnapshot(id="k1", outcome=_PASSED),
        VerifiedSnapshot(id="k2", outcome=_FAILED, faults=["db: invalid\nchecksum"]),
        VerifiedSnapshot(id="k3"),
    ]
    text = "kopia snapshots without a backup in this cluster: damaged: k2: db: invalid checksum"
    assert describe_unnamed(found) == [text]
    assert describe_unnamed(found[:1]) == []


_PLAN = VerificationPlan(30 * DAY, restore_test=True)


def _copies(*claims: str) -> list[RestorableCopy]:
    return [RestorableCopy(claim, NOW, "DataUpload", f"{claim}-1") for claim in claims]


def _choose(tests: RestoreTests, copies: Sequence[RestorableCopy]) -> str | None:
    found = choose_copy(tests, copies)
    return found.name if found is not None else None


def _test_all(copies: Sequence[RestorableCopy], rounds: int) -> list[str]:
    """Return the PVCs in the order in which they are tested, each test of which finds something out."""
    tests, order = RestoreTests(), list[str]()
    for number in range(rounds):
        copy = choose_copy(tests, copies)
        assert copy is not None
        order.append(copy.claim)
        tests = tests.found(NOW + number * HOUR, copy.claim, _PASSED).only({one.claim for one in copies})
    return order


def test_each_volume_has_its_turn_and_a_new_one_the_next() -> None:
    assert _test_all(_copies("c", "a", "b"), 7) == ["a", "b", "c", "a", "b", "c", "a"]
    tests = RestoreTests().found(NOW, "b", _PASSED).found(NOW + HOUR, "c", _FAILED)
    assert _choose(tests, _copies("a", "b", "c")) == "a-1"
    assert _choose(tests.found(NOW + DAY, "a", _PASSED), _copies("a", "b", "c")) == "b-1"


def test_none_is_forgotten_though_more_are_tested_than_are_remembered() -> None:
    copies = _copies(*(f"{number:03}" for number in range(250)))
    order = _test_all(copies, 500)
    assert order == [copy.claim for copy in copies] * 2


def test_the_newest_copy_is_restored() -> None:
    old, new = (RestorableCopy("a", NOW + day * DAY, "DataUpload", f"a-{day}") for day in (1, 2))
    assert _choose(RestoreTests(), [new, old]) == "a-2"
    assert _choose(RestoreTests(), []) is None


def test_a_volume_that_cannot_be_restored_does_not_keep_the_others_from_it() -> None:
    tests, tried = RestoreTests(), list[str | None]()
    for number in range(5):
        copy = choose_copy(tests, _copies("a", "b", "c"))
        assert copy is not None
        tried.append(copy.claim)
        tests = tests.failed(NOW + number * HOUR, copy.claim, "no room" * 1000, NOW)
    assert tried == ["a", "a", "a", "b", "c"]
    assert (tests.failures, tests.at, len(tests.message)) == (5, None, 1000)
    after = tests.found(NOW + DAY, "a", _PASSED)
    assert (after.failures, after.failed_at, after.message, after.tried) == (0, None, "", "a")


@pytest.mark.parametrize(
    ("plan", "tests", "hold"),
    [
        (_PLAN, RestoreTests(), None),
        (replace(_PLAN, restore_test=False), RestoreTests(), Hold.OFF),
        (_PLAN, RestoreTests(at=NOW - 28 * DAY), Hold.NOT_DUE),
        (_PLAN, RestoreTests(at=NOW - 29 * DAY), None),
        (_PLAN, RestoreTests(failures=1, failed_at=NOW - HOUR / 20), Hold.BACK_OFF),
        (_PLAN, RestoreTests(failures=1, failed_at=NOW - HOUR / 2), None),
        (replace(_PLAN, windows=(Window("0 22 * * *", parse_time_zone("UTC"), HOUR),)), RestoreTests(), Hold.WINDOW),
    ],
)
def test_one_volume_is_restored_in_a_period(plan: VerificationPlan, tests: RestoreTests, hold: Hold | None) -> None:
    view = VerificationView(NOW, plan, RepositoryVerification(restore_tests=tests))
    assert decide_restore_test(view).hold is hold
    assert decide_restore_test(replace(view, running_jobs=1)).hold is (hold or Hold.CONCURRENCY)


def test_with_a_schedule_it_begins_at_its_starts() -> None:
    plan = replace(_PLAN, period=7 * DAY, starts=Window("0 2 * * 6", parse_time_zone("UTC"), timedelta()))
    record, began = RepositoryVerification(), list[datetime]()
    for hour in range(24 * 7 * 4):
        now = NOW + hour * HOUR
        if decide_restore_test(VerificationView(now, plan, record)).hold is None:
            began.append(now)
            record = after_restore_test(record, record.tests.found(now, "a", _PASSED), damaged=[], at=now)
    # The start that was missed, then each Saturday.
    assert [one.isoweekday() for one in began] == [3, 6, 6, 6, 6]


def test_damage_stays_with_that_of_shares() -> None:
    known = RepositoryVerification(damaged=["PVC shop/b"], damaged_at=NOW, outcome=_FAILED)
    tests = RestoreTests().found(NOW + DAY, "a", _FAILED)
    after = after_restore_test(known, tests, damaged=["PVC shop/a"], at=NOW + 2 * DAY)
    assert (after.damaged, after.damaged_at, after.at) == (["PVC shop/a", "PVC shop/b"], NOW + DAY, NOW + 2 * DAY)
    assert after_restore_test(known, tests, damaged=[], at=NOW + 2 * DAY).damaged_at == NOW


def test_times_of_restore_tests_by_a_clock_that_was_wrong_hold_nothing() -> None:
    ahead = RestoreTests().found(NOW + 400 * DAY, "a", _PASSED)
    record = RepositoryVerification(restore_tests=ahead).before(NOW)
    assert decide_restore_test(VerificationView(NOW, _PLAN, record)).hold is None
    assert record.tests == structs.replace(ahead, at=None, tested={}, job=None)
    assert RepositoryVerification.from_json(record.to_json()) == record
