"""The life cycle of a transfer on its node: pure rules over a finite view, and how long each state has lasted.

A `View` consists of enums and booleans only, so the tests enumerate all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum, auto
from typing import Any

from core.clock import Clock
from core.kube.types import Pod
from core.models.names import NODE_LABEL, label_value
from core.models.phases import HOLDING_PHASES, RUNNING_PHASES, AttemptStage, Phase, RetryRules
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from exposer.pod_status import PodEnd, parse_pod_end
from nodeagent.runtime.workqueue import LONGEST_BACKOFF_SECONDS, Timers
from nodeagent.transfers import retries
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, find_unreplaced, has_ended, is_current, pod_node, pod_state
from nodeagent.transfers.outcome import Outcome, read_outcome


@dataclass(frozen=True)
class Measured:
    """How long one transfer has been observed in a state; None while it is not in it.

    `preparing_seconds`: in preparation. `canceling_seconds`: with a cancel request. `waiting_seconds`: between two
    attempts. `silent_seconds`: so, and without an Event of its mover.
    """

    preparing_seconds: float | None = None
    canceling_seconds: float | None = None
    waiting_seconds: float | None = None
    silent_seconds: float | None = None


class Durations:
    """The durations of this node's transfers, by uid."""

    def __init__(self, clock: Clock, outdated_seconds: Callable[[], float] = lambda: 0.0) -> None:
        """Count no time as preparation for which the mover pods have not been observed, but for one backoff."""
        self._timers = {one.name: Timers(clock) for one in fields(Measured)}
        self._timers["preparing_seconds"] = Timers(
            clock, most_seconds=LONGEST_BACKOFF_SECONDS, outdated_seconds=outdated_seconds
        )

    def measure(self, cr: Transfer, *, mover_events: int = 0) -> Measured:
        """Return the durations of `cr`, as it was observed just now; its mover has recorded `mover_events`."""
        number = cr.attempts.number if cr.stage is AttemptStage.WAITING else None
        subjects = {
            "preparing_seconds": _preparation(cr),
            "canceling_seconds": "cancel" if cr.cancel_requested else None,
            "waiting_seconds": f"{number}" if number else None,
            "silent_seconds": f"{number} {mover_events}" if number else None,
        }
        for name in (name for name, subject in subjects.items() if subject is None):
            self._timers[name].forget(cr.uid)
        lasting = {name: subject for name, subject in subjects.items() if subject is not None}
        return Measured(**{name: self._timers[name].seconds(cr.uid, subject) for name, subject in lasting.items()})

    def forget(self, uid: str) -> None:
        """Drop the durations of a transfer."""
        for timers in self._timers.values():
            timers.forget(uid)


def _preparation(cr: Transfer) -> str | None:
    """Return what the prepare timeout applies to: the first mover pod, or a replacement; None for nothing.

    A transfer may be pending for a slot or for a copy without limit; a lost mover pod must be replaced
    in the same time as the first one had.
    """
    if cr.phase is Phase.ACCEPTED:
        # The transfer that has the copy may take hours; the leader mostly keeps others New until then.
        return None if cr.pending_reason == PendingReason.COPY_IN_USE else "first mover pod"
    if cr.stage is AttemptStage.EXPOSING:
        return None if cr.pending_reason == PendingReason.WAITING_FOR_SLOT else f"attempt {cr.attempts.number}"
    loss = find_unreplaced(cr) if cr.phase is Phase.PREPARED else None
    return f"replacement since {loss.since}" if loss is not None else None


class CancelState(Enum):
    """Whether the transfer is to be canceled (`spec.cancel`, or its deletion)."""

    NONE = auto()
    REQUESTED = auto()
    OVERDUE = auto()
    """The mover did not stop in time after the request."""


