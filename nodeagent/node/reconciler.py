"""The reconciler of one node's transfers: read the current state, decide one step, carry it out; report what fails.

Every step may run twice. New transfers are the dispatcher's.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from core.errors import AgentError, ResultError
from core.kube.errors import ConflictError, NotFoundError
from core.kube.types import Pod
from core.logs import fields
from core.models.base import JsonDict
from core.models.phases import RUNNING_PHASES, AttemptStage, Phase
from core.models.reasons import UNREADABLE, PendingReason
from core.models.transfers import Transfer
from exposer.model import NotOwnerError
from exposer.pod_status import mover_status, parse_pod_end
from exposer.workload import read_termination_message
from nodeagent.metrics import SLOTS
from nodeagent.node.cache import InvalidTransferError
from nodeagent.node.data_path_steps import AttemptSteps, DataPathSteps
from nodeagent.node.expose_steps import ExposeSteps
from nodeagent.node.lifecycle import (
    Action,
    CancelState,
    Case,
    Durations,
    Measured,
    Observation,
    TransferKey,
    build_case,
    decide,
    is_owned,
)
from nodeagent.node.progress import Followed
from nodeagent.node.steps import SlotRequest, Tools
from nodeagent.runtime.workqueue import Faults, Requeue, WorkQueue
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, find_unreplaced, has_ended, is_current, is_own, pod_state

_log = logging.getLogger(__name__)

_ERROR_PAUSE_SECONDS: Final = 30.0
"""After an error that a retry alone does not fix: a permission may be granted, a webhook repaired."""


class TransferFaults:
    """Reports each fault of a transfer once: in the log, as an Event and in its status."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._events, self._cache = tools, tools.events, tools.cache
        self._reported_at: dict[TransferKey, float] = {}
        self._faults = Faults(_log)

    async def report_invalid(self, key: TransferKey, error: InvalidTransferError) -> None:
        """Report that a custom resource does not have the form of its kind, and where it differs."""
        ignored, raw = "invalid custom resource, ignored until it changes", self._cache.raw(key)
        if raw is not None and self._faults.report(key, ignored, error, extra=_identity(key)):
            await self._events.record_warning(raw, UNREADABLE, str(error))

    async def report_failed(self, kind: Kind[Any], key: TransferKey, error: AgentError) -> None:
        """Report that a step failed with `error` and will be retried.

        Another text follows after a pause: a webhook may name each request, and the write enqueues the transfer.
        """
        now = self._tools.clock.monotonic()
        if now - self._reported_at.get(key, -math.inf) < _ERROR_PAUSE_SECONDS:
            return
        if not self._faults.report(key, "step failed, will retry", error, extra=_identity(key)):
            return
        self._reported_at[key] = now
        raw = self._cache.raw(key)
        if raw is not None:
            await self._events.record_warning(raw, PendingReason.STEP_FAILED, str(error))
        await self._write_message(kind, key, str(error))

    def forget(self, key: TransferKey) -> None:
        """Forget the last error of a transfer: its step succeeded, or it no longer exists."""
        self._reported_at.pop(key, None)
        self._faults.forget(key)

    async def _write_message(self, kind: Kind[Any], key: TransferKey, message: str) -> None:
        """Write into the status of a transfer why its step failed; the next step removes that."""
        try:
            cr = kind.parse(await self._tools.client.get(kind.spec.resource, key[1], key[2]))
            if not cr.phase.final and cr.status.message != message:
                await self._tools.status.report(kind, cr, message=message, reason=PendingReason.STEP_FAILED)
        except AgentError as e:
            # The permission for this write may be what is missing; the Event has the message.
            _log.debug("status message not written: %s", e, extra=_identity(key))


def _identity(key: TransferKey) -> dict[str, object]:
    return fields(kind=key[0], namespace=key[1], name=key[2])


