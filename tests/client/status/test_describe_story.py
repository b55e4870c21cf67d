"""The story of a transfer: a sentence for each step that is known, whatever became of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from client.status.describe import Moment, TransferDetails, _facts, find_stages, tell_story
from client.status.parse import transfer_record
from client.status.records import kind_named
from core.models.phases import Phase
from core.models.transfers import DataUpload
from tests.nodeagent.support.transfers import data_upload

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def details(phase: str, kind: str = "DataUpload", **more: Any) -> TransferDetails:
    fields = {"name": "one", "namespace": "velero", "queue": "app", "volume": "data"} | more
    fields.setdefault("created", "2026-11-21T11:00:00Z")
    return TransferDetails(kind=kind, phase=Phase(phase), **fields)


MOVED: dict[str, Any] = {
    "accepted": NOW - 50 * MINUTE,
    "history": [Moment(at=NOW - 45 * MINUTE, what="InProgress")],
    "node": "a",
    "total_bytes": 2048,
    "completed": NOW - 15 * MINUTE,
}
BEGAN = [
    "It was created 60m ago to back up app/data.",
    "After 10m the leader accepted it.",
    "After 5m more, its data mover on node a began to move data.",
]


@pytest.mark.parametrize(
    ("one", "story"),
    [
        (
            details("Completed", **MOVED, new_bytes=5),
            [*BEGAN, "It moved 2.0 KiB, 5 B of it new, and completed after 30m."],
        ),
        (details("Failed", **MOVED, message="no space"), [*BEGAN, "It failed after 30m: no space."]),
        (details("Canceled"), [BEGAN[0], "It was canceled."]),
        (
            details("New", "DataDownload", reason="Queued", message="position 1", canceling=True),
            ["It was created 60m ago to restore app/data.", "It waits: Queued: position 1.", "It is being canceled."],
        ),
        (details("New", created=""), []),
    ],
    ids=["completed", "failed", "canceled early", "pending", "not known"],
)
def test_each_step_that_is_known_is_a_sentence(one: TransferDetails, story: list[str]) -> None:
    assert list(tell_story(one, NOW)) == story


@pytest.mark.parametrize("accepted", [None, -90, -30, 10])
@pytest.mark.parametrize("began", [None, -90, -40, -20, 10])
def test_a_clock_that_differs_gives_no_stage_a_time_of_another_one(accepted: int | None, began: int | None) -> None:
    times = {"accepted": accepted, "began": began}
    known: dict[str, Any] = {name: NOW + minutes * MINUTE for name, minutes in times.items() if minutes is not None}
    stages = find_stages(details("InProgress", **known), NOW)
    ahead = max([*known.values(), NOW]) - NOW
    assert sum((stage.length for stage in stages), timedelta()) == 60 * MINUTE + ahead
    assert min(stage.length for stage in stages) >= timedelta()


@pytest.mark.parametrize("accepted", [None, "2026-11-21T11:10:00Z"])
@pytest.mark.parametrize(("phase", "end"), [("Failed", "It failed: why."), ("Canceled", "It was canceled: why.")])
def test_a_transfer_without_a_data_path_did_not_begin_to_move_data(accepted: str | None, phase: str, end: str) -> None:
    """The write of its end sets both times."""
    times = {"startTimestamp": "2026-11-21T11:40:00Z", "completionTimestamp": "2026-11-21T11:40:00Z"}
    raw = data_upload(status={"phase": phase, "message": "why", "acceptedTimestamp": accepted} | times)
    raw["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
    one = TransferDetails.of(transfer_record(kind_named("du"), raw), **_facts(DataUpload.parse(raw), []))
    assert list(tell_story(one, NOW))[1:] == [*([BEGAN[1]] if accepted else []), end]
    assert "InProgress" not in [moment.what for moment in one.history]
