"""What a decision means for a user."""

from datetime import datetime, timedelta

import pytest

from client.leader_page import LeaderDecision
from client.repository_view import NextMaintenance, compute_next
from core.contract import MaintenanceMode
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView
from tests.nodeagent.support.hand_clock import NOON

_HOUR = timedelta(hours=1)


@pytest.mark.parametrize("hold", Hold)
def test_every_hold_is_explained(hold: Hold) -> None:
    explained = NextMaintenance.of_decision(Decision(hold), MaintenanceRecord(), NOON)
    assert explained.hold == hold
    assert explained.reason not in {"", str(hold)}


def test_a_hold_or_time_of_a_later_version_is_shown_as_it_is() -> None:
    said = NextMaintenance.of_leader(LeaderDecision(hold="paused", due="soon"), MaintenanceRecord(), NOON)
    assert (said.hold, said.reason, said.due) == ("paused", "paused", None)


@pytest.mark.parametrize(
    ("next_full", "due", "mode"),
    [(None, None, "quick"), (NOON + _HOUR, None, "quick"), (NOON, None, "full"), (NOON + _HOUR, NOON + _HOUR, "full")],
    ids=["no schedule", "later", "now", "at the due time"],
)
def test_the_mode_is_what_kopia_has_due_then(next_full: datetime | None, due: datetime | None, mode: str) -> None:
    record = MaintenanceRecord.from_wire({"at": NOON, "nextFull": next_full})
    assert NextMaintenance.of_decision(Decision(due_at=due), record, NOON).mode == mode


def test_before_the_first_maintenance_its_mode_is_not_known() -> None:
    assert NextMaintenance.of_decision(Decision(), MaintenanceRecord(), NOON).mode == ""


def test_what_is_not_known_makes_no_time_too_late() -> None:
    """Nothing has changed, as the fingerprint of the view says: the leader would wait for a week."""
    record = MaintenanceRecord(
        at=NOON - _HOUR,
        mode=MaintenanceMode.QUICK,
        next_quick=NOON + _HOUR,
        next_full=NOON + 9 * _HOUR,
        fingerprint="same",
        fulls_since_change=4,
    )
    view = MaintenanceView(NOON, NOON, _HOUR, NOON - _HOUR, record=record, fingerprint="same")
    assert compute_next(view).due == NOON + _HOUR
