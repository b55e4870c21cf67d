"""What the rules look at: a load and its mover pod, reduced to a finite view.

Knows how a phase, a label, a pod's status and the clock become a `View`. Does not know the
rules (`nodeagent.lifecycle`), and reads nothing itself.
"""

from dataclasses import dataclass
from datetime import timedelta

from core.clock import Clock
from core.models.base import JsonDict
from core.models.loads import Load
from core.models.names import NODE_LABEL, OWNER_UID_LABEL, label_value
from core.models.phases import Phase
from exposer.diagnose import parse_pod_end
from nodeagent.concurrency import Claim, Slots
from nodeagent.kinds.base import Kind
from nodeagent.lifecycle import PodState, Stop, View
from nodeagent.outcome import Outcome, read_outcome

__all__ = ["Case", "Limits", "LoadKey", "Site", "Viewer", "pod_state", "trim_load", "trim_pod"]

LoadKey = tuple[str, str, str]
"""A load in the work queue: kind, namespace, name."""


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

    `pod` is its mover pod, a v1 Pod as JSON dict. `outcome` is what is kept on the load.
    """

    kind: Kind
    cr: Load
    pod: JsonDict | None
    outcome: Outcome | None
    view: View

    @property
    def key(self) -> LoadKey:
        """The load's key in the work queue."""
        return (self.kind.name, self.cr.metadata.namespace, self.cr.name)


def pod_state(pod: JsonDict | None) -> PodState:
    """Return the state of a mover pod, a v1 Pod as JSON dict."""
    if pod is None:
        return PodState.ABSENT
    if parse_pod_end(pod) is not None:
        return PodState.ENDED
    if pod["metadata"].get("deletionTimestamp"):
        return PodState.LEAVING
    phase = (pod.get("status") or {}).get("phase", "")
    return PodState.RUNNING if phase == "Running" else PodState.PENDING


def trim_load(raw: JsonDict) -> JsonDict:
    """Return a load without the bookkeeping of its writers, which nobody here reads."""
    meta = {key: value for key, value in raw["metadata"].items() if key != "managedFields"}
    return raw | {"metadata": meta}


def trim_pod(pod: JsonDict) -> JsonDict:
    """Return what the life cycle reads of a pod: whose it is, and how it is."""
    meta, status = pod["metadata"], pod.get("status") or {}
    kept = ("name", "namespace", "uid", "labels", "ownerReferences", "deletionTimestamp")
    told = ("phase", "reason", "message", "conditions", "containerStatuses")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {key: meta[key] for key in (*kept, "resourceVersion") if key in meta},
        "spec": {"nodeName": (pod.get("spec") or {}).get("nodeName", "")},
        "status": {key: status[key] for key in told if key in status},
    }


class Viewer:
    """Reduces loads to views, by the clock and by the node's slots."""

    def __init__(self, clock: Clock, site: Site, limits: Limits, slots: Slots) -> None:
        """View loads from `site`."""
        self._clock = clock
        self._site = site
        self._limits = limits
        self._slots = slots
        self._stop_seen_at: dict[str, float] = {}

    def look(self, kind: Kind, cr: Load, pod: JsonDict | None) -> Case:
        """Return the case of `cr`; a pod that belongs to another load counts as absent."""
        if pod is not None and not _belongs(pod, cr):
            pod = None
        ours = cr.metadata.labels.get(NODE_LABEL) == self._site.label
        if ours:
            self._note_slot(kind, cr)
        outcome = read_outcome(cr)
        view = View(
            phase=cr.phase,
            ours=ours,
            stop=self._stop(cr, ours=ours),
            pod=pod_state(pod),
            outcome_kept=outcome is not None,
            slot=self._slots.is_turn_of(cr.uid),
            late=self._late(cr),
        )
        return Case(kind, cr, pod, outcome, view)

    def seconds_until_overdue(self, cr: Load) -> float:
        """Return how long a mover may still take to answer the cancel of `cr`."""
        seen = self._stop_seen_at.get(cr.uid, self._clock.monotonic())
        return max(0.0, seen + self._limits.cancel.total_seconds() - self._clock.monotonic())

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._stop_seen_at.pop(uid, None)
        self._slots.forget(uid)

    def _note_slot(self, kind: Kind, cr: Load) -> None:
        accepted_at = cr.status.accepted_timestamp or cr.metadata.creation_timestamp
        key = (kind.name, cr.metadata.namespace, cr.name)
        self._slots.observe(Claim(accepted_at or self._clock.now(), key, cr.uid), cr.phase)

    def _stop(self, cr: Load, *, ours: bool) -> Stop:
        if not (cr.spec.cancel or cr.deleting):
            return Stop.NONE
        if not ours:
            return Stop.ASKED
        # spec.cancel carries no time: a restarted agent gives the mover its full time again.
        self._stop_seen_at.setdefault(cr.uid, self._clock.monotonic())
        return Stop.OVERDUE if self.seconds_until_overdue(cr) <= 0 else Stop.ASKED

    def _late(self, cr: Load) -> bool:
        since = cr.status.accepted_timestamp
        if cr.phase is not Phase.ACCEPTED or since is None:
            return False
        return self._clock.now() - since >= self._limits.prepare


def _belongs(pod: JsonDict, cr: Load) -> bool:
    """Whether `pod` was made for `cr`; a peer's mover has no label of ours, but an owner."""
    meta = pod["metadata"]
    owners = {reference["uid"] for reference in meta.get("ownerReferences") or []}
    return cr.uid in owners or (meta.get("labels") or {}).get(OWNER_UID_LABEL) == cr.uid