class Action(Enum):
    """The next step for a transfer; the step of that name describes it."""

    NOTHING = auto()
    EXPOSE = auto()
    RECREATE = auto()
    HAND_OVER = auto()
    PREPARE = auto()
    """Also of another agent's transfer: its mover runs here."""
    TIME_OUT = auto()
    CANCEL = auto()
    """Canceled at once: no data path runs."""
    REPORT_SLOT_PENDING = auto()
    START = auto()
    """In the first attempt, or in another one."""
    SET_CANCELING = auto()
    FORCE_CANCEL = auto()
    """Canceled without the mover's answer."""
    INTERRUPT = auto()
    AWAIT_ATTEMPT = auto()
    GIVE_UP = auto()
    """Failed: the transfer was interrupted, and there is no time for another attempt."""
    END_WITHOUT_RESULT = auto()
    FAIL_UNSTARTED = auto()
    RECORD_OUTCOME = auto()
    FINISH = auto()
    CLEAN_UP = auto()


@dataclass(frozen=True)
class View:
    """Everything that decides about the next step of a transfer.

    `owned`: its node label names this node. `has_slot`: it holds one of the node's slots, or may
    take one. `timed_out`: the prepare timeout is over, counted from Accepted or, after a mover pod
    was lost while Prepared, from that loss, or from the beginning of another attempt. `stage` belongs to the attempt
    while InProgress. `retryable`: how the mover ended allows another attempt, and so do the limits; before the start of
    another attempt, the limits alone. `succeeded`: the mover exited with 0.
    """

    phase: Phase
    owned: bool
    cancel: CancelState
    pod: PodState
    outcome_recorded: bool
    has_slot: bool
    timed_out: bool
    stage: AttemptStage = AttemptStage.RUNNING
    retryable: bool = False
    succeeded: bool = False


_STARTED = frozenset({PodState.RUNNING, PodState.ENDED})

_FINISHED = frozenset({PodState.ENDED, PodState.LOST})

_GONE = _FINISHED | {PodState.ABSENT}


def decide(view: View) -> Action:
    """Return the next step for a transfer."""
    if not view.owned:
        return _decide_foreign(view)
    if view.phase.final:
        return Action.CLEAN_UP
    if view.pod is PodState.TAKEN:
        return Action.HAND_OVER
    match view.phase:
        case Phase.ACCEPTED | Phase.PREPARED:
            return _decide_before_start(view)
        case Phase.IN_PROGRESS if view.stage is not AttemptStage.RUNNING and not view.outcome_recorded:
            return _decide_interrupted(view)
        case Phase.IN_PROGRESS | Phase.CANCELING:
            return _decide_running(view)
    # A New transfer has no node label: label and phase are written in one patch.
    return Action.NOTHING


def _decide_foreign(view: View) -> Action:
    """Return the step for a transfer that another agent owns, or none."""
    another = view.phase is Phase.IN_PROGRESS and view.stage is AttemptStage.EXPOSING
    # A replaced mover pod may be scheduled to another node than the first one.
    started_here = (view.phase in HOLDING_PHASES or another) and view.pod in _STARTED
    # Only the owning agent cancels before the start: it knows the expose objects.
    return Action.PREPARE if started_here and view.cancel is CancelState.NONE else Action.NOTHING


def _decide_before_start(view: View) -> Action:
    """Return the step for an owned transfer that is Accepted or Prepared."""
    if view.cancel is not CancelState.NONE:
        return Action.CANCEL
    if view.pod in _STARTED:
        return Action.PREPARE if view.phase is Phase.ACCEPTED else _decide_prepared(view)
    if view.timed_out:
        return Action.TIME_OUT
    return Action.RECREATE if view.pod is PodState.LOST else Action.EXPOSE


def _decide_prepared(view: View) -> Action:
    """Return the step for an owned transfer whose mover has started, but not its data path."""
    if view.pod is PodState.ENDED:
        interrupted = view.phase is Phase.IN_PROGRESS and view.retryable
        return Action.INTERRUPT if interrupted else Action.FAIL_UNSTARTED
    if not view.has_slot:
        return Action.REPORT_SLOT_PENDING
    return Action.START


def _decide_interrupted(view: View) -> Action:
    """Return the step for an owned transfer whose attempt was interrupted, up to the start of the next one."""
    if view.stage is AttemptStage.WAITING and view.succeeded:
        return Action.RECORD_OUTCOME
    if view.cancel is not CancelState.NONE:
        return Action.CANCEL
    ended = view.stage is AttemptStage.EXPOSING and view.pod is PodState.ENDED
    if not view.retryable and not ended:
        return Action.GIVE_UP
    if view.stage is AttemptStage.EXPOSING:
        return _decide_before_start(view)
    # The leader lets it begin.
    return Action.AWAIT_ATTEMPT if view.stage is AttemptStage.WAITING else Action.NOTHING


