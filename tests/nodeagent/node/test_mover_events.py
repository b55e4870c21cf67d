"""What a mover is pending for, as its Events say."""

import pytest

from core.contract import ProgressMessage
from nodeagent.node.mover_events import MoverPending
from tests.nodeagent.node.test_progress import event
from tests.nodeagent.support.transfers import data_upload

__all__: list[str] = []


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
