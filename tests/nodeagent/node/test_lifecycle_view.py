"""What the rules get to see of a load and its pod."""

import pytest

from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from nodeagent.node.lifecycle import Case, Observation, Site, Stop, Timeouts, View, build_case
from nodeagent.node.mover_loss import MoverLoss
from nodeagent.transfers.kinds.data_upload import DataUploadKind
from nodeagent.transfers.mover_pod import PodState
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload, mover_pod

UPLOADS = DataUploadKind(client=None, exposer=None, expose_settings=None, datamovers=frozenset())  # type: ignore[arg-type] # names only
SITE = Site(NODE, NAMESPACE)


def case_of(
    transfer: JsonDict,
    pod: JsonDict | None = None,
    *,
    departed: JsonDict | None = None,
    seconds: float = 0.0,
    site: Site = SITE,
    **observed: bool,
) -> Case:
    """Return the case of `transfer` when it is observed so many seconds after noon."""
    seen = Observation(UPLOADS.parse(transfer), pod, departed, HandClock(seconds).now(), **observed)
    return build_case(UPLOADS, seen, site, Timeouts())


def look(load: JsonDict, pod: JsonDict | None = None, *, seconds: float = 0.0) -> View:
    return case_of(load, pod, seconds=seconds).view


ENDED = [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]


def test_a_new_load_of_nobody() -> None:
    assert look(data_upload()) == View(
        phase=Phase.NEW,
        ours=False,
        stop=Stop.NONE,
        pod=PodState.ABSENT,
        outcome_kept=False,
        slot=False,
        late=False,
    )


def test_another_loads_pod_of_the_same_name_counts_as_absent() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Running")
    assert look(data_upload(node=NODE), pod).pod is PodState.ABSENT


@pytest.mark.parametrize(
    ("node", "ours"), [(NODE, True), ("node-b", False), ("", False)], ids=["ours", "other", "none"]
)
def test_the_node_label_says_whose_it_is(node: str, ours: bool) -> None:
    assert look(data_upload(node=node)).ours is ours


def test_a_long_node_name_is_ours_by_its_label_value() -> None:
    site = Site("n" * 80, NAMESPACE)
    load = data_upload(labels={NODE_LABEL: site.label})
    assert len(site.label) == 63
    assert case_of(load, site=site).view.ours


@pytest.mark.parametrize(("seconds", "late"), [(1799, False), (1800, True)], ids=["in time", "late"])
def test_the_prepare_timeout_runs_from_the_accept(seconds: float, late: bool) -> None:
    status = {"phase": "Accepted", "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    assert look(data_upload(node=NODE, status=status), seconds=seconds).late is late
    assert not look(data_upload(node=NODE, status=status | {"phase": "Prepared"}), seconds=seconds).late


def test_a_load_that_was_made_accepted_is_late_by_its_age() -> None:
    made_at = {"creationTimestamp": "2026-11-21T12:00:00Z"}
    accepted = data_upload(node=NODE, status={"phase": "Accepted"}, **made_at)
    assert [look(accepted, seconds=seconds).late for seconds in (1799, 1800)] == [False, True]


def test_an_outcome_is_seen() -> None:
    assert look(data_upload(annotations={OUTCOME_ANNOTATION: '{"phase":"Failed","message":"m"}'})).outcome_kept
    assert not look(data_upload(annotations={OUTCOME_ANNOTATION: "unreadable"})).outcome_kept


@pytest.mark.parametrize(
    ("requested", "overdue", "stop"),
    [(False, False, Stop.NONE), (True, False, Stop.ASKED), (True, True, Stop.OVERDUE)],
    ids=["none", "requested", "overdue"],
)
def test_a_cancel_request_is_part_of_the_view(requested: bool, overdue: bool, stop: Stop) -> None:
    transfer = data_upload(node=NODE, status={"phase": "InProgress"})
    transfer["spec"]["cancel"] = requested
    assert case_of(transfer, cancel_overdue=overdue).view.stop is stop


LOSS = MoverLoss(since=NOON, last=NOON)


@pytest.mark.parametrize(("phase", "late"), [("Accepted", True), ("Prepared", True), ("InProgress", False)])
def test_a_lost_mover_has_the_prepare_timeout_to_come_back(phase: str, late: bool) -> None:
    status = {"phase": phase, "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    load = data_upload(node=NODE, status=status, annotations={MOVER_LOST_ANNOTATION: LOSS.to_json()})
    assert [look(load, seconds=seconds).late for seconds in (1799.0, 1800.0)] == [False, late]


def test_a_mover_on_another_node_is_on_its_way_until_that_nodes_agent_has_it() -> None:
    load = data_upload(node=NODE, status={"phase": "Prepared"})
    assert look(load, mover_pod(load, node="node-b", phase="Running")).pod is PodState.PENDING
    running = data_upload(node=NODE, status={"phase": "InProgress"})
    assert look(running, mover_pod(running, node="node-b", phase="Running")).pod is PodState.RUNNING


@pytest.mark.parametrize(
    ("phase", "status", "state"),
    [
        pytest.param("InProgress", {"phase": "Succeeded", "containerStatuses": ENDED}, PodState.ENDED, id="ended"),
        pytest.param("InProgress", {"phase": "Running"}, PodState.ABSENT, id="without a result"),
        pytest.param("Prepared", {"phase": "Failed", "reason": "Evicted"}, PodState.ABSENT, id="before the start"),
    ],
)
def test_what_a_pod_said_last_counts_when_it_is_gone(phase: str, status: JsonDict, state: PodState) -> None:
    load = data_upload(node=NODE, status={"phase": phase})
    pod = mover_pod(load, **status)
    case = case_of(load, departed=pod)
    assert (case.view.pod, case.departed) == (state, pod)


def test_a_pod_that_went_away_from_an_earlier_load_of_the_name_says_nothing() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Succeeded", containerStatuses=ENDED)
    load = data_upload(node=NODE, status={"phase": "InProgress"})
    case = case_of(load, departed=pod)
    assert (case.view.pod, case.departed) == (PodState.ABSENT, None)


@pytest.mark.parametrize("has_slot", [True, False])
def test_a_slot_is_part_of_the_view(has_slot: bool) -> None:
    assert case_of(data_upload(node=NODE), has_slot=has_slot).view.slot is has_slot
