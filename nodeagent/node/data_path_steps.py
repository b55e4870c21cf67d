"""The steps from Prepared to the final status, or to the next attempt: slot, start, cancel, outcome, completion.

The leader lets the next attempt begin, between two of these steps. Which ends may be retried is in
`nodeagent.transfers.retries`.
"""

from dataclasses import replace
from typing import Final

from msgspec import structs

from core.errors import ExposeError
from core.models.names import ATTEMPTS_ANNOTATION, MOVER_LOST_ANNOTATION, OUTCOME_ANNOTATION
from core.models.phases import AttemptStage, InterruptionCause, Phase
from core.models.reasons import PendingReason
from core.models.units import format_duration
from exposer.model import LINUX, Pending
from nodeagent.metrics import REFUSED_RESTORES, RETRIES, RETRY_LOST_SECONDS, WAIT_SECONDS
from nodeagent.node.expose_steps import build_guard
from nodeagent.node.lifecycle import CancelState, Case
from nodeagent.node.steps import StepBase
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.mover_pod import add_log_end, explain_loss, find_unreplaced, pod_node
from nodeagent.transfers.outcome import Outcome, decide_outcome, find_refusal, has_final_message
from nodeagent.transfers.status import (
    Change,
    CleanUp,
    announce_next,
    build_interruption,
    cancel_cause,
    read_owner_refusal,
)


