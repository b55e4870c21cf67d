"""The common part of all steps: their tools, the slots of the node, the final status, reports of pending transfers.

A retry may overcome some rejections by the API server (quota, a missing ServiceAccount, permissions, an unavailable
webhook), and not others (validation, admission).
"""

import asyncio
import heapq
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Final, Self, TypeVar

from core.clock import Clock
from core.errors import ExposeError
from core.kube import errors
from core.kube.client import KubeClient, Selection
from core.kube.resources import NODES
from core.models.names import NOT_PREPARED_ANNOTATION
from core.models.phases import RUNNING_PHASES, Phase, RetryRules, Uptime
from core.models.reasons import NotPrepared, PendingReason
from core.models.transfers import Progress, Transfer
from core.redact import redact
from exposer.model import Pending
from exposer.ownership import diagnose_rejection
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.keys import LoadConcurrency
from nodeagent.metrics import Metrics
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Case, Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.outcome import Outcome
from nodeagent.transfers.retries import PendingRecords
from nodeagent.transfers.status import Change, EventLog, StatusWriter, record_end

_log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class SlotRequest:
    """A transfer that is pending for a slot; sorted by the time of its accept, then by name.

    `key` is the transfer's key in the work queue.
    """

    accepted_at: datetime
    key: tuple[str, str, str]
    uid: str

    @classmethod
    def of(cls, cr: Transfer, *, now: datetime) -> Self:
        """Return the request of `cr`; `now` stands for an unknown time of its accept."""
        return cls(cr.accepted_at or now, cr.key, cr.uid)


class Slots:
    """At most `limit` transfers of a node hold a slot; all kinds share them.

    A slot is held until its transfer is observed in a final phase or disappears, or its attempt is interrupted: an
    outdated observation of an earlier phase frees nothing.
    """

    def __init__(self, limit: int) -> None:
        """Begin with `limit` free slots; transfers that hold one keep it when it is lowered."""
        self.limit = limit
        self._pending: dict[str, SlotRequest] = {}
        self._holders: set[str] = set()

    @property
    def used(self) -> int:
        """The number of slots in use; more than `limit` after that was lowered."""
        return len(self._holders)

    @property
    def pending(self) -> int:
        """The number of transfers that are pending for a slot."""
        return len(self._pending)

    def is_full_for(self, request: SlotRequest) -> bool:
        """Return whether every slot is in use, or pending for by a transfer that precedes `request`."""
        return self.used + sum(other < request for other in self._pending.values()) >= self.limit

    def observe(self, request: SlotRequest, phase: Phase) -> None:
        """Record that the transfer of `request` was observed in `phase`."""
        if phase in RUNNING_PHASES:
            self._pending.pop(request.uid, None)
            self._holders.add(request.uid)
        elif phase.final:
            self.release(request.uid)
        elif phase is Phase.PREPARED and request.uid not in self._holders:
            self._pending[request.uid] = request

    def release(self, uid: str) -> None:
        """Free the slot of a transfer, or drop its request: it is final, or no longer this node's."""
        self._pending.pop(uid, None)
        self._holders.discard(uid)

    def withdraw(self, uid: str) -> None:
        """Drop the request of a transfer: it has no mover that could start. A slot that it holds stays."""
        self._pending.pop(uid, None)

    def is_available_to(self, uid: str) -> bool:
        """Return whether that transfer holds a slot, or is among the first for which one is free."""
        return uid in self._holders or (uid in self._pending and any(each.uid == uid for each in self.next_requests()))

    def acquire(self, uid: str) -> bool:
        """Give that transfer a slot if one is available to it; return whether it holds one."""
        if not self.is_available_to(uid):
            return False
        self._pending.pop(uid, None)
        self._holders.add(uid)
        return True

    def next_requests(self) -> list[SlotRequest]:
        """Return the requests for which a slot is free, in order."""
        return heapq.nsmallest(self.limit - len(self._holders), self._pending.values())


