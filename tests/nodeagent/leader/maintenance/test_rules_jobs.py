"""The name and the memory of a maintenance Job, and the history of them."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from core.models.storage import BackupRepository, MaintenanceEntry, MaintenanceOutcome
from nodeagent.maintenance.record import FailureCause, MaintenanceRecord, after_failure
from nodeagent.maintenance.rules import (
    Memory,
    count_failures,
    decide_memory,
    is_full_incomplete,
    is_report_due,
    job_name,
    merge_history,
    slot_of,
)

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
MIB = 2**20
_RECORDINGS = Path(__file__).parents[3] / "recordings" / "velero-1.18.2" / "maintenance"


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
        slot_ms = slot_of(moment, frequency, uid)
        assert slot_ms % 1000 == 0
        assert slot_ms <= moment.timestamp() * 1000 < slot_ms + length_ms
        begin = datetime.fromtimestamp(slot_ms / 1000, UTC)
        assert slot_of(begin, frequency, uid) == slot_ms
        assert slot_of(begin + timedelta(milliseconds=length_ms - 1), frequency, uid) == slot_ms
        assert slot_of(begin + timedelta(milliseconds=length_ms), frequency, uid) == slot_ms + length_ms


def test_the_slots_of_repositories_are_spread_over_their_frequency() -> None:
    begins = {slot_of(NOW, HOUR, f"uid-{number}") % 3_600_000 // 600_000 for number in range(100)}
    assert begins == set(range(6))


def test_the_name_is_veleros_and_differs_for_each_attempt() -> None:
    assert job_name("app1-default-kopia", 1795331162000, 0) == "app1-default-kopia-maintain-job-1795331162000"
    assert job_name("app1-default-kopia", 1795331162000, 3) == "app1-default-kopia-maintain-job-1795331162003"
    taken = {job_name("app1-default-kopia", 1795331162000, failures) for failures in (0, 1, 3)}
    assert job_name("app1-default-kopia", 1795331162000, 0, taken) == "app1-default-kopia-maintain-job-1795331162002"


@pytest.mark.parametrize("length", [35, 36, 37, 63, 253])
def test_a_long_name_is_shortened_and_stays_distinct(length: int) -> None:
    repository = ("namespace-with-a-long-name-and.more-of-it-" * 9)[: length - 1] + "x"
    name = job_name(repository, 1795331162000, 0)
    assert len(name) <= 63
    if length <= 36:
        assert name == f"{repository}-maintain-job-1795331162000"
    else:
        digest = hashlib.sha256(repository.encode()).hexdigest()[:6]
        assert name == f"namespace-with-a-long-name-a-{digest}-maintain-job-1795331162000"
        assert job_name(f"{repository[:-1]}y", 1795331162000, 0) != name


def test_a_shortened_name_is_a_valid_one_wherever_it_is_cut() -> None:
    for cut in ".-":
        name = job_name(("a" * 27 + cut) + "b" * 30, 1795331162000, 0)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)
        assert len(name) <= 63


def test_the_history_is_ordered_and_has_one_entry_for_each_start() -> None:
    entries = (success(0), failure(5), success(10))
    assert merge_history(entries, [failure(5, "another cause"), success(-5)]) == (
        success(-5),
        success(0),
        failure(5, "another cause"),
        success(10),
    )
    assert merge_history(entries, []) == entries
    assert merge_history([], entries) == entries


def test_of_the_history_the_new_entries_and_the_newest_others_are_kept() -> None:
    entries = tuple(success(minute) for minute in range(40))
    assert merge_history(entries[:39], entries[39:]) == entries[15:]
    assert merge_history(entries[1:26], entries[:1]) == (entries[0], *entries[2:26])


def test_only_a_success_has_a_completion_and_only_a_failure_a_message() -> None:
    """A Velero server takes the newest completion for the last maintenance, whatever its result."""
    start = NOW
    for result, complete, message in (
        (MaintenanceOutcome.SUCCEEDED, NOW + HOUR, None),
        (MaintenanceOutcome.FAILED, None, "text"),
    ):
        given = MaintenanceEntry(result=result, start_timestamp=start, complete_timestamp=NOW + HOUR, message="text")
        (kept,) = merge_history([], [given])
        assert (kept.complete_timestamp, kept.message) == (complete, message)


def test_history_that_was_found_is_kept_as_it_is() -> None:
    velero = MaintenanceEntry(
        result=MaintenanceOutcome.FAILED, start_timestamp=NOW, complete_timestamp=NOW + HOUR, message="m"
    )
    assert merge_history([velero, MaintenanceEntry(message="no start")], [success(1)]) == (velero, success(1))


def test_the_history_that_velero_wrote_is_continued() -> None:
    raw = json.loads((_RECORDINGS / "backuprepository-two-entries.json").read_text())["items"][0]
    recorded = BackupRepository.parse(raw).status.recent_maintenance
    merged = merge_history(recorded, [failure(0)])
    assert [entry.to_wire() for entry in merge_history(recorded, [])] == raw["status"]["recentMaintenance"]
    # The recording is from November.
    assert merged == (failure(0), *recorded)
    assert count_failures(merged) == 0


def test_failures_are_counted_from_the_last_one() -> None:
    entries = [success(0), failure(1), success(2), failure(3), failure(4)]
    assert [count_failures(tuple(entries[:length])) for length in range(6)] == [0, 0, 1, 0, 1, 2]


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
    assert is_full_incomplete(record, entries) is incomplete


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
    memory = decide_memory(record, may_be_full=may_be_full, most_bytes=MOST)
    assert memory == Memory(request_mib * MIB, limit_mib * MIB, memory_bytes > 4096)


def test_out_of_memory_doubles_the_limit_up_to_the_highest() -> None:
    record, limits = MaintenanceRecord(), []
    for _ in range(6):
        memory = decide_memory(record, may_be_full=True, most_bytes=MOST)
        limits.append((memory.limit_bytes // MIB, memory.too_small))
        record = after_failure(record, FailureCause.OUT_OF_MEMORY, inputs="", limit_bytes=memory.limit_bytes, at=NOW)
    assert limits == [(512, False), (1024, False), (2048, False), (4096, False), (4096, True), (4096, True)]


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
    assert is_report_due(record, now) is due


def test_memory_is_requested_in_whole_mib() -> None:
    memory = Memory(128 * MIB + 1, 256 * MIB, too_small=False)
    assert memory.resources == {"requests": {"memory": "129Mi"}, "limits": {"memory": "256Mi"}}
