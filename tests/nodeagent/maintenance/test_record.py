"""What the leader remembers about the maintenance of a repository; name, memory and history of its Jobs."""

import hashlib
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.contract import MaintenanceMode, MaintenanceResult
from core.models.storage import BackupRepository, MaintenanceEntry, MaintenanceOutcome
from nodeagent.maintenance import rules
from nodeagent.maintenance.record import FailureCause, MaintenanceRecord, RunningJob, after_failure, after_success
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
    assert rules.record_of(repository(annotation)) == MaintenanceRecord()


def test_a_record_survives_its_annotation_and_one_without_facts_is_empty() -> None:
    running = RunningJob(name="job", uid="uid", created=AT, fingerprint="b")
    record = replace(fail(succeed(MaintenanceRecord(), FULL), FailureCause.NEEDS_CHANGE), running=running)
    assert rules.record_of(repository(record.to_json())) == record
    assert MaintenanceRecord().to_json() == "{}"
    assert rules.record_of(repository('{"contents": 5, "ofALaterVersion": {}}')) == MaintenanceRecord(contents=5)


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


NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MIB = 2**20
_RECORDINGS = Path(__file__).parents[2] / "recordings" / "velero-1.18.2" / "maintenance"


def success(minutes: int) -> MaintenanceEntry:
    start = NOW + timedelta(minutes=minutes)
    return MaintenanceEntry(
        result=MaintenanceOutcome.SUCCEEDED, start_timestamp=start, complete_timestamp=start + SECOND
    )


def failure(minutes: int, message: str = "kopia failed") -> MaintenanceEntry:
    start = NOW + timedelta(minutes=minutes)
    return MaintenanceEntry(result=MaintenanceOutcome.FAILED, start_timestamp=start, message=message)


@pytest.mark.parametrize("frequency", [HOUR, timedelta(days=7), timedelta(seconds=40), timedelta(milliseconds=1)])
@pytest.mark.parametrize("uid", ["7b6c86a8-fa22-43b0-adb8-6532f6220a5e", "b", ""])
def test_a_slot_begins_with_a_second_and_holds_every_moment_of_its_frequency(frequency: timedelta, uid: str) -> None:
    numbers = random.Random(5)
    length_ms = max(1000, int(frequency.total_seconds()) * 1000)
    for _ in range(200):
        moment = NOW + timedelta(microseconds=numbers.randrange(10**14))
        slot_ms = rules.slot_of(moment, frequency, uid)
        assert slot_ms % 1000 == 0
        assert slot_ms <= moment.timestamp() * 1000 < slot_ms + length_ms
        begin = datetime.fromtimestamp(slot_ms / 1000, UTC)
        assert rules.slot_of(begin, frequency, uid) == slot_ms
        assert rules.slot_of(begin + timedelta(milliseconds=length_ms - 1), frequency, uid) == slot_ms
        assert rules.slot_of(begin + timedelta(milliseconds=length_ms), frequency, uid) == slot_ms + length_ms