class DataPathSteps(StepBase):
    """The steps from Prepared to the final status."""

    async def report_slot_pending(self, case: Case) -> Requeue | None:
        """Report that all slots are in use; move to Failed if the volume has disappeared.

        Also record that a lost mover pod was replaced: the next loss has a timeout of its own.
        """
        if self._check_is_paused(case):
            return self._next_slot_check(case)
        if why := await self._find_volume_fault(case):
            return await self._end(case, Phase.FAILED, why)
        if loss := find_unreplaced(case.cr):
            replaced = structs.replace(loss, replaced=True)
            change = Change(annotations={MOVER_LOST_ANNOTATION: replaced.to_json()})
            await self._tools.status.annotate(case.kind, case.cr, change)
            return Requeue(0.0)
        return await self._await_slot(case)

    async def start(self, case: Case) -> Requeue | None:
        """Let the mover start its data path, in the first attempt by a move to InProgress."""
        tools, cr = self._tools, case.cr
        if why := await self._find_volume_fault(case):
            return await self._end(case, Phase.FAILED, why)
        if not tools.slots.acquire(cr.uid):
            return await self._await_slot(case)
        if cr.phase is Phase.IN_PROGRESS:
            return await self._start_again(case)
        change = Change(annotations=tools.starting(cr))
        stored = await self._started(case, tools.status.move(case.kind, cr, Phase.IN_PROGRESS, change))
        created = cr.metadata.creation_timestamp
        if created is not None:
            seconds = (tools.api_time() - created).total_seconds()
            tools.metrics.observe(WAIT_SECONDS, seconds, case.kind.spec.name)
        case.kind.count(stored, tools.metrics)
        await tools.events.record(stored, "Started", "data mover may start its data path")
        return None

    async def _start_again(self, case: Case) -> Requeue | None:
        tools, cr, kind = self._tools, case.cr, case.kind
        status = {"node": self._site.node, "nodeOS": LINUX, "message": None}
        marks = {ATTEMPTS_ANNOTATION: cr.attempts.move(AttemptStage.RUNNING).to_json(), **tools.starting(cr)}
        running = Change(status, annotations=marks)
        stored = await self._started(case, tools.status.annotate(kind, cr, running))
        self._pending.forget(cr.uid)
        number, last = cr.attempts.number, cr.attempts.last
        if last is not None:
            lost_seconds = (tools.api_time() - last.at).total_seconds()
            tools.metrics.inc(RETRY_LOST_SECONDS, kind.spec.name, by=lost_seconds)
        message = f"data mover of attempt {number} may start its data path on node {self._site.node}"
        await tools.events.record(stored, "Retried", message)
        return None

    async def set_canceling(self, case: Case) -> Requeue | None:
        """Move to Canceling, which asks the mover to stop."""
        stored = await self._tools.status.move(case.kind, case.cr, Phase.CANCELING)
        await self._tools.events.record(stored, "Canceling", f"{cancel_cause(case.cr)}; stopping the data mover")
        return None

    async def force_cancel(self, case: Case) -> Requeue | None:
        """Move to Canceled: the mover did not stop in time."""
        timeout = format_duration(self._limits.cancel)
        message = f"{cancel_cause(case.cr)}; data mover did not stop within {timeout}, deleting its pod"
        return await self._end(case, Phase.CANCELED, message)

    async def end_without_result(self, case: Case) -> Requeue | None:
        """Move to Canceled or Failed: the mover pod no longer exists, and its result is unknown."""
        mover = f"data mover pod {case.cr.metadata.namespace}/{case.cr.name}"
        if case.view.cancel is not CancelState.NONE:
            return await self._end(case, Phase.CANCELED, f"{cancel_cause(case.cr)}; {mover} was lost")
        cause = case.departed and explain_loss(case.departed)
        message = f"{mover} was lost on node {self._site.node} without a result" + (f": {cause}" if cause else "")
        return await self._end(case, Phase.FAILED, f"{message}{_not_retried(case)}")

    async def fail_unstarted(self, case: Case) -> Requeue | None:
        """Move to Failed: the mover ended by itself before its data path started."""
        outcome = self._read_outcome(case)
        message = f"{outcome.message or 'data mover ended before its data path started'}{_not_retried(case)}"
        return await self._end(case, Phase.FAILED, await self._with_log_end(case, message))

    async def record_outcome(self, case: Case) -> Requeue | None:
        """Record how the mover ended, before anything of it is changed."""
        kind, cr = case.kind, case.cr
        outcome = await self._confirm(case, self._read_outcome(case))
        if outcome.phase is Phase.COMPLETED:
            try:
                outcome = await kind.keep(cr, outcome)
            except ExposeError as e:
                outcome = Outcome(phase=Phase.FAILED, message=str(e))
        elif outcome.phase is Phase.FAILED:
            message = f"{outcome.message}{_not_retried(case)}"
            outcome = replace(outcome, message=await self._with_log_end(case, message))
        change = Change(annotations={OUTCOME_ANNOTATION: outcome.to_json()})
        await self._tools.status.annotate(kind, cr, change)
        if refused := find_refusal(outcome, case.end):
            self._tools.metrics.inc(REFUSED_RESTORES, kind.spec.name, refused)
        return None

    async def finish(self, case: Case) -> Requeue | None:
        """Complete what the recorded outcome requires, then write the final status."""
        kind, cr, outcome = case.kind, case.cr, case.outcome
        if outcome is None:
            return None
        # The completion may delete the pod, and its log with it.
        await self._tools.logs.copy(cr, case.pod)
        if outcome.phase is not Phase.COMPLETED:
            return await self._end(case, outcome.phase, outcome.message)
        try:
            pending = await self._pending_if_rejected(kind.complete(cr, outcome), wait_out=True)
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if pending is not None:
            return await self._await_completion(case, pending)
        return await self._end(case, Phase.COMPLETED, "")

    async def clean_up(self, case: Case) -> Requeue | None:
        """Delete the expose objects of a finished transfer, then this agent's marks."""
        tools = self._tools
        await tools.logs.copy(case.cr, case.pod)
        return await CleanUp(tools.status, tools.events, self._pending, self._limits.resource).step(case.kind, case.cr)

    async def _with_log_end(self, case: Case, message: str) -> str:
        tail = await self._tools.logs.copy(case.cr, case.pod)
        return message if case.end is not None and has_final_message(case.end) else add_log_end(message, tail)

    def _check_is_paused(self, case: Case) -> bool:
        if find_unreplaced(case.cr):
            return False
        uid, pending = case.cr.uid, self._slot_pending()
        self._pending.compare_report(uid, case.cr.pending_reason)
        if self._pending.get(uid).current.reason != pending.reason:
            self._pending.decide_report(uid, pending)
            self._pending.pause_checks(uid, self._pending.seconds_to_report(uid))
        return self._pending.paused_seconds(uid) > 0

    async def _await_completion(self, case: Case, pending: Pending) -> Requeue | None:
        timeout = self._operation_timeout(case)
        if self._pending.operation_seconds(case.cr.uid, "completion") >= timeout.total_seconds():
            message = f"not completed within {format_duration(timeout)} after the data was moved: {pending.message}"
            return await self._end(case, Phase.FAILED, message)
        await self._report_pending(case, pending)
        return Requeue(self._pending.count_check(case.cr.uid))

    def _read_outcome(self, case: Case) -> Outcome:
        if case.end is None:
            return Outcome(phase=Phase.FAILED, message="data mover pod left no result")
        requested = case.view.cancel is not CancelState.NONE
        return decide_outcome(case.end, case.kind.parse_result, cancel_requested=requested)

    async def _confirm(self, case: Case, outcome: Outcome) -> Outcome:
        moved = outcome.phase is Phase.COMPLETED
        if outcome.phase is Phase.CANCELED or not (why := await self._find_volume_fault(case, moved=moved)):
            return outcome
        reported = f"; the data mover reported: {outcome.message}" if outcome.message else ""
        return Outcome(phase=Phase.FAILED, message=f"{why}{reported}")


def _not_retried(case: Case) -> str:
    return f"; not retried: {case.refused}" if case.ending is not None and case.refused else ""