def _decide_running(view: View) -> Action:
    """Return the step for an owned transfer that is InProgress or Canceling."""
    if view.outcome_recorded:
        return Action.FINISH
    interrupted = view.retryable and view.cancel is CancelState.NONE and view.phase is Phase.IN_PROGRESS
    if interrupted and view.pod in _GONE:
        return Action.INTERRUPT
    if view.pod in _FINISHED:
        return Action.RECORD_OUTCOME
    if view.pod is PodState.ABSENT:
        return Action.END_WITHOUT_RESULT
    if view.cancel is CancelState.OVERDUE:
        return Action.FORCE_CANCEL
    if view.cancel is CancelState.REQUESTED and view.phase is Phase.IN_PROGRESS:
        return Action.SET_CANCELING
    return Action.NOTHING


TransferKey = tuple[str, str, str]
"""A transfer in the work queue: kind, namespace, name."""


@dataclass(frozen=True)
class Site:
    """Where this agent runs: its node and the namespace of the transfers.

    `host_pods` is the kubelet's pods directory, as the agent has it mounted; None: it has not.
    """

    node: str
    namespace: str
    host_pods: str | None = None

    @property
    def label(self) -> str:
        """The node's name as the value of the node label."""
        return label_value(self.node)


@dataclass(frozen=True)
class Timeouts:
    """The limits on durations.

    `prepare`: from Accepted to Prepared. `resource`: for one operation on the cluster, such
    as a rebind. `cancel`: for a mover to stop after a cancel request while InProgress.
    Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go, and its forced cancel.
    """

    prepare: timedelta = timedelta(minutes=30)
    resource: timedelta = timedelta(minutes=10)
    cancel: timedelta = timedelta(hours=1)


@dataclass(frozen=True)
class Case:
    """One transfer as it was read, with the view that decides about it.

    `pod` is its mover pod, a v1 Pod as JSON dict; if the API server no longer has it and it had
    ended, its last version. `departed` is the last version of the mover pod that disappeared last.
    `outcome` is the recorded one. `ending` is how its attempt was interrupted, if another one may follow such an end;
    `refused` is why none does; `delay_seconds` is how long the next one has to wait.
    """

    kind: Kind[Any]
    cr: Transfer
    pod: Pod | None
    outcome: Outcome | None
    view: View
    departed: Pod | None
    ending: retries.Ending | None
    refused: str | None
    delay_seconds: float

    @property
    def end(self) -> PodEnd | None:
        """How its mover pod terminated; None while it has not."""
        return _end_of(self.pod)


@dataclass(frozen=True)
class Observation:
    """One transfer and its mover pod as they were observed.

    `pod` is the pod of the transfer's name, `departed` the last version of one that disappeared
    from this node: v1 Pods as JSON dicts, trimmed if cached, which may belong to an earlier transfer of that name.
    `watched`: a watch of this agent reports every change of transfer and pod.
    `has_slot`: the transfer holds one of the node's slots, or may take one. `rules` are the limits of retries, and
    `age_seconds` is how old the transfer is by the API server's clock.
    """

    cr: Transfer
    pod: Pod | None
    departed: Pod | None
    watched: bool = True
    has_slot: bool = False
    measured: Measured = field(default_factory=Measured)
    rules: RetryRules = field(default_factory=RetryRules)
    age_seconds: float = 0.0


