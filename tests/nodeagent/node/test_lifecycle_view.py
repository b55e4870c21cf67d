"""The view of a transfer and its mover pod."""

from typing import Any

import pytest

from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from nodeagent.node.lifecycle import CancelState, Case, Measured, Observation, Site, Timeouts, View, build_case
from nodeagent.transfers.kinds.csi_snapshot import DataUploadKind
from nodeagent.transfers.mover_pod import PodState
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload, mover_pod
from tests.support.objects import JsonDict

UNMEASURED = Measured()
UPLOADS = bare(DataUploadKind)
SITE = Site(NODE, NAMESPACE)


def case_of(
    transfer: JsonDict,
    pod: JsonDict | None = None,
    *,
    departed: JsonDict | None = None,
    site: Site = SITE,
    **observed: Any,
) -> Case:
    """Return the case of `transfer` as it is observed."""
    return build_case(UPLOADS, Observation(UPLOADS.parse(transfer), pod, departed, **observed), site, Timeouts())


def view_of(transfer: JsonDict, pod: JsonDict | None = None, *, measured: Measured = UNMEASURED) -> View:
    return case_of(transfer, pod, measured=measured).view


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


@pytest.mark.parametrize(
    ("seconds", "timed_out"),
    [(None, False), (1799.0, False), (1800.0, True)],
    ids=["not in preparation", "in time", "timed out"],
)
def test_the_prepare_timeout_counts_what_this_agent_has_observed(seconds: float | None, timed_out: bool) -> None:
    stamps = {"acceptedTimestamp": "1999-01-01T00:00:00Z"}
    transfer = data_upload(node=NODE, status={"phase": "Accepted"} | stamps)
    assert view_of(transfer, measured=Measured(preparing_seconds=seconds)).timed_out is timed_out


def test_a_valid_outcome_is_part_of_the_view() -> None:
    assert view_of(data_upload(annotations={OUTCOME_ANNOTATION: '{"phase":"Failed","message":"m"}'})).outcome_recorded
    assert not view_of(data_upload(annotations={OUTCOME_ANNOTATION: "unreadable"})).outcome_recorded


@pytest.mark.parametrize(
    ("requested", "seconds", "cancel"),
    [
        (False, None, CancelState.NONE),
        (True, 3599.0, CancelState.REQUESTED),
        (True, 3600.0, CancelState.OVERDUE),
    ],
    ids=["none", "requested", "overdue"],
)
def test_a_cancel_request_is_part_of_the_view(requested: bool, seconds: float | None, cancel: CancelState) -> None:
    transfer = data_upload(node=NODE, status={"phase": "InProgress"})
    transfer["spec"]["cancel"] = requested
    assert case_of(transfer, measured=Measured(canceling_seconds=seconds)).view.cancel is cancel


def test_a_mover_on_another_node_is_pending_until_that_nodes_agent_owns_it() -> None:
    transfer = data_upload(node=NODE, status={"phase": "Prepared"})
    assert view_of(transfer, mover_pod(transfer, node="node-b", phase="Running")).pod is PodState.PENDING
    running = data_upload(node=NODE, status={"phase": "InProgress"})
    assert view_of(running, mover_pod(running, node="node-b", phase="Running")).pod is PodState.RUNNING


@pytest.mark.parametrize(
    ("phase", "node", "outcome", "pod", "state"),
    [
        ("Prepared", "node-b", "", "Running", PodState.TAKEN),
        ("Prepared", NODE, "", "Running", PodState.PENDING),
        ("InProgress", "node-b", "", "Running", PodState.TAKEN),
        ("Canceling", "node-b", "", "", PodState.TAKEN),
        ("InProgress", "node-b", "", "Succeeded", PodState.ENDED),
        ("InProgress", "node-b", '{"phase":"Failed","message":"m"}', "Running", PodState.RUNNING),
    ],
    ids=["prepared", "pod moved", "runs", "pod deleted", "result of a lost node", "recorded"],
)
def test_another_agent_that_sets_no_label_takes_a_transfer_over_by_its_status(
    phase: str, node: str, outcome: str, pod: str, state: PodState
) -> None:
    marks = {OUTCOME_ANNOTATION: outcome} if outcome else {}
    transfer = data_upload(node=NODE, status={"phase": phase, "node": node}, annotations=marks)
    ended = {"containerStatuses": ENDED} if pod == "Succeeded" else {}
    mover = mover_pod(transfer, node="node-b", phase=pod, **ended) if pod else None
    assert view_of(transfer, mover).pod is state


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
