"""The rules of a load's life on its node, as one pure function.

Knows what to do next for every state a load can be seen in. Does not know how the state was
read or how a step is done: `nodeagent.node.lifecycle` reads, `nodeagent.node.reconciler` acts. A `View` is made
of enums and booleans only, so the tests go through all of them.

What the rules look at: a load and its mover pod, reduced to a finite view.

Knows how a phase, a label, a pod's status and the clock become a `View`. Does not know the
rules (`nodeagent.node.lifecycle`), and reads nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto

from core.clock import Clock
from core.models.base import JsonDict
from core.models.names import NODE_LABEL, label_value
from core.models.phases import HOLDING_PHASES, RUNNING_PHASES, Phase
from core.models.transfers import Transfer
from nodeagent.node.mover_loss import read_loss
from nodeagent.node.slots import Claim, Slots
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, belongs_to, has_ended, pod_node, pod_state
from nodeagent.transfers.outcome import Outcome, read_outcome

__all__ = ["Action", "Case", "ReadCurrent", "Site", "Stop", "Timeouts", "TransferKey", "View", "Viewer", "decide"]


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


class Viewer:
    """Reduces loads to views, by the clock and by the node's slots."""

    def __init__(self, clock: Clock, site: Site, limits: Timeouts, slots: Slots) -> None:
        """View loads from `site`."""
        self._clock = clock
        self._site = site
        self._limits = limits
        self._slots = slots
        self._stop_seen_at: dict[str, float] = {}

    def look(self, kind: Kind, cr: Transfer, pod: JsonDict | None, *, departed: JsonDict | None = None) -> Case:
        """Return the case of `cr`; a pod that belongs to another load counts as absent."""
        if pod is not None and not belongs_to(pod, cr):
            pod = None
        if departed is not None and not belongs_to(departed, cr):
            departed = None
        if pod is None and departed is not None and cr.phase in RUNNING_PHASES and has_ended(departed):
            # A drain takes the pod away as soon as it has ended; what it said still counts.
            pod = departed
        ours = cr.metadata.labels.get(NODE_LABEL) == self._site.label
        if ours:
            self._slots.observe(Claim.of(cr, now=self._clock.now()), cr.phase)
        outcome = read_outcome(cr)
        view = View(
            phase=cr.phase,
            ours=ours,
            stop=self._stop(cr, ours=ours),
            pod=self._pod_state(cr, pod),
            outcome_kept=outcome is not None,
            slot=self._slots.is_turn_of(cr.uid),
            late=self._late(cr),
        )
        return Case(kind, cr, pod, outcome, view, departed)

    def seconds_until_overdue(self, cr: Transfer) -> float:
        """Return how long a mover may still take to answer the cancel of `cr`."""
        limit_seconds = self._limits.cancel.total_seconds()
        asked_at = cr.cancel_requested_at
        if asked_at is not None:
            return max(0.0, limit_seconds - (self._clock.now() - asked_at).total_seconds())
        # Until that is written down, only this process knows.
        seen = self._stop_seen_at.get(cr.uid, self._clock.monotonic())
        return max(0.0, seen + limit_seconds - self._clock.monotonic())

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._stop_seen_at.pop(uid, None)
        self._slots.forget(uid)

    def _pod_state(self, cr: Transfer, pod: JsonDict | None) -> PodState:
        elsewhere = pod is not None and pod_node(pod) not in {"", self._site.node}
        # The agent of its node takes a load over before its start; until then it is exposed.
        return PodState.PENDING if elsewhere and cr.phase in HOLDING_PHASES else pod_state(pod)

    def _stop(self, cr: Transfer, *, ours: bool) -> Stop:
        if not cr.cancel_requested:
            return Stop.NONE
        if not ours:
            return Stop.ASKED
        self._stop_seen_at.setdefault(cr.uid, self._clock.monotonic())
        return Stop.OVERDUE if self.seconds_until_overdue(cr) <= 0 else Stop.ASKED

    def _late(self, cr: Transfer) -> bool:
        since = cr.accepted_at if cr.phase is Phase.ACCEPTED else None
        if cr.phase is Phase.PREPARED:
            # Pending for a slot may last; a lost mover has as long to come back as the first one had.
            loss = read_loss(cr)
            since = loss.since if loss is not None and not loss.replaced else None
        return since is not None and self._clock.now() - since >= self._limits.prepare
