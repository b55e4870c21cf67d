"""The rules of a load's life on its node, as one pure function.

Knows what to do next for every state a load can be seen in. Does not know how the state was
read or how a step is done: `nodeagent.view` reads, `nodeagent.steps` acts. A `View` is made
of enums and booleans only, so the tests go through all of them.
"""

from dataclasses import dataclass
from enum import Enum, auto

from core.models.phases import HOLDING_PHASES, Phase
from nodeagent.transfers.mover_pod import PodState

__all__ = ["Action", "Stop", "View", "decide"]


class Stop(Enum):
    """Whether somebody wants the load to end early (`spec.cancel`, or its deletion)."""

    NONE = auto()
    ASKED = auto()
    OVERDUE = auto()
    """Asked so long ago that nobody waits for the mover any more."""


class Action(Enum):
    """The one step to do next."""

    NOTHING = auto()
    EXPOSE = auto()
    """Bring the volume one step nearer to a mover pod, the first one or another one."""
    REMAKE = auto()
    """The mover pod was taken away before its data path was started: say so and make room."""
    TAKE_OVER = auto()
    """The mover runs here, another agent exposed it: make the load ours, and Prepared."""
    PREPARE = auto()
    TIME_OUT = auto()
    """Failed: not Prepared in time."""
    CANCEL = auto()
    """Canceled at once: no data path runs."""
    AWAIT_SLOT = auto()
    """Say that the node's concurrency is used up."""
    START = auto()
    MOVE_CANCELING = auto()
    FORCE_CANCEL = auto()
    """Canceled although the mover never answered."""
    LOSE = auto()
    """The mover pod is gone and left no outcome."""
    GIVE_UP = auto()
    """Failed: the mover pod ended before its data path was started."""
    KEEP_OUTCOME = auto()
    """Write down how the mover ended."""
    FINISH = auto()
    """Complete what the kept outcome asks for, then the final status."""
    CLEAN_UP = auto()
    """The load is final: remove what was made for it, then our marks."""


@dataclass(frozen=True)
class View:
    """All that decides about a load's next step.

    `ours`: its node label names this node. `outcome_kept`: the outcome annotation is there.
    `slot`: it is its turn in the node's concurrency. `late`: the prepare timeout is over, or,
    after a mover was lost while Prepared, as long a time since then.
    """

    phase: Phase
    ours: bool
    stop: Stop
    pod: PodState
    outcome_kept: bool
    slot: bool
    late: bool


_STARTED = frozenset({PodState.RUNNING, PodState.ENDED})


_OVER = frozenset({PodState.ENDED, PodState.DISPLACED})


def decide(view: View) -> Action:
    """Return the next step for a load seen as `view`."""
    if not view.ours:
        return _decide_foreign(view)
    if view.phase.final:
        return Action.CLEAN_UP
    match view.phase:
        case Phase.ACCEPTED | Phase.PREPARED:
            return _decide_before_start(view)
        case Phase.IN_PROGRESS | Phase.CANCELING:
            return _decide_running(view)
    # A New load with our label does not exist by construction: label and phase are one write.
    return Action.NOTHING


def _decide_foreign(view: View) -> Action:
    """Return the step for a load that another agent, or nobody, works on."""
    # A mover that was made anew may have come to another node than the one before it.
    started_here = view.phase in HOLDING_PHASES and view.pod in _STARTED
    # Canceling a load before its start is its own agent's, which knows what there is to remove.
    return Action.TAKE_OVER if started_here and view.stop is Stop.NONE else Action.NOTHING


def _decide_before_start(view: View) -> Action:
    """Return the step for a load of ours whose mover is not there yet, or waits for InProgress."""
    if view.stop is not Stop.NONE:
        return Action.CANCEL
    if view.pod in _STARTED:
        return Action.PREPARE if view.phase is Phase.ACCEPTED else _decide_prepared(view)
    if view.late:
        return Action.TIME_OUT
    return Action.REMAKE if view.pod is PodState.DISPLACED else Action.EXPOSE


def _decide_prepared(view: View) -> Action:
    """Return the step for a load of ours whose mover has come up once it was Prepared."""
    if view.pod is PodState.ENDED:
        return Action.GIVE_UP
    return Action.START if view.slot else Action.AWAIT_SLOT


def _decide_running(view: View) -> Action:
    """Return the step for a load of ours whose mover moves data, or did."""
    if view.outcome_kept:
        return Action.FINISH
    if view.pod in _OVER:
        return Action.KEEP_OUTCOME
    if view.pod is PodState.ABSENT:
        return Action.LOSE
    if view.stop is Stop.OVERDUE:
        return Action.FORCE_CANCEL
    if view.stop is Stop.ASKED and view.phase is Phase.IN_PROGRESS:
        return Action.MOVE_CANCELING
    return Action.NOTHING
