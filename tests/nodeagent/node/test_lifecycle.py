"""The rules of the life cycle, over every view there is."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import pytest

from core.models.phases import TRANSITIONS, Phase
from nodeagent.node.lifecycle import Action, Stop, View, decide
from nodeagent.transfers.mover_pod import PodState

ANY_POD = frozenset(PodState)
ANY_STOP = frozenset(Stop)
STARTED = {PodState.RUNNING, PodState.ENDED}
NOT_STARTED = ANY_POD - STARTED
TAKEN = {PodState.DISPLACED}
OVER = {PodState.ENDED, PodState.DISPLACED}
STOPPED = {Stop.ASKED, Stop.OVERDUE}
RUNNING = {Phase.IN_PROGRESS, Phase.CANCELING}
FINAL = {Phase.COMPLETED, Phase.FAILED, Phase.CANCELED}
BOTH = {True, False}


@dataclass(frozen=True)
class Row:
    """The views that one action is expected for; fields that are left out do not matter."""

    action: Action
    phases: Collection[Phase]
    ours: bool
    stops: Collection[Stop] = ANY_STOP
    pods: Collection[PodState] = ANY_POD
    kept: Collection[bool] = frozenset(BOTH)
    slot: Collection[bool] = frozenset(BOTH)
    late: Collection[bool] = frozenset(BOTH)

    def covers(self, view: View) -> bool:
        return (
            view.phase in self.phases
            and view.ours is self.ours
            and view.stop in self.stops
            and view.pod in self.pods
            and view.outcome_kept in self.kept
            and view.slot in self.slot
            and view.late in self.late
        )


NO_STOP = {Stop.NONE}
ACCEPTED, PREPARED = {Phase.ACCEPTED}, {Phase.PREPARED}
HOLDING = ACCEPTED | PREPARED
TABLE = [
    # Loads of others: only a mover that started here is taken over.
    Row(Action.TAKE_OVER, HOLDING, ours=False, stops=NO_STOP, pods=STARTED),
    Row(Action.NOTHING, HOLDING, ours=False, stops=NO_STOP, pods=NOT_STARTED),
    Row(Action.NOTHING, HOLDING, ours=False, stops=STOPPED),
    Row(Action.NOTHING, set(Phase) - HOLDING, ours=False),
    # Ours.
    Row(Action.NOTHING, {Phase.NEW}, ours=True),
    Row(Action.CANCEL, HOLDING, ours=True, stops=STOPPED),
    Row(Action.TIME_OUT, HOLDING, ours=True, stops=NO_STOP, pods=NOT_STARTED, late={True}),
    Row(Action.REMAKE, HOLDING, ours=True, stops=NO_STOP, pods=TAKEN, late={False}),
    Row(Action.EXPOSE, HOLDING, ours=True, stops=NO_STOP, pods=NOT_STARTED - TAKEN, late={False}),
    Row(Action.PREPARE, ACCEPTED, ours=True, stops=NO_STOP, pods=STARTED),
    Row(Action.GIVE_UP, PREPARED, ours=True, stops=NO_STOP, pods={PodState.ENDED}),
    Row(Action.START, PREPARED, ours=True, stops=NO_STOP, pods={PodState.RUNNING}, slot={True}),
    Row(Action.AWAIT_SLOT, PREPARED, ours=True, stops=NO_STOP, pods={PodState.RUNNING}, slot={False}),
    Row(Action.FINISH, RUNNING, ours=True, kept={True}),
    Row(Action.KEEP_OUTCOME, RUNNING, ours=True, kept={False}, pods=OVER),
    Row(Action.LOSE, RUNNING, ours=True, kept={False}, pods={PodState.ABSENT}),
    *(
        Row(action, phases, ours=True, kept={False}, pods=ANY_POD - OVER - {PodState.ABSENT}, stops={stop})
        for action, phases, stop in [
            (Action.FORCE_CANCEL, RUNNING, Stop.OVERDUE),
            (Action.MOVE_CANCELING, {Phase.IN_PROGRESS}, Stop.ASKED),
            (Action.NOTHING, {Phase.CANCELING}, Stop.ASKED),
            (Action.NOTHING, RUNNING, Stop.NONE),
        ]
    ),
    Row(Action.CLEAN_UP, FINAL, ours=True),
]

LEADS_TO = {
    Action.PREPARE: {Phase.PREPARED},
    Action.TIME_OUT: {Phase.FAILED},
    Action.EXPOSE: {Phase.FAILED},
    Action.CANCEL: {Phase.CANCELED},
    Action.START: {Phase.IN_PROGRESS},
    Action.MOVE_CANCELING: {Phase.CANCELING},
    Action.FORCE_CANCEL: {Phase.CANCELED},
    Action.LOSE: {Phase.CANCELED, Phase.FAILED},
    Action.GIVE_UP: {Phase.FAILED},
    Action.FINISH: {Phase.COMPLETED, Phase.CANCELED, Phase.FAILED},
}


def every_view() -> Iterator[View]:
    for fields in product(Phase, (True, False), Stop, PodState, (True, False), (True, False), (True, False)):
        yield View(*fields)


def test_every_view_gets_the_action_of_its_only_row() -> None:
    for view in every_view():
        rows = [row for row in TABLE if row.covers(view)]
        assert [row.action for row in rows] == [decide(view)], view


@pytest.mark.parametrize("action", Action, ids=str)
def test_every_action_is_reached(action: Action) -> None:
    assert any(decide(view) is action for view in every_view())


def test_no_action_leads_to_a_move_that_the_table_does_not_have() -> None:
    for view in every_view():
        assert LEADS_TO.get(decide(view), set()) <= TRANSITIONS[view.phase], view


def test_a_final_load_is_never_moved_again() -> None:
    actions = {decide(view) for view in every_view() if view.phase.final}
    assert actions == {Action.CLEAN_UP, Action.NOTHING}