@dataclass(eq=False)
class OwnSlots:
    """The number of slots of the agent's own node, which follows its labels and the configuration.

    `node` is followed while `run` is running; it is not read unless a rule selects by labels. `concurrency` returns the
    active configuration; call `refresh` after a change. `on_number` is called with the node's number whenever it may
    have changed.
    """

    client: KubeClient
    clock: Clock
    node: str
    _: KW_ONLY
    concurrency: Callable[[], LoadConcurrency]
    on_number: Callable[[int], None]
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # A Node that is deleted comes back with the same labels, or not at all: keep the last ones.
    _labels: Mapping[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Build the watch of the node."""
        selection = Selection(NODES, field_selector=f"metadata.name={self.node}")
        self._informer = Informer(self.client, selection, clock=self.clock, trim=labels_of, on_change=self._on_labels)

    async def run(self) -> None:
        """Follow the node until canceled; without the permission for it, the node has no labels."""
        while not self.concurrency().per_node_config:
            await self._changed.wait()
            self._changed.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run_despite_rejections(self._go_without), name="labels of the node")
            await self._informer.synced.wait()
            # A change during the first list was reported before the list was complete.
            self.refresh()

    @property
    def known(self) -> bool:
        """Whether the number is known, or follows from no labels."""
        return self._informer.synced.is_set() or not self.concurrency().per_node_config

    async def wait_known(self) -> None:
        """Return once the number is known: a number that is too high would start too many transfers."""
        if self.concurrency().per_node_config:
            await self._informer.synced.wait()
        self.refresh()

    def refresh(self) -> None:
        """Compute the number again."""
        self._changed.set()
        concurrency = self.concurrency()
        if self.known:
            self.on_number(resolve_slots(self._labels, concurrency))

    def _go_without(self, error: errors.KubeError) -> None:
        _log.warning("cannot watch the labels of node %s, perNodeConfig ignored: %s", self.node, error)
        self._informer.synced.set()

    def _on_labels(self, labels: Mapping[str, str]) -> None:
        if labels != self._labels:
            self._labels = labels
            self.refresh()


_ADMISSION: Final = re.compile(
    r"admission webhook|denied (?:the )?request|violates PodSecurity|(?:maximum|minimum) \S+ usage|to request ratio"
)
"""Texts of admission checks that rejected the object itself.

Source: Kubernetes v1.34, pkg/admission (webhooks, ValidatingAdmissionPolicy, PodSecurity, LimitRanger).
"""

_QUOTA: Final = "exceeded quota"
"""Source: Kubernetes v1.34, the ResourceQuota admission plugin."""


def classify_rejection(
    error: errors.ForbiddenError | errors.InvalidError | errors.MalformedObjectError | errors.ServerError,
) -> Pending:
    """Return what a transfer is pending for after `error`; raise ExposeError if the object itself was rejected."""
    text = str(error)
    if isinstance(error, errors.ServerError):
        return Pending(PendingReason.API_SERVER_ERROR, text, blocked=True)
    if pending := diagnose_rejection(error):
        return pending
    if isinstance(error, errors.MalformedObjectError):
        return Pending(PendingReason.OBJECT_MALFORMED, text, blocked=True)
    if isinstance(error, errors.InvalidError) or _ADMISSION.search(text):
        raise ExposeError(text) from error
    return Pending(PendingReason.QUOTA_EXCEEDED if _QUOTA in text else PendingReason.FORBIDDEN, text, blocked=True)


_SHOWN_WAIT: Final = timedelta(minutes=5)
"""A shorter wait is not worth a line."""


def describe_activities(cr: Transfer, outcome: Outcome | None = None, *, restores: bool, fell_back: bool) -> list[str]:
    """Return what was done for a transfer, for people: its waits, its interruptions, what it fell back to, and why."""
    cause = outcome.fallback_cause if outcome else None
    created, accepted, started = cr.metadata.creation_timestamp, cr.status.accepted_timestamp, cr.status.start_timestamp
    waits = (("to be admitted", created, accepted), ("for a data mover with a slot", accepted, started))
    lines = [
        f"waited {(end - begin) // timedelta(minutes=1)} min {what}"
        for what, begin, end in waits
        if begin is not None and end is not None and end - begin >= _SHOWN_WAIT
    ]
    lines += cr.attempts.describe()
    if cr.not_by_block:
        lines.append(f"backed up files instead of a device: {cr.not_by_block}")
    if cr.by_block and not restores and (fell_back or cause):
        cause = cause or "the changed blocks are not known"
        lines.append(f"read more than has changed, since {cause}; stored the blocks that have changed")
    elif fell_back:
        lines.append(f"fell back to a full {'restore' if restores else 'backup'}{f': {cause}' if cause else ''}")
    if outcome and outcome.restart_cause:
        lines.append(f"read the device again from its start: {outcome.restart_cause}")
    return [redact(line) for line in lines]


_VOLUME_CHECK_SECONDS: Final = 8.0
"""Between two checks of a workload's volume while its transfer is pending for a slot."""

_R = TypeVar("_R")


@dataclass(frozen=True)
class Tools:
    """The collaborators of all steps of the agent of `site`.

    All steps see the same `pending` reasons. `retry_rules` returns the active limits of retries of a transfer,
    `api_time` the API server's time, give or take some seconds, `uptime` the node's. `starting` returns the annotations
    that a transfer gets when its data path may start.
    """

    site: Site
    limits: Timeouts
    client: KubeClient
    clock: Clock
    cache: TransferCache
    pending: PendingRecords
    status: StatusWriter
    events: EventLog
    logs: MoverLogs
    progress: ProgressFollower
    slots: Slots
    metrics: Metrics
    retry_rules: Callable[[Transfer], RetryRules]
    api_time: Callable[[], datetime]
    uptime: Callable[[], Uptime]
    starting: Callable[[Transfer], dict[str, str | None]]


class StepBase:
    """The base of the classes that have the steps."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._site, self._limits, self._pending = tools, tools.site, tools.limits, tools.pending

    async def _end(
        self, case: Case, phase: Phase, message: str, *, not_prepared: NotPrepared | None = None
    ) -> Requeue | None:
        """Write the final status in one patch, then record and count it.

        `not_prepared` is why there is no mover pod, if that may be a fault of the node, which the leader counts.
        """
        tools, kind = self._tools, case.kind
        status: dict[str, object] = {"message": message} if message else {}
        if phase is Phase.COMPLETED and case.outcome is not None:
            status |= kind.final_status(case.cr, case.outcome)
            if case.cr.attempts.number > 1:
                # The volume of a workload may have shrunk since the first attempt.
                most = max(case.outcome.total_bytes, case.cr.status.progress.bytes_done)
                status["progress"] = Progress(total_bytes=most, bytes_done=most).to_wire()
            tools.progress.finish(kind.spec.name, case.cr.uid, case.outcome.total_bytes)
        full = status.get("fallbackFull") is True
        activities = describe_activities(case.cr, case.outcome, restores=kind.spec.restores, fell_back=full)
        if activities:
            status["activities"] = activities
        marks = {NOT_PREPARED_ANNOTATION: str(not_prepared)} if not_prepared is not None else {}
        if phase is Phase.COMPLETED and case.outcome is not None:
            marks |= case.outcome.annotations
        stored = await tools.status.move(kind, case.cr, phase, Change(status, annotations=marks))
        tools.slots.release(stored.uid)
        self._pending.forget(stored.uid)
        await record_end(kind, stored, metrics=tools.metrics, events=tools.events)
        return None

    async def _find_volume_fault(self, case: Case, *, moved: bool = False) -> str | None:
        """Return why the volume of a workload is not usable any more; None: it is."""
        try:
            await case.kind.confirm_volume(case.cr, moved=moved)
        except ExposeError as e:
            return str(e)
        except (errors.ForbiddenError, errors.MalformedObjectError):
            # It is observed again before it is tried again, and another one may start until then.
            self._tools.slots.withdraw(case.cr.uid)
            raise
        return None

    def _operation_timeout(self, case: Case) -> timedelta:
        """Return the limit for one operation on the cluster, which the custom resource may set.

        Source: Velero v1.18, pkg/exposer (Expose and RebindVolume get `spec.operationTimeout`).
        """
        return case.cr.operation_timeout or self._limits.resource

    async def _pending_if_rejected(self, step: Awaitable[_R], *, wait_out: bool = False) -> _R | Pending:
        """Return the result of `step`, or what the transfer is pending for after the API server rejected a request.

        `wait_out`: also where the object itself was rejected, since data would be lost that was moved, and
        an admission rule may be changed.

        Raises:
            ExposeError: from `step`; or a retry changes nothing.
            UnreachableError: the API server did not answer, so that nothing can be reported either.
        """
        try:
            return await step
        except errors.UnreachableError:
            raise
        except (errors.ForbiddenError, errors.InvalidError, errors.MalformedObjectError, errors.ServerError) as e:
            try:
                return classify_rejection(e)
            except ExposeError as rejected:
                if not wait_out:
                    raise
                return Pending(PendingReason.REJECTED, str(rejected), blocked=True)

    async def _report_pending(self, case: Case, pending: Pending) -> None:
        tools, cr = self._tools, case.cr
        self._pending.compare_report(cr.uid, cr.pending_reason)
        report = self._pending.decide_report(cr.uid, pending)
        if not report.message:
            return
        # After a restart the status may have it already.
        if cr.status.message != pending.message:
            await tools.status.report(case.kind, cr, message=pending.message, reason=pending.reason)
            if report.event:
                await tools.events.record(cr, pending.reason, pending.message, warning=pending.blocked)
        self._pending.mark_reported(cr.uid, pending)

    def _slot_pending(self) -> Pending:
        message = f"waiting for a free slot on node {self._site.node} (loadConcurrency {self._tools.slots.limit})"
        return Pending(PendingReason.WAITING_FOR_SLOT, message)

    def _pause_until_slot(self, case: Case) -> None:
        """Pause the checks until a slot becomes free; a volume of a workload may disappear."""
        self._pending.pause_checks(case.cr.uid, _VOLUME_CHECK_SECONDS if case.kind.spec.bound_to_node else math.inf)

    async def _await_slot(self, case: Case) -> Requeue | None:
        uid, pending = case.cr.uid, self._slot_pending()
        await self._report_pending(case, pending)
        if self._pending.get(uid).reported.reason == pending.reason:
            self._pause_until_slot(case)
        else:
            self._pending.pause_checks(uid, self._pending.seconds_to_report(uid))
        return self._next_slot_check(case)

    async def _started(self, case: Case, write: Awaitable[Transfer]) -> Transfer:
        """Return what `write`, which lets a data path start, stored; one that is rejected must not keep the slot."""
        try:
            return await write
        except (errors.ForbiddenError, errors.InvalidError):
            # As above.
            self._tools.slots.release(case.cr.uid)
            raise

    def _next_slot_check(self, case: Case) -> Requeue | None:
        """Return when to check a transfer that is pending for a slot; None for not before it gets one."""
        seconds = self._pending.paused_seconds(case.cr.uid)
        return None if math.isinf(seconds) else Requeue(seconds)
