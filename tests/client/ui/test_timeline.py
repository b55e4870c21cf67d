"""The picture of a transfer's phases, and what backups add to a repository, and to all of them, by day."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

from client.status.describe import Moment, TransferDetails
from client.status.records import TransferRecord
from client.ui.timeline import WIDTH, Timeline, build_curves, build_timeline, sum_growth
from core.models.phases import Interruption, InterruptionCause, Phase
from nodeagent.coverage.history import HistoryDay

_START = datetime(2026, 11, 21, 12, tzinfo=UTC)


def _after(seconds: float) -> datetime:
    return _START + timedelta(seconds=seconds)


def _details(**more: Any) -> TransferDetails:
    fields: dict[str, Any] = {"created": "2026-11-21T12:00:00Z", "accepted": _after(10)} | more
    return TransferDetails(kind="DataUpload", namespace="velero", name="one", **fields)


def _line(now: float, **more: Any) -> Timeline:
    """Return the picture so many seconds after the start."""
    timeline = build_timeline(_details(**more), _after(now))
    assert timeline is not None
    return timeline


def test_each_phase_is_as_wide_as_it_is_long() -> None:
    began = [Moment(at=_after(40), what=Phase.IN_PROGRESS)]
    timeline = _line(500, history=began, completed=_after(100))
    assert [(one.name, one.start, one.width) for one in timeline.segments] == [
        ("pending", 0.0, 100.0),
        ("preparing", 100.0, 300.0),
        ("moving", 400.0, 600.0),
    ]
    assert timeline.seconds == 100.0
    assert timeline.description == "pending for 10 s, then preparing for 30 s, then moving for 60 s"


def test_an_interruption_is_marked_and_a_clock_that_is_off_breaks_nothing() -> None:
    end = Interruption(cause=InterruptionCause.DELETED, at=_after(200), node="a", message="")
    timeline = _line(100, accepted=_after(-5), interruptions=(end,), completed=_after(100))
    assert [one.width for one in timeline.segments] == [0.0, WIDTH]
    assert [(one.name, one.at) for one in timeline.marks] == [("interrupted: Deleted", WIDTH)]


def test_one_that_has_not_ended_lasts_until_now() -> None:
    timeline = _line(30, accepted=None)
    assert [(one.name, one.width) for one in timeline.segments] == [("pending", WIDTH)]
    assert build_timeline(_details(created=""), _after(1)) is None
    # Without its history it moves since its present attempt began.
    timeline = _line(100, began=_after(40))
    assert [one.name for one in timeline.segments] == ["pending", "preparing", "moving"]
    assert timeline.segments[2].seconds == 60.0


def _backup(name: str, day: int, *, total: int = 100, new: int | None = 0, **more: Any) -> TransferRecord:
    fields: dict[str, Any] = {"kind": "DataUpload", "queue": "app", "location": "default", "phase": Phase.COMPLETED}
    fields |= {"completed": datetime(2026, 11, day, 23, 30, tzinfo=UTC), "total_bytes": total, "new_bytes": new}
    return TransferRecord(namespace="velero", name=name, **fields | more)


def test_the_days_of_a_repository_are_summed_up_the_oldest_first() -> None:
    found = [_backup("c", 3, new=10), _backup("a", 1, new=100), _backup("b", 3, new=20, kind="PodVolumeBackup")]
    others = [
        _backup("other-namespace", 1, queue="else"),
        _backup("other-location", 1, location="second"),
        _backup("failed", 1, phase=Phase.FAILED),
        _backup("restore", 1, kind="DataDownload"),
    ]
    growth = sum_growth([*others, *found], "app", "default")
    found_days = [(day.day, day.backups, day.new_bytes) for day in growth.days]
    assert found_days == [("2026-11-01", 1, 100), ("2026-11-03", 2, 30)]
    assert growth.days[0].moment == int(datetime(2026, 11, 1, tzinfo=UTC).timestamp())
    assert (growth.backups, growth.total_bytes, growth.new_bytes) == (3, 300, 130)
    assert growth.deduplication == 300 / 130


def test_without_a_word_on_new_data_nothing_is_claimed() -> None:
    unknown = sum_growth([_backup("a", 1, new=None)], "app", "default")
    assert (unknown.new_bytes, unknown.days[0].new_bytes, unknown.deduplication) == (None, None, None)
    none = sum_growth([_backup("a", 1, new=0), _backup("b", 1, new=None)], "app", "default")
    assert (none.new_bytes, none.days[0].new_bytes, none.deduplication) == (0, 0, None)


def test_a_curve_has_a_gap_where_there_was_no_backup_and_a_point_for_a_day_alone() -> None:
    numbers = [10.0, 20.0, None, 5.0, None]
    days = [
        HistoryDay(day=date(2026, 11, n), new_bytes=value, total_bytes=None if value is None else 2048, seconds=None)
        for n, value in enumerate(numbers, start=1)
    ]
    new, size, seconds = build_curves(days)
    assert new.path == "M0.0 100.0h0L250.0 0.0M750.0 150.0h0"
    assert (new.last, new.most, size.last) == ("5 B", "20 B", "2.0 KiB")
    assert "The most is 20 B on 2026-11-02, the last 5 B on 2026-11-04." in new.description
    assert (seconds.path, seconds.last) == ("", "")
