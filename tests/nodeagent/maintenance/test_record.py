"""What the leader remembers about the maintenance of a repository."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from core.contract import MaintenanceMode, MaintenanceResult
from core.models.storage import BackupRepository
from nodeagent.maintenance.record import FailureCause, MaintenanceRecord, RunningJob, after_failure, after_success
from nodeagent.maintenance.rules import record_of
from tests.nodeagent.support.maintenance_scene import repository_object

_KEY = "nodeagent.io/maintenance"
AT = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
QUICK = MaintenanceResult(
    mode=MaintenanceMode.QUICK,
    seconds=20.0,
    contents=100,
    index_blobs=7,
    peak_bytes=1000,
    full_interval_seconds=43_200.0,
    next_quick=AT + HOUR,
    next_full=AT + 12 * HOUR,
)
FULL = replace(QUICK, mode=MaintenanceMode.FULL, peak_bytes=3000, freed_bytes=5)
NONE = MaintenanceResult(mode=MaintenanceMode.NONE, reason="not due", next_quick=AT + HOUR, next_full=AT + 3 * HOUR)


def succeed(record: MaintenanceRecord, result: MaintenanceResult, fingerprint: str = "a") -> MaintenanceRecord:
    return after_success(record, result, fingerprint=fingerprint, at=AT)


def fail(record: MaintenanceRecord, cause: FailureCause, limit_bytes: int | None = None) -> MaintenanceRecord:
    return after_failure(record, cause, inputs="inputs", limit_bytes=limit_bytes, at=AT)


def repository(annotation: str | None) -> BackupRepository:
    raw = repository_object()
    return BackupRepository.parse(raw | {"metadata": raw["metadata"] | {"annotations": {_KEY: annotation}}})


@pytest.mark.parametrize("annotation", [None, "", "{", "[]", '"x"', '{"at": 5}', '{"at": "2026-07-01T12:00:00"}'])
def test_an_invalid_annotation_counts_as_none(annotation: str | None) -> None:
    assert record_of(repository(annotation)) == MaintenanceRecord()


def test_a_record_survives_its_annotation_and_one_without_facts_is_empty() -> None:
    running = RunningJob(name="job", uid="uid", created=AT, fingerprint="b")
    record = replace(fail(succeed(MaintenanceRecord(), FULL), FailureCause.NEEDS_CHANGE), running=running)
    assert record_of(repository(record.to_json())) == record
    assert MaintenanceRecord().to_json() == "{}"
    assert record_of(repository('{"contents": 5, "ofALaterVersion": {}}')) == MaintenanceRecord(contents=5)


def test_a_success_stores_what_kopia_reports() -> None:
    assert succeed(MaintenanceRecord(), QUICK) == MaintenanceRecord(
        at=AT,
        mode=MaintenanceMode.QUICK,
        seconds=20.0,
        fingerprint="a",
        next_quick=AT + HOUR,
        next_full=AT + 12 * HOUR,
        full_interval_seconds=43_200.0,
        contents=100,
        index_blobs=7,
        peak_quick_bytes=1000,
    )


def test_what_was_not_measured_stays_as_it_was_and_zero_is_a_measure() -> None:
    measured = succeed(MaintenanceRecord(), QUICK)
    unknown = succeed(measured, replace(QUICK, contents=None, index_blobs=None))
    assert (unknown.contents, unknown.index_blobs) == (100, 7)
    empty = succeed(measured, replace(QUICK, contents=0, index_blobs=0))
    assert (empty.contents, empty.index_blobs) == (0, 0)


def test_full_ones_are_counted_up_to_four_and_again_after_a_change() -> None:
    record, counts = MaintenanceRecord(), []
    for fingerprint, result in [
        *[("a", FULL)] * 3,
        ("a", QUICK),
        *[("a", FULL)] * 2,
        ("b", QUICK),
        ("b", FULL),
        ("c", FULL),
        ("c", FULL),
    ]:
        record = succeed(record, result, fingerprint)
        counts.append(record.fulls_since_change)
    assert counts == [1, 2, 3, 3, 4, 4, 0, 1, 1, 2]


def test_each_mode_has_its_own_peak_and_keeps_the_others() -> None:
    record = succeed(succeed(MaintenanceRecord(), FULL), QUICK)
    assert (record.peak_full_bytes, record.peak_quick_bytes) == (3000, 1000)
    record = succeed(record, replace(FULL, peak_bytes=0))
    assert (record.peak_full_bytes, record.peak_quick_bytes) == (3000, 1000)


def test_a_run_with_nothing_to_do_leaves_the_change_to_be_maintained() -> None:
    before = succeed(MaintenanceRecord(), FULL)
    after = succeed(before, NONE, "b")
    assert after == replace(
        before, mode=MaintenanceMode.NONE, seconds=0.0, next_quick=NONE.next_quick, next_full=NONE.next_full
    )


def test_foreign_maintenance_is_remembered() -> None:
    record = succeed(MaintenanceRecord(), replace(QUICK, foreign_at=AT - HOUR))
    assert record.foreign_at == AT - HOUR
    assert succeed(record, QUICK).foreign_at == AT - HOUR
    assert succeed(record, replace(QUICK, foreign_at=AT - 2 * HOUR)).foreign_at == AT - HOUR
    assert succeed(record, replace(NONE, foreign_at=AT)).foreign_at == AT


@pytest.mark.parametrize("cause", FailureCause)
def test_a_failure_keeps_all_facts_of_the_last_success(cause: FailureCause) -> None:
    before = succeed(MaintenanceRecord(), FULL)
    after = fail(before, cause, 512)
    assert after == replace(
        before,
        last_failure=AT,
        blocked_inputs="inputs" if cause is FailureCause.NEEDS_CHANGE else None,
        retry_at_frequency=cause is FailureCause.CLOCK_SKEW,
        memory_bytes=1024 if cause is FailureCause.OUT_OF_MEMORY else None,
    )


@pytest.mark.parametrize("result", [QUICK, FULL], ids=["quick", "full"])
def test_a_success_ends_what_a_failure_has_caused(result: MaintenanceResult) -> None:
    record = succeed(MaintenanceRecord(), FULL)
    for cause in FailureCause:
        record = fail(record, cause, 512)
    assert record.memory_bytes == 1024
    record = succeed(record, result)
    assert (record.last_failure, record.blocked_inputs, record.retry_at_frequency, record.memory_bytes) == (
        None,
        None,
        False,
        None,
    )


@pytest.mark.parametrize(("cause", "limit_bytes"), [(FailureCause.OTHER, 1024), (FailureCause.OUT_OF_MEMORY, None)])
def test_another_failure_after_one_of_memory_keeps_the_memory(cause: FailureCause, limit_bytes: int | None) -> None:
    record = fail(fail(MaintenanceRecord(), FailureCause.OUT_OF_MEMORY, 512), cause, limit_bytes)
    assert record.memory_bytes == 1024
