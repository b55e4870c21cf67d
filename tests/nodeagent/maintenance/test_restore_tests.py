"""Which volume of a repository is restored next, when, and what is remembered of it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from core.models.verification import VerificationOutcome
from nodeagent.config.windows import VerificationPlan, Window, parse_time_zone
from nodeagent.maintenance.restore_tests import RestorableCopy, RestoreTests, choose_copy
from nodeagent.maintenance.rules import Hold
from nodeagent.maintenance.verification import (
    RepositoryVerification,
    VerificationView,
    after_restore_test,
    before,
    decide_restore_test,
)

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_PASSED, _FAILED = VerificationOutcome.PASSED, VerificationOutcome.FAILED
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


def test_times_of_a_clock_that_was_wrong_hold_nothing() -> None:
    ahead = RestoreTests().found(NOW + 400 * DAY, "a", _PASSED)
    record = before(RepositoryVerification(restore_tests=ahead), NOW)
    assert decide_restore_test(VerificationView(NOW, _PLAN, record)).hold is None
    assert record.tests == structs.replace(ahead, at=None, tested={}, job=None)
    assert RepositoryVerification.from_json(record.to_json()) == record
