"""Cancel requests become overdue at a known time, also for an agent that restarted."""

from datetime import timedelta

import pytest

from core.models.base import JsonDict
from core.models.names import CANCEL_REQUESTED_ANNOTATION
from core.models.transfers import DataUpload
from nodeagent.node.cancel_requests import CancelRequests
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.transfers import NODE, data_upload

HOUR = timedelta(hours=1)


def overdue_at(transfer: JsonDict, *seconds: float) -> list[bool]:
    """Return at which of those times, observed by one agent, the cancel request is overdue."""
    clock = HandClock()
    requests = CancelRequests(clock, HOUR)
    cr = DataUpload.parse(transfer)
    found = []
    for clock.seconds in seconds:
        requests.observe(cr)
        found.append(requests.is_overdue(cr))
        assert (requests.seconds_until_overdue(cr) == 0) is found[-1]
    return found


def canceling(**annotations: str) -> JsonDict:
    transfer = data_upload(node=NODE, status={"phase": "Canceling"}, annotations=annotations)
    transfer["spec"]["cancel"] = True
    return transfer


def test_a_request_is_overdue_an_hour_after_it_was_first_observed() -> None:
    assert overdue_at(canceling(), 100.0, 3699.0, 3700.0) == [False, False, True]


@pytest.mark.parametrize("observed_at", [0.0, 3000.0], ids=["from the beginning", "by an agent that restarted"])
def test_the_hour_of_a_recorded_request_begins_with_the_record(observed_at: float) -> None:
    transfer = canceling(**{CANCEL_REQUESTED_ANNOTATION: "2026-11-21T12:00:00Z"})
    assert overdue_at(transfer, observed_at, 3599.0, 3600.0) == [False, False, True]


def test_the_hour_of_a_deletion_begins_with_it() -> None:
    transfer = data_upload(node=NODE, status={"phase": "Canceling"}, deletionTimestamp="2026-11-21T12:00:00Z")
    assert overdue_at(transfer, 3599.0, 3600.0) == [False, True]


@pytest.mark.parametrize("recorded", ["", "soon", "2026-11-21T12:00:00"], ids=["empty", "no time", "no zone"])
def test_an_invalid_record_counts_as_missing(recorded: str) -> None:
    transfer = canceling(**{CANCEL_REQUESTED_ANNOTATION: recorded})
    assert overdue_at(transfer, 5000.0, 8600.0) == [False, True]


def test_a_transfer_without_a_request_is_never_overdue() -> None:
    requests = CancelRequests(HandClock(), timedelta())
    cr = DataUpload.parse(data_upload(node=NODE))
    requests.observe(cr)
    assert not requests.is_overdue(cr)


def test_the_time_of_a_request_is_forgotten_with_its_transfer() -> None:
    clock = HandClock()
    requests = CancelRequests(clock, HOUR)
    cr = DataUpload.parse(canceling())
    requests.observe(cr)
    requests.forget(cr.uid)
    clock.seconds = 3600.0
    requests.observe(cr)
    assert requests.seconds_until_overdue(cr) == 3600.0