_FENCED_CHECK_SECONDS: Final = 60.0
"""Between two looks at a pod that may still write: each costs three requests, and it may stay for hours."""

_OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Source: Kubernetes, Non-graceful node shutdown: by this taint an administrator says that a node is off."""

_CHECK_SECONDS: Final = 20.0
"""The longest pause before a transfer between two attempts is checked: its volume may disappear, or its time end."""


class AttemptSteps(StepBase):
    """The steps from an interrupted attempt to the exposure of the next one."""

    async def interrupt(self, case: Case) -> Requeue | None:
        """Record the interruption; this write also announces the next attempt, and ends the old mover if it runs."""
        kind, cr, ending = case.kind, case.cr, case.ending
        if ending is None:
            return None
        if why := await self._find_obstacle(case):
            return await self._end(case, Phase.FAILED, f"{ending.message}; not retried: {why}")
        await self._tools.logs.copy(cr, case.pod)
        pod = case.pod or case.departed
        node = (pod and pod_node(pod)) or self._site.node
        uptime = None if ending.terminated else self._tools.uptime()
        interruption = build_interruption(ending, node=node, at=self._tools.api_time(), uptime=uptime)
        rules = self._tools.retry_rules(cr)
        change, message = announce_next(cr, interruption, rules, restores=kind.spec.restores)
        stored = await self._tools.status.annotate(kind, cr, change)
        self._tools.slots.release(stored.uid)
        self._pending.forget(stored.uid)
        self._pending.mark_reported(stored.uid, Pending(PendingReason.INTERRUPTED, message))
        self._tools.metrics.inc(RETRIES, kind.spec.name, ending.cause)
        await self._tools.events.record(stored, PendingReason.INTERRUPTED, message, warning=True)
        return None

    async def await_attempt(self, case: Case) -> Requeue | None:
        """Remove what the interrupted attempt left; once that is done and the delay is over, ask for the next one."""
        cr = case.cr
        if why := await self._find_obstacle(case):
            return await self._end(case, Phase.FAILED, f"{cr.attempts.explain_last()}; not retried: {why}")
        if cr.attempts.last is None or cr.attempts.last.cause is not InterruptionCause.NODE_LOST:
            # The kubelet of a lost node does not answer.
            await self._tools.logs.copy(cr, case.pod)
        guard = build_guard(self._tools.client, case, self._site, current=lambda: None)
        pending = await self._pending_if_rejected(case.kind.withdraw(cr, guard))
        if isinstance(pending, Pending):
            await self._report_pending(case, _explain_fence(case, pending))
            fenced = self._pending.get(cr.uid).reported.reason == PendingReason.FENCING
            return Requeue(_FENCED_CHECK_SECONDS if fenced else self._pending.count_check(cr.uid))
        message = f"{cr.attempts.explain_last()}; attempt {cr.attempts.number} follows"
        outdated = cr.pending_reason != PendingReason.INTERRUPTED
        if case.delay_seconds > 0:
            if outdated:
                await self._report_pending(case, Pending(PendingReason.INTERRUPTED, message))
            return Requeue(min(case.delay_seconds, _CHECK_SECONDS))
        change = Change(annotations={ATTEMPTS_ANNOTATION: cr.attempts.move(AttemptStage.READY).to_json()})
        if outdated:
            change = replace(change, status={"message": message}, reason=PendingReason.INTERRUPTED)
        await self._tools.status.annotate(case.kind, cr, change)
        return None

    async def give_up(self, case: Case) -> Requeue | None:
        """Move to Failed: the next attempt did not begin in time."""
        attempts = case.cr.attempts
        message = f"attempt {attempts.number} did not begin: {case.refused}; {attempts.explain_last()}"
        return await self._end(case, Phase.FAILED, message)

    async def _find_obstacle(self, case: Case) -> str | None:
        """Return why another attempt would be of no use, whatever the limits are; None: it may be."""
        if case.kind.spec.bound_to_node and (why := await self._find_volume_fault(case)):
            return why
        return await read_owner_refusal(self._tools.client, case.cr)


def _explain_fence(case: Case, pending: Pending) -> Pending:
    """Return why the next attempt has to wait for the end of the old pod; unchanged unless that may still write."""
    last = case.cr.attempts.last
    writes = case.kind.spec.restores and case.pod is not None and last is not None and not last.terminated
    if last is None or not writes or pending.reason != PendingReason.CLEANING_UP:
        return pending
    message = f"{pending.message}; until it is gone, its data mover may write"
    if last.cause is InterruptionCause.NODE_LOST and last.node is not None:
        message += f": delete Node {last.node} or taint it {_OUT_OF_SERVICE} once the machine is off"
    return Pending(PendingReason.FENCING, message, blocked=True)