def test_the_slots_of_repositories_are_spread_over_their_frequency() -> None:
    begins = {rules.slot_of(NOW, HOUR, f"uid-{number}") % 3_600_000 // 600_000 for number in range(100)}
    assert begins == set(range(6))


def test_the_name_is_veleros_and_differs_for_each_attempt() -> None:
    assert rules.job_name("app1-default-kopia", 1795331162000, 0) == "app1-default-kopia-maintain-job-1795331162000"
    assert rules.job_name("app1-default-kopia", 1795331162000, 3) == "app1-default-kopia-maintain-job-1795331162003"
    taken = {rules.job_name("app1-default-kopia", 1795331162000, failures) for failures in (0, 1, 3)}
    assert (
        rules.job_name("app1-default-kopia", 1795331162000, 0, taken) == "app1-default-kopia-maintain-job-1795331162002"
    )


@pytest.mark.parametrize("length", [35, 36, 37, 63, 253])
def test_a_long_name_is_shortened_and_stays_distinct_and_valid(length: int) -> None:
    for cut in "-.":
        repository = (f"namespace-with-a-long-names{cut}and.more-of-it-" * 9)[: length - 1] + "x"
        name = rules.job_name(repository, 1795331162000, 0)
        assert len(name) <= 63
        if length <= 36:
            assert name == f"{repository}-maintain-job-1795331162000"
        else:
            digest = hashlib.sha256(repository.encode()).hexdigest()[:6]
            assert name == f"namespace-with-a-long-names-{digest}-maintain-job-1795331162000"
            assert rules.job_name(f"{repository[:-1]}y", 1795331162000, 0) != name


def test_the_history_is_ordered_and_has_one_entry_for_each_start() -> None:
    entries = (success(0), failure(5), success(10))
    assert rules.merge_history(entries, [failure(5, "another cause"), success(-5)]) == (
        success(-5),
        success(0),
        failure(5, "another cause"),
        success(10),
    )
    assert rules.merge_history(entries, []) == entries
    assert rules.merge_history([], entries) == entries


def test_of_the_history_the_new_entries_and_the_newest_others_are_kept() -> None:
    entries = tuple(success(minute) for minute in range(40))
    assert rules.merge_history(entries[:39], entries[39:]) == entries[15:]
    assert rules.merge_history(entries[1:26], entries[:1]) == (entries[0], *entries[2:26])


def test_only_a_success_has_a_completion_and_only_a_failure_a_message() -> None:
    """A Velero server takes the newest completion for the last maintenance, whatever its result."""
    end = {"start_timestamp": NOW, "complete_timestamp": NOW + HOUR, "message": "text"}
    done, failed = (MaintenanceEntry(result=result, **end) for result in MaintenanceOutcome)  # type: ignore[arg-type] # a table
    (kept,) = rules.merge_history([], [done])
    assert (kept.complete_timestamp, kept.message) == (NOW + HOUR, None)
    (kept,) = rules.merge_history([], [failed])
    assert (kept.complete_timestamp, kept.message) == (None, "text")
    # What was found stays as it is, unless it has no start.
    assert rules.merge_history([failed, MaintenanceEntry(message="no start")], [success(1)]) == (failed, success(1))


def test_the_history_that_velero_wrote_is_continued() -> None:
    raw = json.loads((_RECORDINGS / "backuprepository-two-entries.json").read_text())["items"][0]
    recorded = BackupRepository.parse(raw).status.recent_maintenance
    merged = rules.merge_history(recorded, [failure(0)])
    assert [entry.to_wire() for entry in rules.merge_history(recorded, [])] == raw["status"]["recentMaintenance"]
    # The recording is from November.
    assert merged == (failure(0), *recorded)
    assert rules.count_failures(merged) == 0


def test_failures_are_counted_from_the_last_one() -> None:
    entries = [success(0), failure(1), success(2), failure(3), failure(4)]
    assert [rules.count_failures(tuple(entries[:length])) for length in range(6)] == [0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("next_full", "results", "found", "incomplete"),
    [
        (1, [success], False, False),
        (1, [success], True, True),
        (None, [failure], False, False),
        (3, [failure], False, False),
        (2, [failure], False, True),
        (1, [failure, failure], False, True),
        (1, [failure, success], False, False),
        (3, [failure], True, True),
    ],
)
def test_a_failure_after_full_was_due_left_it_incomplete(
    *, next_full: int | None, results: list[Callable[[int], MaintenanceEntry]], found: bool, incomplete: bool
) -> None:
    entries = tuple(one(minute) for minute, one in enumerate(results, 2))
    due = success(next_full).start_timestamp if next_full is not None else None
    record = MaintenanceRecord(next_full=due, incomplete_full=found)
    assert rules.is_full_incomplete(record, entries) is incomplete


MOST = 4096 * MIB


@pytest.mark.parametrize(
    ("peaks_mib", "may_be_full", "memory_bytes", "request_mib", "limit_mib"),
    [
        ((0, 0), False, 0, 128, 256),
        ((0, 0), True, 0, 256, 512),
        ((100, 0), False, 0, 130, 260),
        ((100, 0), True, 0, 256, 512),
        ((100, 300), True, 0, 390, 780),
        ((100, 300), False, 0, 130, 260),
        ((400, 300), True, 0, 520, 1040),
        ((0, 0), True, 1024, 512, 1024),
        ((0, 0), True, 300, 256, 512),
        ((0, 2000), True, 0, 2600, 4096),
        ((0, 0), True, 8192, 2048, 4096),
        ((0, 9000), True, 0, 4096, 4096),
    ],
)
def test_memory_by_the_peaks_of_earlier_runs(
    *, peaks_mib: tuple[int, int], may_be_full: bool, memory_bytes: int, request_mib: int, limit_mib: int
) -> None:
    record = MaintenanceRecord(
        peak_quick_bytes=peaks_mib[0] * MIB, peak_full_bytes=peaks_mib[1] * MIB, memory_bytes=memory_bytes * MIB
    )
    memory = rules.decide_memory(record, may_be_full=may_be_full, most_bytes=MOST)
    assert memory == rules.Memory(request_mib * MIB, limit_mib * MIB, memory_bytes > 4096)


@pytest.mark.parametrize(
    ("age", "due"),
    [
        (None, True),
        (timedelta(days=7), True),
        (timedelta(days=7) - timedelta(seconds=1), False),
        (timedelta(days=-365), True),
    ],
    ids=["never", "a week ago", "a second less", "by a wrong clock"],
)
def test_snapshots_are_reported_after_a_week(age: timedelta | None, *, due: bool) -> None:
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    record = MaintenanceRecord(reported_at=None if age is None else now - age)
    assert rules.is_report_due(record, now) is due


def test_memory_is_requested_in_whole_mib() -> None:
    memory = rules.Memory(128 * MIB + 1, 256 * MIB, too_small=False)
    assert memory.resources == {"requests": {"memory": "129Mi"}, "limits": {"memory": "256Mi"}}
