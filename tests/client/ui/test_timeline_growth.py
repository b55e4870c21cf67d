"""What backups add to a repository, by day."""

from datetime import UTC, datetime
from typing import Any

from client.status.records import TransferRecord
from client.ui.timeline import sum_growth
from core.models.phases import Phase


def _backup(name: str, day: int, *, total: int = 100, new: int | None = 0, **more: Any) -> TransferRecord:
    fields: dict[str, Any] = {
        "kind": "DataUpload",
        "queue": "app",
        "location": "default",
        "phase": Phase.COMPLETED,
    } | more
    completed = datetime(2026, 11, day, 23, 30, tzinfo=UTC)
    return TransferRecord(
        namespace="velero",
        name=name,
        completed=completed,
        total_bytes=total,
        new_bytes=new,
        **fields,
    )


def test_the_days_of_a_repository_are_summed_up_the_oldest_first() -> None:
    found = [_backup("c", 3, new=10), _backup("a", 1, new=100), _backup("b", 3, new=20, kind="PodVolumeBackup")]
    growth = sum_growth(found, "app", "default")
    assert [(day.day, day.backups, day.new_bytes) for day in growth.days] == [
        ("2026-11-01", 1, 100),
        ("2026-11-03", 2, 30),
    ]
    assert growth.days[0].moment == int(datetime(2026, 11, 1, tzinfo=UTC).timestamp())
    assert (growth.backups, growth.total_bytes, growth.new_bytes) == (3, 300, 130)
    assert growth.deduplication == 300 / 130


def test_only_its_completed_backups_count() -> None:
    others = [
        _backup("other-namespace", 1, queue="else"),
        _backup("other-location", 1, location="second"),
        _backup("failed", 1, phase=Phase.FAILED),
        _backup("restore", 1, kind="DataDownload"),
    ]
    assert sum_growth(others, "app", "default").days == []


def test_without_a_word_on_new_data_nothing_is_claimed() -> None:
    unknown = sum_growth([_backup("a", 1, new=None)], "app", "default")
    assert (unknown.new_bytes, unknown.days[0].new_bytes, unknown.deduplication) == (None, None, None)
    none = sum_growth([_backup("a", 1, new=0), _backup("b", 1, new=None)], "app", "default")
    assert (none.new_bytes, none.days[0].new_bytes, none.deduplication) == (0, 0, None)
