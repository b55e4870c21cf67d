"""What has a timeout is measured from its first observation, never by the timestamps of a transfer."""

from datetime import timedelta

import pytest

from core.models.names import MOVER_LOST_ANNOTATION, PENDING_REASON_ANNOTATION
from core.models.transfers import DataUpload
from nodeagent.node.lifecycle import Durations, Measured
from nodeagent.transfers.mover_pod import MoverLoss
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.transfers import NODE, data_upload
from tests.support.objects import JsonDict

DAY = timedelta(hours=24)
STAMP = "2026-11-21T12:00:00Z"


def accepted(phase: str = "Accepted", **annotations: str) -> JsonDict:
    status = {"phase": phase, "acceptedTimestamp": STAMP}
    return data_upload(node=NODE, status=status, annotations=annotations, creationTimestamp=STAMP)


def canceling(**meta: str) -> JsonDict:
    transfer = data_upload(node=NODE, status={"phase": "Canceling"}, **meta)
    transfer["spec"]["cancel"] = True
    return transfer


def lost(*, since: int = 0, replaced: bool = False) -> JsonDict:
    at = NOON + timedelta(seconds=since)
    return accepted("Prepared", **{MOVER_LOST_ANNOTATION: MoverLoss(since=at, last=at, replaced=replaced).to_json()})


def measured(*transfers: JsonDict, seconds: float = 1.0, skew: timedelta = DAY) -> list[Measured]:
    """Return what an agent with a wrong wall clock measures of one transfer, observed every `seconds`."""
    clock = HandClock(100.0, skew)
    durations = Durations(clock)
    found = []
    for transfer in transfers:
        found.append(durations.measure(DataUpload.parse(transfer)))
        clock.seconds += seconds
    return found


@pytest.mark.parametrize("skew", [-DAY, DAY], ids=["a day behind", "a day ahead"])
@pytest.mark.parametrize(
    ("transfer", "name"),
    [
        pytest.param(accepted(), "preparing_seconds", id="accepted"),
        pytest.param(lost(), "preparing_seconds", id="lost while Prepared"),
        pytest.param(canceling(), "canceling_seconds", id="cancel request"),
        pytest.param(canceling(deletionTimestamp=STAMP), "canceling_seconds", id="deletion"),
    ],
)
def test_a_duration_counts_from_its_first_observation(transfer: JsonDict, name: str, skew: timedelta) -> None:
    found = measured(transfer, transfer, transfer, skew=skew)
    assert [getattr(each, name) for each in found] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "transfer",
    [
        accepted("Prepared"),
        lost(replaced=True),
        accepted("InProgress"),
        accepted(**{PENDING_REASON_ANNOTATION: "CopyInUse"}),
    ],
    ids=["pending for a slot", "replaced", "running", "pending for a copy"],
)
def test_only_a_missing_mover_pod_counts_as_preparation(transfer: JsonDict) -> None:
    assert measured(accepted(), transfer, accepted(), seconds=60.0) == [
        Measured(preparing_seconds=0.0),
        Measured(),
        Measured(preparing_seconds=0.0),
    ]


def test_a_replacement_has_the_whole_timeout_again() -> None:
    found = measured(accepted(), lost(), lost(), lost(since=300), seconds=60.0)
    assert [each.preparing_seconds for each in found] == [0.0, 0.0, 60.0, 0.0]


def test_a_transfer_without_a_cancel_request_is_not_measured_for_one() -> None:
    assert measured(data_upload(node=NODE)) == [Measured()]


def test_all_durations_of_a_transfer_are_forgotten_with_it() -> None:
    clock = HandClock()
    durations = Durations(clock)
    transfer = canceling()
    transfer["status"] = {"phase": "Accepted"}
    cr = DataUpload.parse(transfer)
    durations.measure(cr)
    durations.forget(cr.uid)
    clock.seconds = 3600.0
    assert durations.measure(cr) == Measured(0.0, 0.0)