def add_result(pod: Pod, kind: Kind[Any], host_pods: str | None) -> Pod | None:
    """Return `pod`, a v1 Pod, with the result that its mover has left; None if it has not left one, which is valid.

    The kubelet reports it up to a second later, and cuts it if a webhook has added containers: all messages of a pod
    have 12 KiB. Every other end is what the kubelet reports.
    `host_pods` is the kubelet's pods directory, as the agent has it mounted; None: it has not.
    Source: Kubernetes v1.34, pkg/kubelet/status/status_manager.go (normalizeStatus).
    """
    mover, end = mover_status(pod), parse_pod_end(pod)
    # A mover of Velero may have more to do, and a pod that is being deleted may have been interrupted.
    left = pod_state(pod) is PodState.RUNNING if end is None else end.exit_code == 0
    if not host_pods or not mover or not left or not is_own(pod):
        return None
    message = read_termination_message(host_pods, pod["metadata"]["uid"], mover["name"])
    if message is None:
        return None
    try:
        kind.parse_result(message)
    except ResultError:
        return None
    ended = mover | {"state": {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}}
    statuses = [ended if each is mover else each for each in pod["status"]["containerStatuses"]]
    return pod | {"status": pod["status"] | {"containerStatuses": statuses}}


_WORKERS: Final = 16
"""Transfers that are reconciled at a time, so that a slow one does not delay the others."""

_MOST_CONFLICTS: Final = 3
"""How often a step is decided in a row after conflicts, before it backs off."""

_NOT_FOUND_PAUSE_SECONDS: Final = 5.0
"""Before a transfer is reconciled again after one of its objects was not found."""

_DEADLINE_CHECK_SECONDS: Final = 60.0
"""Between two looks at a transfer that waits for the leader to let its next attempt begin; they cost no request."""

_POLL_SECONDS: Final = 5.0
"""Between two reads of a transfer or mover pod that no watch of this agent covers."""

_ANNOUNCING_SECONDS: Final = 180.0
"""Longer than the write of an interruption takes, with all repetitions: its clock is read before."""

_Step = Callable[[Case], Awaitable[Requeue | None]]


class Steps(ExposeSteps, AttemptSteps, DataPathSteps):
    """The steps by the names of their actions; each returns when to reconcile again without a change."""


