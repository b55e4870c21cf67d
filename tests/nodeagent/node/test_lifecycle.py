"""The rules of the life cycle, for every possible view; the view of a transfer and its mover pod.

What has a timeout is measured from its first observation, never by the timestamps of a transfer.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from core.models.names import MOVER_LOST_ANNOTATION, OUTCOME_ANNOTATION, PENDING_REASON_ANNOTATION
from core.models.phases import AttemptStage, Phase
from core.models.transfers import DataUpload
from nodeagent.node.lifecycle import (
    Action,
    CancelState,
    Case,
    Durations,
    Measured,
    Observation,
    Site,
    Timeouts,
    View,
    build_case,
    decide,
)
from nodeagent.node.reconciler import Steps
from nodeagent.transfers.kinds.csi_snapshot import DataUploadKind
from nodeagent.transfers.mover_pod import MoverLoss, PodState
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload, ended, mover_pod
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


@dataclass(frozen=True)
class Row:
    """The views that require one action: `allowed` has the values of the fields that matter, by their names."""

    action: Action
    allowed: dict[str, Collection[Any]]

    def covers(self, view: View) -> bool:
        return all(getattr(view, name) in values for name, values in self.allowed.items())


def row(action: Action, phases: Collection[Phase], *, owned: bool, **allowed: Collection[Any]) -> Row:
    return Row(action, {"phase": phases, "owned": {owned}, "pod": ANY_POD} | allowed)


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

    def between(action: Action, stages: Collection[AttemptStage], **allowed: Collection[Any]) -> Row:
        chosen: dict[str, Collection[Any]] = {"outcome_recorded": {False}, "cancel": NO_CANCEL, "stage": stages}
        return row(action, IN_PROGRESS, owned=True, **chosen | allowed)

    return [
        between(Action.FINISH, BETWEEN | EXPOSING, outcome_recorded={True}, cancel=ANY_CANCEL),
        between(Action.RECORD_OUTCOME, WAITING, cancel=ANY_CANCEL, succeeded={True}),
        between(Action.CANCEL, WAITING, cancel=REQUESTED, succeeded={False}),
        between(Action.CANCEL, READY | EXPOSING, cancel=REQUESTED),
        between(Action.GIVE_UP, WAITING, retryable={False}, succeeded={False}),
        between(Action.GIVE_UP, READY, retryable={False}),
        between(Action.GIVE_UP, EXPOSING, pod=ANY_POD - {PodState.ENDED}, retryable={False}),
        between(Action.AWAIT_ATTEMPT, WAITING, retryable={True}, succeeded={False}),
        between(Action.NOTHING, READY, retryable={True}),
        between(Action.TIME_OUT, EXPOSING, pod=NOT_STARTED, timed_out={True}, retryable={True}),
        between(Action.RECREATE, EXPOSING, pod=LOST, timed_out={False}, retryable={True}),
        between(Action.EXPOSE, EXPOSING, pod=NOT_STARTED - LOST, timed_out={False}, retryable={True}),
        between(Action.INTERRUPT, EXPOSING, pod={PodState.ENDED}, retryable={True}),
        between(Action.FAIL_UNSTARTED, EXPOSING, pod={PodState.ENDED}, retryable={False}),
        between(Action.START, EXPOSING, pod={PodState.RUNNING}, has_slot={True}, retryable={True}),
        between(Action.REPORT_SLOT_PENDING, EXPOSING, pod={PodState.RUNNING}, has_slot={False}, retryable={True}),
        # Its data path runs.
        between(Action.INTERRUPT, MOVING, pod=GONE, retryable={True}),
        between(Action.RECORD_OUTCOME, MOVING, pod=FINISHED, retryable={False}),
        between(Action.RECORD_OUTCOME, MOVING, pod=FINISHED, cancel=REQUESTED),
        between(Action.END_WITHOUT_RESULT, MOVING, pod={PodState.ABSENT}, retryable={False}),
        between(Action.END_WITHOUT_RESULT, MOVING, pod={PodState.ABSENT}, cancel=REQUESTED),
    ]


TABLE = [
    # Transfers of other agents: only one whose mover has started here is taken over.
    row(Action.PREPARE, IN_PROGRESS, owned=False, cancel=NO_CANCEL, pod=STARTED, stage=EXPOSING),
    row(Action.NOTHING, IN_PROGRESS, owned=False, cancel=NO_CANCEL, pod=NOT_HERE, stage=EXPOSING),
    row(Action.NOTHING, IN_PROGRESS, owned=False, cancel=REQUESTED, pod=EVERY_POD, stage=EXPOSING),
    row(Action.NOTHING, IN_PROGRESS, owned=False, pod=EVERY_POD, stage=NOT_EXPOSING),
    row(Action.PREPARE, HOLDING, owned=False, cancel=NO_CANCEL, pod=STARTED),
    row(Action.NOTHING, HOLDING, owned=False, cancel=NO_CANCEL, pod=NOT_HERE),
    row(Action.NOTHING, HOLDING, owned=False, cancel=REQUESTED, pod=EVERY_POD),
    row(Action.NOTHING, set(Phase) - HOLDING - IN_PROGRESS, owned=False, pod=EVERY_POD),
    # Owned transfers.
    row(Action.HAND_OVER, set(Phase) - FINAL, owned=True, pod={PodState.TAKEN}),
    row(Action.NOTHING, {Phase.NEW}, owned=True),
    row(Action.CANCEL, HOLDING, owned=True, cancel=REQUESTED),
    row(Action.TIME_OUT, HOLDING, owned=True, cancel=NO_CANCEL, pod=NOT_STARTED, timed_out={True}),
    row(Action.RECREATE, HOLDING, owned=True, cancel=NO_CANCEL, pod=LOST, timed_out={False}),
    row(Action.EXPOSE, HOLDING, owned=True, cancel=NO_CANCEL, pod=NOT_STARTED - LOST, timed_out={False}),
    row(Action.PREPARE, ACCEPTED, owned=True, cancel=NO_CANCEL, pod=STARTED),
    row(Action.FAIL_UNSTARTED, PREPARED, owned=True, cancel=NO_CANCEL, pod={PodState.ENDED}),
    row(Action.START, PREPARED, owned=True, cancel=NO_CANCEL, pod={PodState.RUNNING}, has_slot={True}),
    row(Action.REPORT_SLOT_PENDING, PREPARED, owned=True, cancel=NO_CANCEL, pod={PodState.RUNNING}, has_slot={False}),
    row(Action.FINISH, IN_PROGRESS, owned=True, outcome_recorded={True}, stage=MOVING),
    row(Action.FINISH, CANCELING, owned=True, outcome_recorded={True}),
    row(Action.RECORD_OUTCOME, CANCELING, owned=True, outcome_recorded={False}, pod=FINISHED),
    row(Action.END_WITHOUT_RESULT, CANCELING, owned=True, outcome_recorded={False}, pod={PodState.ABSENT}),
    *(
        row(action, phases, owned=True, outcome_recorded={False}, pod=ANY_POD - GONE, cancel={cancel}, stage=stages)
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
    row(Action.CLEAN_UP, FINAL, owned=True, pod=EVERY_POD),
]


def every_view() -> Iterator[View]:
    yes_no = (True, False)
    stages = (AttemptStage, yes_no, yes_no)
    for fields in product(Phase, yes_no, CancelState, PodState, yes_no, yes_no, yes_no, *stages):
        yield View(*fields)


def test_every_view_has_one_row_with_its_action_and_every_action_a_view() -> None:
    required = set()
    for view in every_view():
        action = decide(view)
        rows = [row for row in TABLE if row.covers(view)]
        assert [row.action for row in rows] == [action], view
        required.add(action)
    assert required == set(Action)


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


ENDED = ended(0, "{}")


def test_the_pod_of_another_transfer_of_the_name_counts_as_absent() -> None:
    pod = mover_pod(data_upload(uid="an earlier one"), **ENDED)
    transfer = data_upload(node=NODE, status={"phase": "InProgress"})
    assert view_of(transfer, pod).pod is PodState.ABSENT
    case = case_of(transfer, departed=pod)
    assert (case.view.pod, case.departed) == (PodState.ABSENT, None)


@pytest.mark.parametrize(
    ("label", "node", "owned"),
    [(NODE, NODE, True), ("node-b", NODE, False), ("", NODE, False), (Site("n" * 80, "").label, "n" * 80, True)],
    ids=["this node", "other", "none", "a long name"],
)
def test_the_node_label_names_the_owning_agent(label: str, node: str, owned: bool) -> None:
    assert len(label) <= 63
    assert case_of(data_upload(node=label), site=Site(node, NAMESPACE)).view.owned is owned


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
    status = ENDED if pod == "Succeeded" else {"phase": pod}
    mover = mover_pod(transfer, node="node-b", **status) if pod else None
    assert view_of(transfer, mover).pod is state


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


def test_each_action_has_a_step() -> None:
    assert [action for action in Action if not hasattr(Steps, action.name.lower())] == [Action.NOTHING]
