"""The rules of the life cycle, for every possible view, and the view of a transfer and its mover pod."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import TRANSITIONS, AttemptStage, Phase
from nodeagent.node.lifecycle import (
    Action,
    CancelState,
    Case,
    Measured,
    Observation,
    Site,
    Timeouts,
    View,
    build_case,
    decide,
)
from nodeagent.transfers.kinds.csi_snapshot import DataUploadKind
from nodeagent.transfers.mover_pod import PodState
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload, mover_pod
from tests.support.objects import JsonDict

EVERY_POD = frozenset(PodState)
ANY_POD = EVERY_POD - {PodState.TAKEN}
ANY_CANCEL = frozenset(CancelState)
STARTED = {PodState.RUNNING, PodState.ENDED}
NOT_STARTED = ANY_POD - STARTED
NOT_HERE = EVERY_POD - STARTED
LOST = {PodState.LOST}
FINISHED = {PodState.ENDED, PodState.LOST}
REQUESTED = {CancelState.REQUESTED, CancelState.OVERDUE}
CANCELING = {Phase.CANCELING}
FINAL = {Phase.COMPLETED, Phase.FAILED, Phase.CANCELED}
BOTH = {True, False}


@dataclass(frozen=True)
class Row:
    """The views that require one action; omitted fields do not matter."""

    action: Action
    phases: Collection[Phase]
    owned: bool
    cancels: Collection[CancelState] = ANY_CANCEL
    pods: Collection[PodState] = ANY_POD
    recorded: Collection[bool] = frozenset(BOTH)
    slot: Collection[bool] = frozenset(BOTH)
    timed_out: Collection[bool] = frozenset(BOTH)
    stages: Collection[AttemptStage] = frozenset(AttemptStage)
    retryable: Collection[bool] = frozenset(BOTH)
    succeeded: Collection[bool] = frozenset(BOTH)

    def covers(self, view: View) -> bool:
        return (
            view.phase in self.phases
            and view.owned is self.owned
            and view.cancel in self.cancels
            and view.pod in self.pods
            and view.outcome_recorded in self.recorded
            and view.has_slot in self.slot
            and view.timed_out in self.timed_out
            and view.stage in self.stages
            and view.retryable in self.retryable
            and view.succeeded in self.succeeded
        )


NO_CANCEL = {CancelState.NONE}
ACCEPTED, PREPARED = {Phase.ACCEPTED}, {Phase.PREPARED}
HOLDING = ACCEPTED | PREPARED
IN_PROGRESS = {Phase.IN_PROGRESS}
EXPOSING, NOT_EXPOSING = {AttemptStage.EXPOSING}, set(AttemptStage) - {AttemptStage.EXPOSING}
WAITING, READY = {AttemptStage.WAITING}, {AttemptStage.READY}
BETWEEN = WAITING | READY
MOVING = {AttemptStage.RUNNING}
ANY_STAGE = set(AttemptStage)
GONE = FINISHED | {PodState.ABSENT}


def rows_of_another_attempt() -> list[Row]:
    """The rows of a transfer that was interrupted, up to the start of its next attempt."""

    def row(action: Action, stages: Collection[AttemptStage], **fields: Collection[Any]) -> Row:
        chosen: dict[str, Any] = {"recorded": {False}, "cancels": NO_CANCEL} | fields
        return Row(action, IN_PROGRESS, owned=True, stages=stages, **chosen)

    return [
        row(Action.FINISH, BETWEEN | EXPOSING, recorded={True}, cancels=ANY_CANCEL),
        row(Action.RECORD_OUTCOME, WAITING, cancels=ANY_CANCEL, succeeded={True}),
        row(Action.CANCEL, WAITING, cancels=REQUESTED, succeeded={False}),
        row(Action.CANCEL, READY | EXPOSING, cancels=REQUESTED),
        row(Action.GIVE_UP, WAITING, retryable={False}, succeeded={False}),
        row(Action.GIVE_UP, READY, retryable={False}),
        row(Action.GIVE_UP, EXPOSING, pods=ANY_POD - {PodState.ENDED}, retryable={False}),
        row(Action.AWAIT_ATTEMPT, WAITING, retryable={True}, succeeded={False}),
        row(Action.NOTHING, READY, retryable={True}),
        row(Action.TIME_OUT, EXPOSING, pods=NOT_STARTED, timed_out={True}, retryable={True}),
        row(Action.RECREATE, EXPOSING, pods=LOST, timed_out={False}, retryable={True}),
        row(Action.EXPOSE, EXPOSING, pods=NOT_STARTED - LOST, timed_out={False}, retryable={True}),
        row(Action.INTERRUPT, EXPOSING, pods={PodState.ENDED}, retryable={True}),
        row(Action.FAIL_UNSTARTED, EXPOSING, pods={PodState.ENDED}, retryable={False}),
        row(Action.START_ATTEMPT, EXPOSING, pods={PodState.RUNNING}, slot={True}, retryable={True}),
        row(Action.REPORT_SLOT_PENDING, EXPOSING, pods={PodState.RUNNING}, slot={False}, retryable={True}),
        # Its data path runs.
        row(Action.INTERRUPT, MOVING, pods=GONE, retryable={True}),
        row(Action.RECORD_OUTCOME, MOVING, pods=FINISHED, retryable={False}),
        row(Action.RECORD_OUTCOME, MOVING, pods=FINISHED, cancels=REQUESTED),
        row(Action.END_WITHOUT_RESULT, MOVING, pods={PodState.ABSENT}, retryable={False}),
        row(Action.END_WITHOUT_RESULT, MOVING, pods={PodState.ABSENT}, cancels=REQUESTED),
    ]


TABLE = [
    # Transfers of other agents: only one whose mover has started here is taken over.
    Row(Action.TAKE_OVER, IN_PROGRESS, owned=False, cancels=NO_CANCEL, pods=STARTED, stages=EXPOSING),
    Row(Action.NOTHING, IN_PROGRESS, owned=False, cancels=NO_CANCEL, pods=NOT_HERE, stages=EXPOSING),
    Row(Action.NOTHING, IN_PROGRESS, owned=False, cancels=REQUESTED, pods=EVERY_POD, stages=EXPOSING),
    Row(Action.NOTHING, IN_PROGRESS, owned=False, pods=EVERY_POD, stages=NOT_EXPOSING),
    Row(Action.TAKE_OVER, HOLDING, owned=False, cancels=NO_CANCEL, pods=STARTED),
    Row(Action.NOTHING, HOLDING, owned=False, cancels=NO_CANCEL, pods=NOT_HERE),
    Row(Action.NOTHING, HOLDING, owned=False, cancels=REQUESTED, pods=EVERY_POD),
    Row(Action.NOTHING, set(Phase) - HOLDING - IN_PROGRESS, owned=False, pods=EVERY_POD),
    # Owned transfers.
    Row(Action.HAND_OVER, set(Phase) - FINAL, owned=True, pods={PodState.TAKEN}),
    Row(Action.NOTHING, {Phase.NEW}, owned=True),
    Row(Action.CANCEL, HOLDING, owned=True, cancels=REQUESTED),
    Row(Action.TIME_OUT, HOLDING, owned=True, cancels=NO_CANCEL, pods=NOT_STARTED, timed_out={True}),
    Row(Action.RECREATE, HOLDING, owned=True, cancels=NO_CANCEL, pods=LOST, timed_out={False}),
    Row(Action.EXPOSE, HOLDING, owned=True, cancels=NO_CANCEL, pods=NOT_STARTED - LOST, timed_out={False}),
    Row(Action.PREPARE, ACCEPTED, owned=True, cancels=NO_CANCEL, pods=STARTED),
    Row(Action.FAIL_UNSTARTED, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.ENDED}),
    Row(Action.START, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.RUNNING}, slot={True}),
    Row(Action.REPORT_SLOT_PENDING, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.RUNNING}, slot={False}),
    Row(Action.FINISH, IN_PROGRESS, owned=True, recorded={True}, stages=MOVING),
    Row(Action.FINISH, CANCELING, owned=True, recorded={True}),
    Row(Action.RECORD_OUTCOME, CANCELING, owned=True, recorded={False}, pods=FINISHED),
    Row(Action.END_WITHOUT_RESULT, CANCELING, owned=True, recorded={False}, pods={PodState.ABSENT}),
    *(
        Row(action, phases, owned=True, recorded={False}, pods=ANY_POD - GONE, cancels={cancel}, stages=stages)
        for action, phases, stages, cancel in [
            (Action.FORCE_CANCEL, IN_PROGRESS, MOVING, CancelState.OVERDUE),
            (Action.SET_CANCELING, IN_PROGRESS, MOVING, CancelState.REQUESTED),
            (Action.NOTHING, IN_PROGRESS, MOVING, CancelState.NONE),
            (Action.FORCE_CANCEL, CANCELING, ANY_STAGE, CancelState.OVERDUE),
            (Action.NOTHING, CANCELING, ANY_STAGE, CancelState.REQUESTED),
            (Action.NOTHING, CANCELING, ANY_STAGE, CancelState.NONE),
        ]
    ),
    *rows_of_another_attempt(),
    Row(Action.CLEAN_UP, FINAL, owned=True, pods=EVERY_POD),
]

LEADS_TO = {
    Action.PREPARE: {Phase.PREPARED},
    Action.TIME_OUT: {Phase.FAILED},
    Action.EXPOSE: {Phase.FAILED},
    Action.CANCEL: {Phase.CANCELED},
    Action.START: {Phase.IN_PROGRESS},
    Action.SET_CANCELING: {Phase.CANCELING},
    Action.FORCE_CANCEL: {Phase.CANCELED},
    Action.END_WITHOUT_RESULT: {Phase.CANCELED, Phase.FAILED},
    Action.FAIL_UNSTARTED: {Phase.FAILED},
    Action.GIVE_UP: {Phase.FAILED},
    Action.INTERRUPT: {Phase.FAILED},
    Action.AWAIT_ATTEMPT: {Phase.FAILED},
    Action.START_ATTEMPT: {Phase.FAILED},
    Action.FINISH: {Phase.COMPLETED, Phase.CANCELED, Phase.FAILED},
}


def every_view() -> Iterator[View]:
    yes_no = (True, False)
    stages = (AttemptStage, yes_no, yes_no)
    for fields in product(Phase, yes_no, CancelState, PodState, yes_no, yes_no, yes_no, *stages):
        yield View(*fields)


def test_every_view_has_one_row_with_its_action() -> None:
    for view in every_view():
        rows = [row for row in TABLE if row.covers(view)]
        assert [row.action for row in rows] == [decide(view)], view


@pytest.mark.parametrize("action", Action, ids=str)
def test_every_action_is_required_by_a_view(action: Action) -> None:
    assert any(decide(view) is action for view in every_view())


def test_every_action_leads_to_a_legal_phase() -> None:
    for view in every_view():
        assert LEADS_TO.get(decide(view), set()) <= TRANSITIONS[view.phase], view


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
def test_veleros_agent_takes_over_by_status(phase: str, node: str, outcome: str, pod: str, state: PodState) -> None:
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
