"""The view of a transfer and its mover pod."""

import pytest

from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from nodeagent.node.lifecycle import CancelState, Case, Observation, Site, Timeouts, View, build_case
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


def view_of(transfer: JsonDict, pod: JsonDict | None = None, *, seconds: float = 0.0) -> View:
    return case_of(transfer, pod, seconds=seconds).view


ENDED = [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]


def test_a_new_transfer() -> None:
    assert view_of(data_upload()) == View(
        phase=Phase.NEW,
        owned=False,
        cancel=CancelState.NONE,
        pod=PodState.ABSENT,
        outcome_recorded=False,
        has_slot=False,
        timed_out=False,
    )


def test_the_pod_of_another_transfer_of_the_name_counts_as_absent() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Running")
    assert view_of(data_upload(node=NODE), pod).pod is PodState.ABSENT


@pytest.mark.parametrize(
    ("node", "owned"), [(NODE, True), ("node-b", False), ("", False)], ids=["this node", "other", "none"]
)
def test_the_node_label_names_the_owning_agent(node: str, owned: bool) -> None:
    assert view_of(data_upload(node=node)).owned is owned


def test_a_long_node_name_is_compared_as_label_value() -> None:
    site = Site("n" * 80, NAMESPACE)
    transfer = data_upload(labels={NODE_LABEL: site.label})
    assert len(site.label) == 63
    assert case_of(transfer, site=site).view.owned


@pytest.mark.parametrize(("seconds", "timed_out"), [(1799, False), (1800, True)], ids=["in time", "timed out"])
def test_the_prepare_timeout_begins_with_the_accept(seconds: float, timed_out: bool) -> None:
    status = {"phase": "Accepted", "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    assert view_of(data_upload(node=NODE, status=status), seconds=seconds).timed_out is timed_out
    assert not view_of(data_upload(node=NODE, status=status | {"phase": "Prepared"}), seconds=seconds).timed_out


def test_the_prepare_timeout_begins_with_the_creation_if_there_is_no_accept() -> None:
    made_at = {"creationTimestamp": "2026-11-21T12:00:00Z"}
    accepted = data_upload(node=NODE, status={"phase": "Accepted"}, **made_at)
    assert [view_of(accepted, seconds=seconds).timed_out for seconds in (1799, 1800)] == [False, True]


def test_a_valid_outcome_is_part_of_the_view() -> None:
    assert view_of(data_upload(annotations={OUTCOME_ANNOTATION: '{"phase":"Failed","message":"m"}'})).outcome_recorded
    assert not view_of(data_upload(annotations={OUTCOME_ANNOTATION: "unreadable"})).outcome_recorded


@pytest.mark.parametrize(
    ("requested", "overdue", "cancel"),
    [(False, False, CancelState.NONE), (True, False, CancelState.REQUESTED), (True, True, CancelState.OVERDUE)],
    ids=["none", "requested", "overdue"],
)
def test_a_cancel_request_is_part_of_the_view(requested: bool, overdue: bool, cancel: CancelState) -> None:
    transfer = data_upload(node=NODE, status={"phase": "InProgress"})
    transfer["spec"]["cancel"] = requested
    assert case_of(transfer, cancel_overdue=overdue).view.cancel is cancel


LOSS = MoverLoss(since=NOON, last=NOON)


@pytest.mark.parametrize(("phase", "timed_out"), [("Accepted", True), ("Prepared", True), ("InProgress", False)])
def test_a_lost_mover_pod_must_be_replaced_within_the_prepare_timeout(phase: str, timed_out: bool) -> None:
    status = {"phase": phase, "acceptedTimestamp": "2026-11-21T12:00:00Z"}
    transfer = data_upload(node=NODE, status=status, annotations={MOVER_LOST_ANNOTATION: LOSS.to_json()})
    assert [view_of(transfer, seconds=seconds).timed_out for seconds in (1799.0, 1800.0)] == [False, timed_out]


def test_a_mover_on_another_node_is_pending_until_that_nodes_agent_owns_it() -> None:
    transfer = data_upload(node=NODE, status={"phase": "Prepared"})
    assert view_of(transfer, mover_pod(transfer, node="node-b", phase="Running")).pod is PodState.PENDING
    running = data_upload(node=NODE, status={"phase": "InProgress"})
    assert view_of(running, mover_pod(running, node="node-b", phase="Running")).pod is PodState.RUNNING


@pytest.mark.parametrize(
    ("phase", "status", "state"),
    [
        pytest.param("InProgress", {"phase": "Succeeded", "containerStatuses": ENDED}, PodState.ENDED, id="ended"),
        pytest.param("InProgress", {"phase": "Running"}, PodState.ABSENT, id="without a result"),
        pytest.param("Prepared", {"phase": "Failed", "reason": "Evicted"}, PodState.ABSENT, id="before the start"),
    ],
)
def test_the_last_version_of_a_deleted_pod_counts(phase: str, status: JsonDict, state: PodState) -> None:
    transfer = data_upload(node=NODE, status={"phase": phase})
    pod = mover_pod(transfer, **status)
    case = case_of(transfer, departed=pod)
    assert (case.view.pod, case.departed) == (state, pod)


def test_a_deleted_pod_of_an_earlier_transfer_of_the_name_counts_as_absent() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), phase="Succeeded", containerStatuses=ENDED)
    transfer = data_upload(node=NODE, status={"phase": "InProgress"})
    case = case_of(transfer, departed=pod)
    assert (case.view.pod, case.departed) == (PodState.ABSENT, None)


@pytest.mark.parametrize("has_slot", [True, False])
def test_a_slot_is_part_of_the_view(has_slot: bool) -> None:
    assert case_of(data_upload(node=NODE), has_slot=has_slot).view.has_slot is has_slot
