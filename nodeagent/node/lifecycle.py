"""The rules of a load's life on its node, as one pure function.

Knows what to do next for every state a load can be seen in. Does not know how the state was
read or how a step is done: `nodeagent.node.lifecycle` reads, `nodeagent.node.reconciler` acts. A `View` is made
of enums and booleans only, so the tests go through all of them.

What the rules look at: a load and its mover pod, reduced to a finite view.

Knows how a phase, a label, a pod's status and the clock become a `View`. Does not know the
rules (`nodeagent.node.lifecycle`), and reads nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto

from core.models.base import JsonDict
from core.models.names import NODE_LABEL, label_value
from core.models.phases import HOLDING_PHASES, RUNNING_PHASES, Phase
from core.models.transfers import Transfer
from nodeagent.node.mover_loss import read_loss
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, belongs_to, has_ended, pod_node, pod_state
from nodeagent.transfers.outcome import Outcome, read_outcome

__all__ = [
    "Action",
    "Case",
    "Observation",
    "ReadCurrent",
    "Site",
    "Stop",
    "Timeouts",
    "TransferKey",
    "View",
    "build_case",
    "build_view",
    "decide",
    "is_owned",
]


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


TransferKey = tuple[str, str, str]
"""A load in the work queue: kind, namespace, name."""


ReadCurrent = Callable[[TransferKey], JsonDict | None]
"""Returns a load as last seen; None where that is unknown, or lacks something that we wrote."""


@dataclass(frozen=True)
class Site:
    """Where this agent works: its node, the node's OS and the namespace of the loads."""

    node: str
    namespace: str
    os: str = "linux"

    @property
    def label(self) -> str:
        """The node's name as the value of the node label."""
        return label_value(self.node)


@dataclass(frozen=True)
class Timeouts:
    """How long things may take.

    `prepare`: from Accepted to Prepared. `resource`: for one operation on the cluster, such
    as a rebind. `cancel`: for a mover to answer a cancel in InProgress.
    Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go, and its forced cancel.
    """

    prepare: timedelta = timedelta(minutes=30)
    resource: timedelta = timedelta(minutes=10)
    cancel: timedelta = timedelta(hours=1)


@dataclass(frozen=True)
class Case:
    """One load as it was read, and what the rules look at.

    `pod` is its mover pod, a v1 Pod as JSON dict; where the API server has none any more, as it
    was last seen if it had ended. `departed` is the one that was last seen going away. `outcome`
    is what is kept on the load.
    """

    kind: Kind
    cr: Transfer
    pod: JsonDict | None
    outcome: Outcome | None
    view: View
    departed: JsonDict | None = None

    @property
    def key(self) -> TransferKey:
        """The load's key in the work queue."""
        return (self.kind.name, self.cr.metadata.namespace, self.cr.name)


@dataclass(frozen=True)
class Observation:
    """One transfer and its mover pod as they were observed at the time `now`.

    `pod` is the pod of the transfer's name, `departed` the last version of one that disappeared
    from this node: v1 Pods as JSON dicts, which may belong to an earlier transfer of that name.
    `has_slot`: the transfer holds one of the node's slots, or may take one. `cancel_overdue`: the
    mover did not stop in time after a cancel request.
    """

    cr: Transfer
    pod: JsonDict | None
    departed: JsonDict | None
    now: datetime
    has_slot: bool = False
    cancel_overdue: bool = False


def build_case(kind: Kind, seen: Observation, site: Site, limits: Timeouts) -> Case:
    """Return the case of an observed transfer; a pod that belongs to another one counts as absent."""
    pod, departed = _own(seen.pod, seen.cr), _own(seen.departed, seen.cr)
    if pod is None and departed is not None and seen.cr.phase in RUNNING_PHASES and has_ended(departed):
        # A drain deletes the pod as soon as it has ended; its termination message still counts.
        pod = departed
    outcome = read_outcome(seen.cr)
    view = build_view(replace(seen, pod=pod), site, limits, outcome_kept=outcome is not None)
    return Case(kind, seen.cr, pod, outcome, view, departed)


def build_view(seen: Observation, site: Site, limits: Timeouts, *, outcome_kept: bool) -> View:
    """Return what `decide` needs to know of a transfer; the pod of `seen` is its own."""
    cr = seen.cr
    overdue = Stop.OVERDUE if seen.cancel_overdue else Stop.ASKED
    return View(
        phase=cr.phase,
        ours=is_owned(cr, site),
        stop=overdue if cr.cancel_requested else Stop.NONE,
        pod=_state_of(seen.pod, cr, site),
        outcome_kept=outcome_kept,
        slot=seen.has_slot,
        late=_is_late(cr, limits, seen.now),
    )


def is_owned(cr: Transfer, site: Site) -> bool:
    """Return whether the node label of `cr` names this node."""
    return cr.metadata.labels.get(NODE_LABEL) == site.label


def _own(pod: JsonDict | None, cr: Transfer) -> JsonDict | None:
    return pod if pod is not None and belongs_to(pod, cr) else None


def _state_of(pod: JsonDict | None, cr: Transfer, site: Site) -> PodState:
    elsewhere = pod is not None and pod_node(pod) not in {"", site.node}
    # The agent of the pod's node takes the transfer over before its start; until then it is being exposed.
    return PodState.PENDING if elsewhere and cr.phase in HOLDING_PHASES else pod_state(pod)


def _is_late(cr: Transfer, limits: Timeouts, now: datetime) -> bool:
    since = cr.accepted_at if cr.phase is Phase.ACCEPTED else None
    if cr.phase is Phase.PREPARED:
        # Pending for a slot may last; a lost mover pod has as long to be replaced as the first one had.
        loss = read_loss(cr)
        since = loss.since if loss is not None and not loss.replaced else None
    return since is not None and now - since >= limits.prepare
