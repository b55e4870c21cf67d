"""What the leader remembers about New and interrupted transfers, when each is checked next, and the pods they wait for.

The records hold nothing that could not be observed again: another leader begins without them.

One watch covers each namespace with such a pod. Of a pod only what decides whether one of its volumes
can be restored is compared: UID, node, phase and the state of `restore-wait`. A change makes the pod's
transfers due, and their check reads the pod itself.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple

from core.clock import Backoff, Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.kube.types import Pod
from core.models.names import label_value
from core.models.reasons import PendingReason
from exposer.model import Pending
from exposer.workload import describe_restore_wait
from nodeagent.leader.admission.examiner import Checked
from nodeagent.leader.index import Entry
from nodeagent.runtime.informer import Informer
from nodeagent.transfers.kinds.base import Admission
from nodeagent.transfers.retries import PendingRecords, PendingReport

_log = logging.getLogger(__name__)

PodKey = tuple[str, str]
"""Namespace and name of a pod."""


_Pod = tuple[PodKey, object]
"""What is kept of a pod: its key, and what decides whether a volume of it can be restored now."""


class _Watched(NamedTuple):
    informer: Informer[_Pod]
    task: asyncio.Task[None]


class PodWatch:
    """One watch for each namespace with a pod that is followed."""

    def __init__(self, client: KubeClient, clock: Clock, *, on_change: Callable[[], None]) -> None:
        """Watch through `client`; `on_change` is called whenever `take_changed` has something to return."""
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._followers: Counter[PodKey] = Counter()
        self._states: dict[PodKey, object] = {}
        self._changed: set[PodKey] = set()
        self._watched: dict[str, _Watched] = {}
        self._wanted_changed = asyncio.Event()

    async def run(self) -> None:
        """Keep one watch for each namespace with a followed pod, until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wanted_changed.clear()
                wanted = {namespace for namespace, _ in self._followers}
                for namespace in self._watched.keys() - wanted:
                    self._watched.pop(namespace).task.cancel()
                for namespace in wanted - self._watched.keys():
                    pods = Selection(PODS, namespace)
                    informer = Informer(self._client, pods, clock=self._clock, trim=_trim, on_change=self._on_pod)
                    warn = partial(_log.warning, "the pods of namespace %s cannot be watched: %s", namespace)
                    running = informer.run_despite_rejections(warn)
                    task = group.create_task(running, name=f"pods of {namespace}")
                    self._watched[namespace] = _Watched(informer, task)
                await self._wanted_changed.wait()

    def follow(self, pod: PodKey) -> None:
        """Observe the changes of `pod`, until `leave` was called as often."""
        self._followers[pod] += 1
        self._wanted_changed.set()

    def leave(self, pod: PodKey) -> None:
        """Undo one call of `follow`."""
        self._followers[pod] -= 1
        if not self._followers[pod]:
            del self._followers[pod]
            self._states.pop(pod, None)
            self._changed.discard(pod)
            self._wanted_changed.set()

    def is_synced(self, pod: PodKey) -> bool:
        """Return whether changes of `pod` are observed, so that it need not be polled."""
        watched = self._watched.get(pod[0])
        return pod in self._followers and watched is not None and watched.informer.synced.is_set()

    def take_changed(self) -> set[PodKey]:
        """Return the followed pods that changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def _on_pod(self, pod: _Pod) -> None:
        key, state = pod
        watched = self._watched.get(key[0])
        if key not in self._followers or watched is None:
            return
        # A deletion repeats the last state.
        state = None if watched.informer.get(*key) is None else state
        if key not in self._states or self._states[key] != state:
            self._states[key] = state
            self._changed.add(key)
            self._on_change()


def _trim(pod: Pod) -> _Pod:
    meta, status = pod["metadata"], pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName", "")
    state = (meta["uid"], node, status.get("phase", ""), describe_restore_wait(pod), "deletionTimestamp" in meta)
    return (meta["namespace"], meta["name"]), state


_CHECK_SECONDS: Final = 5.0
"""Between two checks of a pending transfer."""

_CHECKS_PER_SECOND: Final = 50.0
"""Checks of all pending transfers together: their number must not overload the API server."""

_WOKEN_SECONDS: Final = 60.0
"""Between two checks of a transfer that is woken by a change of what it is pending for."""

RETRY_SECONDS: Final = 1.0
"""Before the check after a failed accept, which mostly conflicted with another write."""

_REJECTED: Final = Backoff(5.0, 300.0)
"""Before the check after an accept that an admission policy or a missing permission rejected."""

_QUEUED_AFTER_SECONDS: Final = 10.0
"""How long a node must have had a free share for a transfer before it is reported as queued instead: shares
come and go, and each change would be a check and a write."""


@dataclass(slots=True)
class PendingTransfer:
    """What is remembered about one New or interrupted transfer; times are readings of a monotonic clock, in seconds.

    `next_check_seconds` is 0.0 where it is due. `since_seconds` is when it began to be pending for something that has a
    limit. `pod` is the workload pod that wakes it, `node_label` the node whose share it is pending for. `queued`: it is
    reported as queued, or will be after `queued_after_seconds`. `unanswered` is its accept or resumption, while it is
    unknown whether that was applied. `rejections` is how often its accept was rejected.
    """

    next_check_seconds: float = 0.0
    since_seconds: float | None = None
    pod: PodKey | None = None
    node_label: str | None = None
    queued: bool = False
    queued_after_seconds: float | None = None
    unanswered: Checked | None = None
    rejections: int = 0


_UNKNOWN: Final = PendingTransfer()
"""The record of a transfer about which nothing is remembered; never changed."""


class PendingTransfers:
    """The records of all New and interrupted transfers, by uid; `reports` has their reasons, and what was reported."""

    def __init__(self, clock: Clock, pods: PodWatch) -> None:
        self.reports = PendingRecords(clock)
        self._clock = clock
        self._pods = pods
        self._records: dict[str, PendingTransfer] = {}
        self._postponed = 0

    def get(self, uid: str) -> PendingTransfer:
        """Return what is remembered about a transfer, to be read only."""
        return self._records.get(uid, _UNKNOWN)

    def is_due(self, uid: str) -> bool:
        """Return whether the transfer may be checked now."""
        return self.get(uid).next_check_seconds <= self._clock.monotonic()

    def due(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """Return the `entries` that may be checked now."""
        return (entry for entry in entries if self.is_due(entry.uid))

    def seconds_to_next(self) -> float:
        """Return after how long the next postponed transfer is due; infinity where there is none."""
        times = (record.next_check_seconds for record in self._records.values() if record.next_check_seconds)
        return max(0.0, min(times, default=math.inf) - self._clock.monotonic())

    def held(self) -> dict[str, str]:
        """Return the node labels of the transfers that are pending for a node share, by uid."""
        return {uid: record.node_label for uid, record in self._records.items() if record.node_label}

    def unanswered(self) -> dict[str, Checked]:
        """Return the accepts and resumptions that may or may not have been applied, by uid."""
        return {uid: record.unanswered for uid, record in self._records.items() if record.unanswered is not None}

    def postpone(self, uid: str, seconds: float = _CHECK_SECONDS) -> None:
        """Make the transfer due after so many seconds: a check that fails is not repeated at once."""
        now = self._clock.monotonic()
        record = self._record(uid)
        self._postponed += record.next_check_seconds <= now
        record.next_check_seconds = now + seconds

    def rejected(self) -> frozenset[str]:
        """Return the uids of the transfers whose accept was rejected, unless another one is under way."""
        rejected = ((uid, record) for uid, record in self._records.items() if record.rejections)
        return frozenset(uid for uid, record in rejected if record.unanswered is None)

    def postpone_rejected(self, uid: str) -> None:
        """Make a transfer due after a pause that grows with the number of its accepts that were rejected."""
        record = self._record(uid)
        record.rejections += 1
        self.postpone(uid, _REJECTED.seconds_after(record.rejections))

    def wake(self, uids: Iterable[str]) -> None:
        """Make transfers due now; those that were pending for a node share are so no longer."""
        for uid in uids:
            record = self._records.get(uid)
            if record is not None:
                self._postponed -= record.next_check_seconds > self._clock.monotonic()
                record.next_check_seconds = 0.0
                record.node_label = None

    def wake_changed(self) -> None:
        """Make transfers due whose workload pods have changed."""
        changed = self._pods.take_changed()
        if changed:
            self.wake([uid for uid, record in self._records.items() if record.pod in changed])

    def retain(self, uids: AbstractSet[str]) -> None:
        """Forget all transfers but those."""
        self.reports.retain(uids)
        for uid in self._records.keys() - uids:
            self._follow(uid, None)
            del self._records[uid]
        now, self._postponed = self._clock.monotonic(), 0
        for record in self._records.values():
            if record.next_check_seconds <= now:
                record.next_check_seconds = 0.0
            else:
                self._postponed += 1

    def ready(self, uid: str) -> None:
        """Record that the transfer is pending for the queue alone; then almost nothing is remembered."""
        self._follow(uid, None)
        record = self._record(uid)
        self.wake([uid])
        self.reports.forget(uid)
        record.since_seconds = None

    def observe(self, checked: Checked) -> None:
        """Record the reason for which a transfer is pending."""
        admission, record = checked.admission, self._record(checked.cr.uid)
        record.queued, record.queued_after_seconds = False, None
        busy = admission.node if admission.reason == PendingReason.NODE_BUSY else None
        record.node_label = label_value(busy) if busy else None
        if admission.indefinite:
            record.since_seconds = None
        elif record.since_seconds is None:
            record.since_seconds = self._clock.monotonic()

    def find_exceeded(self, uid: str, admission: Admission, timeout: timedelta) -> timedelta | None:
        """Return for how long the transfer has been observed pending if that is too long; None if it is not.

        The limit of a reason counts while that is the reason, `timeout` for all of them together.
        Time does not count while it is queued or pending indefinitely. Its age does not matter: the
        creation is by another machine's clock, and after an outage of the agents all transfers are old.
        """
        report, since, now = self.reports.get(uid), self.get(uid).since_seconds, self._clock.monotonic()
        began = report.since_seconds if report.current.reason == admission.reason else now
        if admission.limit is not None and now - began >= admission.limit.total_seconds():
            return admission.limit
        return timeout if since is not None and now - since >= timeout.total_seconds() else None

    def decide_report(self, uid: str, pending: Pending) -> PendingReport:
        """Record the reason of a transfer and return what is to be reported of it."""
        # One that is pending for a node share is not checked again before it has one.
        return self.reports.decide_report(uid, pending, immediately=bool(self.get(uid).node_label))

    def schedule(self, uid: str, admission: Admission) -> None:
        """Set the next check of a pending transfer: late where a change of what it is pending for wakes it.

        One with a limit of its own is checked when that is reached.
        """
        pause_seconds = max(_CHECK_SECONDS, self._postponed / _CHECKS_PER_SECOND)
        self._follow(uid, admission.pod)
        record, report = self.get(uid), self.reports.get(uid)
        woken = bool(record.node_label) or (record.pod is not None and self._pods.is_synced(record.pod))
        if woken and report.reported.reason == admission.reason:
            pause_seconds = max(pause_seconds, _WOKEN_SECONDS)
        if admission.limit is not None:
            left_seconds = report.since_seconds + admission.limit.total_seconds() - self._clock.monotonic()
            pause_seconds = min(pause_seconds, max(left_seconds, RETRY_SECONDS))
        self.postpone(uid, pause_seconds)

    def needs_queue_report(self, entry: Entry) -> bool:
        """Return whether a transfer that could start must still be reported as queued."""
        if entry.reason == PendingReason.QUEUED:
            # Another leader may have reported it.
            self.mark_queued(entry.uid)
        record = self.get(entry.uid)
        if record.queued:
            return False
        if entry.reason != PendingReason.NODE_BUSY:
            return True
        now = self._clock.monotonic()
        if record.queued_after_seconds is None:
            record = self._record(entry.uid)
            record.queued_after_seconds = now + _QUEUED_AFTER_SECONDS
        return record.queued_after_seconds <= now

    def mark_queued(self, uid: str) -> None:
        """Record that a transfer is reported as queued."""
        self._record(uid).queued = True

    def begin_accept(self, uid: str, checked: Checked) -> None:
        """Record an accept or resumption before its answer has come."""
        self._record(uid).unanswered = checked

    def end_accept(self, uid: str) -> None:
        """Record that the result of an accept or resumption is known."""
        if uid in self._records:
            self._records[uid].unanswered = None

    def _record(self, uid: str) -> PendingTransfer:
        return self._records.setdefault(uid, PendingTransfer())

    def _follow(self, uid: str, pod: PodKey | None) -> None:
        """Have changes of `pod` wake the transfer, and of no other pod."""
        before = self.get(uid).pod
        if before == pod:
            return
        if pod is not None:
            self._pods.follow(pod)
        if before is not None:
            self._pods.leave(before)
        self._record(uid).pod = pod