class Reconciler:
    """Reconciles the transfers with this node's label, and takes over those whose mover pod runs here."""

    def __init__(self, tools: Tools, kinds: Sequence[Kind[Any]]) -> None:
        self._tools, self._site, self._limits, self._cache = tools, tools.site, tools.limits, tools.cache
        self._kinds = {kind.spec.name: kind for kind in kinds}
        self._queue: WorkQueue[TransferKey] = WorkQueue(tools.clock, name="transfers", workers=_WORKERS)
        self._steps = Steps(tools)
        self._durations = Durations(tools.clock, lambda: tools.cache.outdated_seconds)
        self._faults = TransferFaults(tools)
        self._woken: frozenset[str] = frozenset()
        tools.cache.subscribe(self.on_transfer, self._queue.add)

    async def run(self) -> None:
        """Reconcile until canceled.

        The first step waits for the first lists: a restarted agent counts the slots in use before it starts a transfer.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run(), name="transfer cache")
            group.create_task(self._tools.progress.run(), name="progress")
            await self._cache.wait_synced()
            self._wake_next()
            await self._queue.run(self._handle)

    def set_slots(self, number: int) -> None:
        """Change the number of slots, and wake the transfers that may start now."""
        self._tools.slots.limit = number
        self._wake_next()

    def bring_forward(self) -> None:
        """Retry soon what failed: the API server answers again."""
        self._queue.bring_forward()

    def report(self) -> JsonDict:
        """Return the node's slots and transfers for the status page."""
        slots = self._tools.slots
        return {
            "slots": {"used": slots.used, "total": slots.limit, "pending": slots.pending},
            "transfers": [
                {
                    "kind": cr.kind_name,
                    "namespace": cr.metadata.namespace,
                    "name": cr.name,
                    "phase": str(cr.phase),
                    "attempt": cr.attempts.number,
                    "attemptStage": str(cr.stage or ""),
                    "message": cr.status.message or "",
                    "pendingMessage": self._tools.pending.get(cr.uid).current.message,
                    "progress": cr.status.progress.to_wire(),
                }
                for cr in self._cache.transfers()
            ],
        }

    def on_transfer(self, key: TransferKey, uid: str) -> None:
        """Update slots, durations and the progress watch by a changed transfer, and enqueue it."""
        if not self._is_cached(key, uid):
            self._forget(key, uid)
        cr = self._cache.transfer(key)
        if cr is not None:
            self._observe(key, cr)
        self._queue.add(key)
        self._wake_next()

    async def _handle(self, key: TransferKey) -> Requeue | None:
        try:
            requeue = await self._reconcile(key)
        except InvalidTransferError as e:
            await self._faults.report_invalid(key, e)
            return None
        except NotOwnerError as e:
            # The cache is outdated: its next change enqueues the key.
            _log.debug("step stopped: %s", e, extra=_identity(key))
            return None
        except NotFoundError as e:
            # The transfer itself, or an object that was deleted meanwhile: the next pass finds out.
            _log.debug("object not found, will retry: %s", e, extra=_identity(key))
            return Requeue(_NOT_FOUND_PAUSE_SECONDS)
        except AgentError as e:
            if e.retry:
                raise
            await self._faults.report_failed(self._kinds[key[0]], key, e)
            return Requeue(_ERROR_PAUSE_SECONDS)
        else:
            self._faults.forget(key)
            return requeue
        finally:
            self._wake_next()

    async def _reconcile(self, key: TransferKey) -> Requeue | None:
        for conflicts in range(_MOST_CONFLICTS - 1):
            try:
                return await self._step(key, reread=conflicts > 0)
            except ConflictError as e:
                _log.debug("conflict, will retry: %s", e, extra=_identity(key))
        return await self._step(key, reread=True)

    async def _step(self, key: TransferKey, *, reread: bool) -> Requeue | None:
        """Read the transfer, decide one step, carry it out. `reread`: the cache is known to be outdated."""
        ended = self._find_ended(key)
        if ended is not None:
            # The mover's last progress is written first: the next write is its outcome.
            await self._tools.progress.end_writing(ended[0])
        read = await self._cache.read(key, reread=reread)
        if read is None:
            return None
        if ended is not None and read.pod is not None and read.pod["metadata"]["uid"] == ended[1]["metadata"]["uid"]:
            whole = add_result(read.pod, self._kinds[key[0]], self._site.host_pods) or read.pod
            read = replace(read, pod=whole if has_ended(read.pod) else ended[1])
        cached = self._is_cached(key, read.cr.uid)
        if cached:
            # If the watch delivered the transfer's end during this read, nothing would free its slot again.
            self._observe(key, read.cr)
            if read.cr.between_attempts:
                # A write without an answer may have interrupted it.
                self._tools.slots.release(read.cr.uid)
        case = self._build_case(key, read)
        action = decide(case.view)
        if action is not Action.NOTHING:
            _log.debug("next step: %s", action.name, extra={**_identity(key), "uid": case.cr.uid})
            step: _Step = getattr(self._steps, action.name.lower())
            try:
                return await step(case)
            finally:
                if cached and not self._is_cached(key, case.cr.uid):
                    # It was forgotten during the step, which has recorded something since.
                    self._forget(key, case.cr.uid)
        return self._next_check(case) if read.watched else Requeue(_POLL_SECONDS)

    def _is_cached(self, key: TransferKey, uid: str) -> bool:
        raw = self._cache.raw(key)
        return raw is not None and raw["metadata"]["uid"] == uid

    def _find_ended(self, key: TransferKey) -> tuple[str, Pod] | None:
        """Return the UID of the transfer and its mover pod, if its mover has ended, or has left its result."""
        cr, pod = self._cache.transfer(key), self._cache.pod(key) or self._cache.departed(key)
        if cr is None or pod is None or not is_current(pod, cr):
            return None
        if not has_ended(pod) and self._tools.progress.completed(cr.uid):
            pod = add_result(pod, self._kinds[key[0]], self._site.host_pods) or pod
        return (cr.uid, pod) if has_ended(pod) else None

    def _observe(self, key: TransferKey, cr: Transfer) -> None:
        """Update slots and durations by an observed transfer, and watch its progress while it runs."""
        owned = is_owned(cr, self._site)
        pod = self._cache.pod(key)
        if owned:
            self._observe_slot(cr, pod)
            self._measure(cr)
        if owned and cr.phase in RUNNING_PHASES and not cr.interrupted:
            wake = partial(self._queue.add, key)
            followed = Followed(self._kinds[key[0]], partial(self._cache.transfer, key), wake)
            runs = pod is not None and is_current(pod, cr) and not has_ended(pod)
            self._tools.progress.follow(cr, followed, pod if runs else None)
        else:
            left = pod if owned and cr.interrupted and pod is not None and not has_ended(pod) else None
            self._tools.progress.leave(key[0], cr.uid, again=not cr.phase.final, pod=left)

    def _observe_slot(self, cr: Transfer, pod: Pod | None) -> None:
        """Update the slots by an owned transfer; a second mover, or another attempt's, needs one once it is ready."""
        slots, request = self._tools.slots, SlotRequest.of(cr, now=self._tools.api_time())
        if not (cr.interrupted or (cr.phase is Phase.PREPARED and find_unreplaced(cr))):
            slots.observe(request, cr.phase)
        elif cr.preparing and pod is not None and is_current(pod, cr) and pod_state(pod) is PodState.RUNNING:
            slots.observe(request, Phase.PREPARED)
        else:
            slots.withdraw(cr.uid)

    def _build_case(self, key: TransferKey, read: Observation) -> Case:
        seen = replace(
            read,
            has_slot=self._tools.slots.is_available_to(read.cr.uid),
            measured=self._measure(read.cr) if is_owned(read.cr, self._site) else Measured(),
            rules=self._tools.retry_rules(read.cr),
            age_seconds=read.cr.age_seconds(self._tools.api_time()),
        )
        return build_case(self._kinds[key[0]], seen, self._site, self._limits)

    def _measure(self, cr: Transfer) -> Measured:
        measured = self._durations.measure(cr, mover_events=self._tools.progress.heard(cr.uid))
        if measured.waiting_seconds is None or cr.attempts.last is None:
            return measured
        # Also what another process waited: both times are the API server's.
        waited_seconds = (self._tools.api_time() - cr.attempts.last.at).total_seconds()
        silent_seconds = max(measured.silent_seconds or 0.0, self._announced_seconds(cr))
        waiting_seconds = max(measured.waiting_seconds, waited_seconds)
        return replace(measured, waiting_seconds=waiting_seconds, silent_seconds=silent_seconds)

    def _announced_seconds(self, cr: Transfer) -> float:
        """Return for how long the end of an attempt has been known to its mover at least; 0.0: that was not measured.

        Another process of this agent may have announced it. A mover that this process has heard counts from its last
        Event. The API server's clock does not count: it may be set, and two movers would write to one volume.
        """
        last = cr.attempts.last
        if last is None or last.uptime is None or self._tools.progress.heard(cr.uid):
            return 0.0
        now = self._tools.uptime()
        return now.seconds - last.uptime.seconds - _ANNOUNCING_SECONDS if now.boot == last.uptime.boot else 0.0

    def _next_check(self, case: Case) -> Requeue | None:
        """Return when a transfer is due that only time changes."""
        if case.view.owned and case.view.cancel is CancelState.REQUESTED and case.cr.phase is Phase.CANCELING:
            observed_seconds = self._measure(case.cr).canceling_seconds or 0.0
            return Requeue(max(0.0, self._limits.cancel.total_seconds() - observed_seconds))
        if case.view.owned and case.cr.stage is AttemptStage.READY:
            return Requeue(_DEADLINE_CHECK_SECONDS)
        return None

    def _wake_next(self) -> None:
        slots = self._tools.slots
        requests = slots.next_requests()
        for request in requests:
            if request.uid not in self._woken:
                self._queue.add(request.key)
        self._woken = frozenset(request.uid for request in requests)
        self._tools.metrics.set(SLOTS, slots.used, "used")
        self._tools.metrics.set(SLOTS, slots.limit, "total")

    def _forget(self, key: TransferKey, uid: str) -> None:
        self._tools.slots.release(uid)
        self._durations.forget(uid)
        self._tools.pending.forget(uid)
        self._tools.logs.forget(uid)
        self._cache.forget(key)
        self._tools.progress.leave(key[0], uid, again=False)
        self._faults.forget(key)
