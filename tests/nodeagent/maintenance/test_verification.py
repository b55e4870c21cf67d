"""When shares of a repository are read, what proves a snapshot, and what is said about damage."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from core.models.verification import SHARES, Verification, VerificationOutcome, VerifiedShare, VerifiedSnapshot
from nodeagent.config.windows import VerificationPlan, Window, parse_time_zone
from nodeagent.maintenance.rules import Hold
from nodeagent.maintenance.verification import (
    RepositoryVerification,
    VerificationView,
    VerifiedCopy,
    after_job,
    before,
    choose_shares,
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
    assert proves(record, NOW, None)
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
    assert (after.failures, after.memory_bytes, after.message, after.outcome) == (0, None, "", _PASSED)


def test_times_of_a_clock_that_was_wrong_hold_nothing() -> None:
    ahead = _read(RepositoryVerification(), NOW + 400 * DAY, *range(SHARES))
    assert decide_verification(VerificationView(NOW, PLAN, ahead)).hold is Hold.NOT_DUE
    record = before(ahead, NOW)
    assert (record.job, record.proven_at) == (None, None)
    assert decide_verification(VerificationView(NOW, PLAN, record)).hold is None
    damaged = after_job(ahead, NOW + 400 * DAY, [], damaged=["PVC shop/data"], failure=None, at=NOW)
    right = _read(before(damaged, NOW), NOW + DAY, *range(SHARES))
    assert (right.outcome, right.damaged, right.damaged_at) == (_PASSED, [], None)
    failed = after_job(ahead, NOW, [], damaged=[], failure="no answer", at=NOW + 400 * DAY)
    later = NOW + PLAN.period / SHARES
    assert decide_verification(VerificationView(later, PLAN, before(failed, later))).hold is None


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
