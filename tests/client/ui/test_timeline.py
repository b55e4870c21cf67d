"""The picture of a transfer's phases."""

from datetime import UTC, datetime, timedelta
from typing import Any

from client.status.describe import Moment, TransferDetails
from client.ui.timeline import WIDTH, build_timeline
from core.models.phases import Interruption, InterruptionCause, Phase

_START = datetime(2026, 11, 21, 12, tzinfo=UTC)


def _after(seconds: float) -> datetime:
    return _START + timedelta(seconds=seconds)


def _details(**more: Any) -> TransferDetails:
    fields: dict[str, Any] = {"created": "2026-11-21T12:00:00Z", "accepted": _after(10)} | more
    return TransferDetails(kind="DataUpload", namespace="velero", name="one", **fields)


def test_each_phase_is_as_wide_as_it_is_long() -> None:
    began = [Moment(at=_after(40), what=Phase.IN_PROGRESS)]
    timeline = build_timeline(_details(history=began, completed=_after(100)), _after(500))
    assert timeline is not None
    assert [(one.name, one.start, one.width) for one in timeline.segments] == [
        ("pending", 0.0, 100.0),
        ("preparing", 100.0, 300.0),
        ("moving", 400.0, 600.0),
    ]
    assert timeline.seconds == 100.0
    assert timeline.description == "pending for 10 s, then preparing for 30 s, then moving for 60 s"


def test_one_that_has_not_ended_lasts_until_now() -> None:
    timeline = build_timeline(_details(accepted=None), _after(30))
    assert timeline is not None
    assert [(one.name, one.width) for one in timeline.segments] == [("pending", WIDTH)]


def test_an_interruption_is_marked_and_a_clock_that_is_off_breaks_nothing() -> None:
    end = Interruption(cause=InterruptionCause.DELETED, at=_after(200), node="a", message="")
    timeline = build_timeline(_details(accepted=_after(-5), interruptions=(end,), completed=_after(100)), _after(100))
    assert timeline is not None
    assert [one.width for one in timeline.segments] == [0.0, WIDTH]
    assert [(one.name, one.at) for one in timeline.marks] == [("interrupted: Deleted", WIDTH)]


def test_nothing_is_drawn_without_a_start() -> None:
    assert build_timeline(_details(created=""), _after(1)) is None


def test_without_its_history_it_moves_since_its_present_attempt_began() -> None:
    timeline = build_timeline(_details(began=_after(40)), _after(100))
    assert timeline is not None
    assert [one.name for one in timeline.segments] == ["pending", "preparing", "moving"]
    assert timeline.segments[2].seconds == 60.0
