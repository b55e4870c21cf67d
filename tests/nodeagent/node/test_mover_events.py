"""What a mover is pending for, as its Events say."""

import pytest

from core.contract import ProgressMessage
from core.models.transfers import Progress
from nodeagent.node.mover_events import MoverPending, Reported
from tests.nodeagent.node.test_progress import event
from tests.nodeagent.support.transfers import data_upload


@pytest.mark.parametrize(
    ("shown", "events", "written"),
    [
        pytest.param("", [("Waiting", "a")], "a", id="first"),
        pytest.param("a", [("Waiting", "a")], None, id="unchanged"),
        pytest.param("a", [("Waiting", "a"), ("Waiting", "b")], "b", id="another cause"),
        pytest.param("a", [("Waiting", "a"), ("Ready", "")], "", id="ready"),
        pytest.param("", [("Waiting", "a"), ("Ready", "")], None, id="ready before it was reported"),
        pytest.param("of another writer", [("Waiting", "a"), ("Ready", "")], None, id="another message is kept"),
        pytest.param("of another writer", [("Warning", "a")], None, id="another reason"),
    ],
)
def test_the_message_follows_the_events(shown: str, events: list[tuple[str, str]], written: str | None) -> None:
    pending = MoverPending()
    for number, (reason, text) in enumerate(events):
        pending.observe_event(event(data_upload(), reason, text, number=number))
    assert pending.correct(shown) == written


def test_an_event_that_was_written_late_changes_nothing() -> None:
    pending = MoverPending()
    pending.observe_event(event(data_upload(), "Ready", "", number=2))
    pending.observe_event(event(data_upload(), "Waiting", "a", number=1))
    pending.observe_progress(ProgressMessage())
    assert pending.correct("") is None


def test_a_mover_that_says_ever_more_takes_no_more_memory() -> None:
    pending = MoverPending()
    for number in range(1000):
        pending.observe_event(event(data_upload(), "Waiting", f"cause {number}", number=number % 10))
        pending.at = ""
    assert len(pending.reported) == 100
    assert pending.correct("cause 998") == "cause 999"


def test_what_is_shown_never_decreases_over_attempts() -> None:
    first = Reported().take(ProgressMessage(done_bytes=7, total_bytes=9, sent_bytes=5))
    second = first.begin(2)
    assert second.message == ProgressMessage(done_bytes=7, total_bytes=9)
    third = second.take(ProgressMessage(done_bytes=3, total_bytes=4, sent_bytes=2, attempt=2))
    assert (third.message.done_bytes, third.message.total_bytes, third.message.sent_bytes) == (7, 7, 2)
    assert (third.attempt_bytes, third.earlier_bytes) == (3, 7)


def test_what_an_earlier_process_wrote_into_the_status_is_shown() -> None:
    reported = Reported(message=ProgressMessage(done_bytes=3, total_bytes=9)).resume(
        Progress(bytes_done=5, total_bytes=8)
    )
    assert (reported.message.done_bytes, reported.message.total_bytes, reported.earlier_bytes) == (5, 8, 5)
    assert reported.resume(Progress(bytes_done=4, total_bytes=8)) == reported


def test_older_messages_are_recognized() -> None:
    reported = Reported().begin(2).take(ProgressMessage(done_bytes=5, attempt=2))
    assert [
        reported.is_newer_than(ProgressMessage(done_bytes=done, attempt=attempt))
        for done, attempt in ((9, 1), (4, 2), (5, 2))
    ] == [True, True, False]
