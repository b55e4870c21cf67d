"""The rules of the life cycle, for every possible view."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from core.models.phases import TRANSITIONS, Phase
from nodeagent.node.lifecycle import Action, CancelState, View, decide
from nodeagent.transfers.mover_pod import PodState

ANY_POD = frozenset(PodState)
ANY_CANCEL = frozenset(CancelState)
STARTED = {PodState.RUNNING, PodState.ENDED}
NOT_STARTED = ANY_POD - STARTED
LOST = {PodState.LOST}
FINISHED = {PodState.ENDED, PodState.LOST}
REQUESTED = {CancelState.REQUESTED, CancelState.OVERDUE}
RUNNING = {Phase.IN_PROGRESS, Phase.CANCELING}
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

    def covers(self, view: View) -> bool:
        return (
            view.phase in self.phases
            and view.owned is self.owned
            and view.cancel in self.cancels
            and view.pod in self.pods
            and view.outcome_recorded in self.recorded
            and view.has_slot in self.slot
            and view.timed_out in self.timed_out
        )


NO_CANCEL = {CancelState.NONE}
ACCEPTED, PREPARED = {Phase.ACCEPTED}, {Phase.PREPARED}
HOLDING = ACCEPTED | PREPARED
TABLE = [
    # Transfers of other agents: only one whose mover has started here is taken over.
    Row(Action.TAKE_OVER, HOLDING, owned=False, cancels=NO_CANCEL, pods=STARTED),
    Row(Action.NOTHING, HOLDING, owned=False, cancels=NO_CANCEL, pods=NOT_STARTED),
    Row(Action.NOTHING, HOLDING, owned=False, cancels=REQUESTED),
    Row(Action.NOTHING, set(Phase) - HOLDING, owned=False),
    # Owned transfers.
    Row(Action.NOTHING, {Phase.NEW}, owned=True),
    Row(Action.CANCEL, HOLDING, owned=True, cancels=REQUESTED),
    Row(Action.TIME_OUT, HOLDING, owned=True, cancels=NO_CANCEL, pods=NOT_STARTED, timed_out={True}),
    Row(Action.RECREATE, HOLDING, owned=True, cancels=NO_CANCEL, pods=LOST, timed_out={False}),
    Row(Action.EXPOSE, HOLDING, owned=True, cancels=NO_CANCEL, pods=NOT_STARTED - LOST, timed_out={False}),
    Row(Action.PREPARE, ACCEPTED, owned=True, cancels=NO_CANCEL, pods=STARTED),
    Row(Action.FAIL_UNSTARTED, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.ENDED}),
    Row(Action.START, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.RUNNING}, slot={True}),
    Row(Action.REPORT_SLOT_PENDING, PREPARED, owned=True, cancels=NO_CANCEL, pods={PodState.RUNNING}, slot={False}),
    Row(Action.FINISH, RUNNING, owned=True, recorded={True}),
    Row(Action.RECORD_OUTCOME, RUNNING, owned=True, recorded={False}, pods=FINISHED),
    Row(Action.END_WITHOUT_RESULT, RUNNING, owned=True, recorded={False}, pods={PodState.ABSENT}),
    *(
        Row(action, phases, owned=True, recorded={False}, pods=ANY_POD - FINISHED - {PodState.ABSENT}, cancels={cancel})
        for action, phases, cancel in [
            (Action.FORCE_CANCEL, RUNNING, CancelState.OVERDUE),
            (Action.SET_CANCELING, {Phase.IN_PROGRESS}, CancelState.REQUESTED),
            (Action.NOTHING, {Phase.CANCELING}, CancelState.REQUESTED),
            (Action.NOTHING, RUNNING, CancelState.NONE),
        ]
    ),
    Row(Action.CLEAN_UP, FINAL, owned=True),
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
    Action.FINISH: {Phase.COMPLETED, Phase.CANCELED, Phase.FAILED},
}


def every_view() -> Iterator[View]:
    for fields in product(Phase, (True, False), CancelState, PodState, (True, False), (True, False), (True, False)):
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


def test_a_final_transfer_is_never_moved_again() -> None:
    actions = {decide(view) for view in every_view() if view.phase.final}
    assert actions == {Action.CLEAN_UP, Action.NOTHING}
