"""What the rules look at: a load and its mover pod, reduced to a finite view.

Knows how a phase, a label, a pod's status and the clock become a `View`. Does not know the
rules (`nodeagent.lifecycle`), and reads nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from core.clock import Clock
from core.models.base import JsonDict
from core.models.names import NODE_LABEL, label_value
from core.models.phases import HOLDING_PHASES, RUNNING_PHASES, Phase
from core.models.transfers import Load
from nodeagent.concurrency import Claim, Slots
from nodeagent.lifecycle import Stop, View
from nodeagent.mover_loss import read_loss
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, belongs_to, has_ended, pod_node, pod_state
from nodeagent.transfers.outcome import Outcome, read_outcome

__all__ = ["Case", "Limits", "LoadKey", "ReadCurrent", "Site", "Viewer"]

LoadKey = tuple[str, str, str]
"""A load in the work queue: kind, namespace, name."""

ReadCurrent = Callable[[LoadKey], JsonDict | None]
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
class Limits:
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
    cr: Load
    pod: JsonDict | None
    outcome: Outcome | None
    view: View
    departed: JsonDict | None = None

    @property
    def key(self) -> LoadKey:
        """The load's key in the work queue."""
        return (self.kind.name, self.cr.metadata.namespace, self.cr.name)


class Viewer:
    """Reduces loads to views, by the clock and by the node's slots."""

    def __init__(self, clock: Clock, site: Site, limits: Limits, slots: Slots) -> None:
        """View loads from `site`."""
        self._clock = clock
        self._site = site
        self._limits = limits
        self._slots = slots
        self._stop_seen_at: dict[str, float] = {}

    def look(self, kind: Kind, cr: Load, pod: JsonDict | None, *, departed: JsonDict | None = None) -> Case:
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

    def seconds_until_overdue(self, cr: Load) -> float:
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

    def _pod_state(self, cr: Load, pod: JsonDict | None) -> PodState:
        elsewhere = pod is not None and pod_node(pod) not in {"", self._site.node}
        # The agent of its node takes a load over before its start; until then it is exposed.
        return PodState.PENDING if elsewhere and cr.phase in HOLDING_PHASES else pod_state(pod)

    def _stop(self, cr: Load, *, ours: bool) -> Stop:
        if not cr.stopping:
            return Stop.NONE
        if not ours:
            return Stop.ASKED
        self._stop_seen_at.setdefault(cr.uid, self._clock.monotonic())
        return Stop.OVERDUE if self.seconds_until_overdue(cr) <= 0 else Stop.ASKED

    def _late(self, cr: Load) -> bool:
        since = cr.accepted_at if cr.phase is Phase.ACCEPTED else None
        if cr.phase is Phase.PREPARED:
            # Waiting for a slot may last; a lost mover has as long to come back as the first one had.
            loss = read_loss(cr)
            since = loss.since if loss is not None and not loss.replaced else None
        return since is not None and self._clock.now() - since >= self._limits.prepare
