"""The rules of the life cycle, for every possible view."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from core.models.phases import TRANSITIONS, AttemptStage, Phase
from nodeagent.node.lifecycle import Action, CancelState, View, decide
from nodeagent.transfers.mover_pod import PodState

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