def build_case(kind: Kind[Any], seen: Observation, site: Site, limits: Timeouts) -> Case:
    """Return the case of an observed transfer; a pod that belongs to another one counts as absent."""
    pod, departed = _own(seen.pod, seen.cr), _own(seen.departed, seen.cr)
    if pod is None and departed is not None and seen.cr.phase in RUNNING_PHASES and has_ended(departed):
        # A drain deletes the pod as soon as it has ended; its termination message still counts.
        pod = departed
    outcome = read_outcome(seen.cr)
    view = build_view(replace(seen, pod=pod), site, limits, outcome_recorded=outcome is not None)
    ending = _find_ending(view, pod, departed) if seen.rules.enabled else None
    cause = ending.cause if ending is not None else None
    refused = retries.refusal(seen.rules, seen.cr.attempts, cause, age_seconds=seen.age_seconds)
    if ending is not None and kind.spec.restores:
        refused = retries.fence_refusal(ending, pod or departed) or refused
    retryable = (ending is not None or view.stage is not AttemptStage.RUNNING) and not refused
    view, delay_seconds = replace(view, retryable=retryable), _delay_seconds(kind, seen)
    return Case(kind, seen.cr, pod, outcome, view, departed, ending, refused, delay_seconds)


def build_view(seen: Observation, site: Site, limits: Timeouts, *, outcome_recorded: bool) -> View:
    """Return the view of an observed transfer; the pod of `seen` is its own."""
    cr = seen.cr
    overdue = _exceeds(seen.measured.canceling_seconds, limits.cancel)
    requested = CancelState.OVERDUE if overdue else CancelState.REQUESTED
    return View(
        phase=cr.phase,
        owned=is_owned(cr, site),
        cancel=requested if cr.cancel_requested else CancelState.NONE,
        pod=PodState.TAKEN if _is_taken(seen.pod, cr, site) and not outcome_recorded else _state_of(seen.pod, cr, site),
        outcome_recorded=outcome_recorded,
        has_slot=seen.has_slot,
        timed_out=_exceeds(seen.measured.preparing_seconds, limits.prepare),
        stage=cr.stage or AttemptStage.RUNNING,
        succeeded=(end := _end_of(seen.pod)) is not None and end.exit_code == 0,
    )


def _end_of(pod: Pod | None) -> PodEnd | None:
    return parse_pod_end(pod) if pod is not None else None


def _find_ending(view: View, pod: Pod | None, departed: Pod | None) -> retries.Ending | None:
    """Return how the attempt was interrupted; None while it was not, or if no other one may follow such an end."""
    if view.phase is not Phase.IN_PROGRESS or view.stage in {AttemptStage.WAITING, AttemptStage.READY}:
        return None
    # While it gets a mover pod, there is none at first, and one that is lost is created again.
    ends = {PodState.ENDED} if view.stage is AttemptStage.EXPOSING else _GONE
    return retries.find_interruption(pod, departed) if view.pod in ends else None


def _delay_seconds(kind: Kind[Any], seen: Observation) -> float:
    """Return how long the next attempt has to wait, besides the end of the old mover pod; 0.0 if none is to come."""
    measured, attempts = seen.measured, seen.cr.attempts
    if measured.waiting_seconds is None or measured.silent_seconds is None:
        return 0.0
    pause = retries.backoff_seconds(seen.rules, attempts) - measured.waiting_seconds
    fence = retries.fence_seconds(attempts, kind.spec.restores) - measured.silent_seconds
    return max(0.0, pause, fence)


def _exceeds(seconds: float | None, limit: timedelta) -> bool:
    return seconds is not None and seconds >= limit.total_seconds()


def is_owned(cr: Transfer, site: Site) -> bool:
    """Return whether the node label of `cr` names this node."""
    return cr.metadata.labels.get(NODE_LABEL) == site.label


def _own(pod: Pod | None, cr: Transfer) -> Pod | None:
    return pod if pod is not None and is_current(pod, cr) else None


def _state_of(pod: Pod | None, cr: Transfer, site: Site) -> PodState:
    elsewhere = pod is not None and pod_node(pod) not in {None, site.node}
    # The agent of the pod's node takes the transfer over before its start; until then it is being exposed.
    return PodState.PENDING if elsewhere and cr.preparing else pod_state(pod)


def _is_taken(pod: Pod | None, cr: Transfer, site: Site) -> bool:
    """Return whether an agent that sets no node label has taken over the transfer, which is owned here.

    That is one of Velero's on the pod's node. A result that the agent of a lost node has left is this agent's to read.
    """
    if not is_owned(cr, site) or cr.interrupted or cr.status.node in {None, site.node}:
        return False
    return cr.phase is Phase.PREPARED or (cr.phase in RUNNING_PHASES and (pod is None or not has_ended(pod)))
