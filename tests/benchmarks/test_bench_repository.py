"""The benchmark of maintenance: what it counts, and how it judges. No test checks what it measured."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from benchmarks.repository.bucket import Bucket
from benchmarks.repository.care import Care
from benchmarks.repository.clock import SimulatedClock
from benchmarks.repository.leaders import JobCounts, LeaderPlan, count_jobs
from benchmarks.repository.months import Months, Sample, levels_off
from benchmarks.repository.neglected import Neglected
from benchmarks.repository.report import Report
from benchmarks.repository.schedule import Schedule
from core.contract import MaintenanceMode, MaintenanceResult
from core.models.storage import MaintenanceEntry
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.s3server import S3Server

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)


def test_an_idle_repository_gets_one_job_a_week_and_a_busy_one_nearly_one_an_hour_with_any_leaders() -> None:
    counts = count_jobs(LeaderPlan(repositories=3, idle=2, settle_days=4, days=7))
    assert counts.jobs_per_idle_repository_per_day == pytest.approx(1 / 7)
    assert 18 < counts.jobs_per_busy_repository_per_day < 24
    assert counts.duplicates == 0
    assert counts.leaders == 38


def test_two_full_runs_within_a_day_are_counted() -> None:
    schedule = Schedule()
    assert schedule.begin(_BEGIN) is MaintenanceMode.FULL
    # It is not recorded: so it did not finish.
    assert schedule.begin(_BEGIN + _HOUR) is MaintenanceMode.FULL
    assert schedule.early_fulls == 1


def test_the_stand_in_answers_as_kopias_schedule_would() -> None:
    schedule, now, modes = Schedule(), _BEGIN, []
    for _ in range(27):
        modes.append(mode := schedule.begin(now))
        schedule.finish(mode, now)
        now += _HOUR
    assert modes.count(MaintenanceMode.FULL) == 2
    assert modes.count(MaintenanceMode.QUICK) == 25


class _ScheduledBucket:
    """A bucket whose Jobs do what is due, and need no kopia."""

    def __init__(self) -> None:
        self.clock = SimulatedClock(_BEGIN - datetime.now(UTC))
        self.histories: list[int] = []
        self._schedule = Schedule()

    async def maintain(self, history: Sequence[MaintenanceEntry], **_: object) -> MaintenanceResult:
        self.histories.append(len(history))
        began = self.clock.now()
        return self._schedule.finish(self._schedule.begin(began), began)


async def test_a_deletion_is_followed_by_four_full_runs_and_then_by_none() -> None:
    bucket = _ScheduledBucket()
    care = Care(cast(Bucket, bucket), _HOUR, changes=1)
    end = bucket.clock.now() + timedelta(days=9)
    modes = [result.mode async for result in care.until(end)]
    assert modes == [MaintenanceMode.FULL] * 4
    assert bucket.histories == [0, 1, 2, 3]
    assert bucket.clock.now() >= end


def test_a_simulated_clock_does_not_go_back() -> None:
    clock = SimulatedClock(timedelta(days=-10))
    later = clock.now() + timedelta(days=2)
    clock.move_to(later)
    clock.move_to(later - _HOUR)
    assert later <= clock.now() < datetime.now(UTC) - timedelta(days=7)


def test_an_object_gets_the_time_of_the_storages_clock(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    written = tmp_path / "bucket" / "a b"
    written.touch()
    clock = SimulatedClock(timedelta(days=-10))
    S3Proxy(S3Server("http://127.0.0.1", tmp_path), 0, clock=clock).stamp("/bucket/a%20b?x=1")
    assert written.stat().st_mtime == pytest.approx(clock.now().timestamp(), abs=3600)


@pytest.mark.parametrize(
    ("sizes", "blobs", "good"),
    [
        ([1, 5, 9, 9, 9, 9], [10, 90, 90, 95, 90, 99], True),
        ([1, 5, 9, 9, 9, 10], [1] * 6, False),
        ([9] * 6, [90, 90, 90, 90, 90, 120], False),
        ([9] * 6, [600] * 6, False),
    ],
    ids=["level", "bytes grow", "index blobs grow", "too many index blobs"],
)
def test_levelling_off_is_judged_by_the_last_two_thirds(sizes: list[int], blobs: list[int], *, good: bool) -> None:
    samples = [Sample(size, count, 9999) for size, count in zip(sizes, blobs, strict=True)]
    assert levels_off(samples) is good


_JOB = MaintenanceResult(mode=MaintenanceMode.FULL, seconds=40.0, peak_bytes=300 << 20, index_blobs=7, contents=9)
_GOOD = Report(
    Neglected(2000, 10000, [50.0, 52.0], [5.0, 6.0], 10, [0.0, 0.95], [20, 11], [_JOB]),
    JobCounts(0.14, 22.0, 0, 5, 70),
    Months([Sample(9, 9, 9)] * 6, 5, 5),
)


def test_the_last_line_has_all_figures_and_a_missed_target_is_named() -> None:
    assert json.loads(_GOOD.last_line()) == {
        "open_s_before": 51.0,
        "open_s_after": 5.5,
        "full_s": 40.0,
        "peak_mib": 300.0,
        "reclaimed_share": 0.95,
        "jobs_per_idle_repository_per_day": 0.14,
        "duplicates": 0,
        "months_level_off": True,
    }
    assert _GOOD.missed() == []
    assert all(line.count(" | ") == 2 for line in _GOOD.lines())
    worse = replace(_GOOD, neglected=replace(_GOOD.neglected, opened_after=[16.0], reclaimed=[0.89]))
    assert worse.missed() == ["open_s_after", "reclaimed_share"]
    assert replace(_GOOD, counts=replace(_GOOD.counts, duplicates=1)).missed() == ["duplicates"]
