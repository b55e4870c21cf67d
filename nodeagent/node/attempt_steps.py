"""The steps from an interrupted attempt to the next one: interrupt, await, give up, start.

Knows what is written of an interruption, and what must be gone before the next attempt may begin. Does not know which
ends may be retried (`nodeagent.transfers.retries`), when a step is due, nor how a mover pod is created
(`nodeagent.node.expose_steps`). Between two of these steps the leader lets the attempt begin.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from core.errors import ExposeError
from core.models.attempts import Attempts, AttemptStage, InterruptionCause
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from core.models.reasons import PendingReason
from exposer.model import Pending
from nodeagent.metrics.table import RETRIES, RETRY_LOST_SECONDS
from nodeagent.node.lifecycle import Case
from nodeagent.node.steps import StepBase
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.announcement import announce_next, build_interruption
from nodeagent.transfers.mover_pod import pod_node
from nodeagent.transfers.owners import read_owner_refusal
from nodeagent.transfers.status import Change

__all__ = ["AttemptSteps"]

_FENCED_CHECK_SECONDS: Final = 60.0
"""Between two looks at a pod that may still write: each costs two requests, and it may stay for hours."""

_OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Source: Kubernetes, Non-graceful node shutdown: by this taint an administrator says that a node is off."""

_CHECK_SECONDS: Final = 20.0
"""The longest pause before a transfer between two attempts is checked: its volume may disappear, or its time end."""


class AttemptSteps(StepBase):
    """The steps from an interrupted attempt to the start of the next one."""

    async def interrupt(self, case: Case) -> Requeue | None:
        """Record the interruption; this write also announces the next attempt, and ends the old mover if it runs."""
        kind, cr, ending = case.kind, case.cr, case.ending
        if ending is None:
            return None
        if why := await self._find_obstacle(case):
            return await self._end(case, Phase.FAILED, f"{ending.message}; not retried: {why}")
        await self._tools.logs.copy(cr, case.pod)
        pod = case.pod or case.departed
        node = (pod_node(pod) if pod is not None else "") or self._site.node
        interruption = build_interruption(ending, node=node, at=self._tools.api_time())
        rules = self._tools.retry_rules(cr)
        announced = announce_next(cr, interruption, rules, restores=kind.spec.restores)
        stored = await self._tools.status.annotate(kind, cr, announced.change)
        self._tools.slots.release(stored.uid)
        self._pending.forget(stored.uid)
        self._pending.mark_reported(stored.uid, Pending(PendingReason.INTERRUPTED, announced.message))
        self._tools.metrics.inc(RETRIES, kind.spec.name, ending.cause)
        await self._tools.events.record(stored, PendingReason.INTERRUPTED, announced.message, warning=True)
        return None

    async def await_attempt(self, case: Case) -> Requeue | None:
        """Remove what the interrupted attempt left; once that is done and the delay is over, ask for the next one."""
        cr = case.cr
        if why := await self._find_obstacle(case):
            return await self._end(case, Phase.FAILED, f"{cr.attempts.explain_last()}; not retried: {why}")
        if cr.attempts.last is None or cr.attempts.last.cause is not InterruptionCause.NODE_LOST:
            # The kubelet of a lost node does not answer.
            await self._tools.logs.copy(cr, case.pod)
        pending = await self._pending_if_rejected(case.kind.withdraw(cr))
        if isinstance(pending, Pending):
            await self._report_pending(case, _explain_fence(case, pending))
            fenced = self._pending.is_reported(cr.uid, PendingReason.FENCING)
            return Requeue(_FENCED_CHECK_SECONDS if fenced else self._pending.count_check(cr.uid))
        message = f"{cr.attempts.explain_last()}; attempt {cr.attempts.number} follows"
        outdated = cr.pending_reason != PendingReason.INTERRUPTED
        if case.delay_seconds > 0:
            if outdated:
                await self._report_pending(case, Pending(PendingReason.INTERRUPTED, message))
            return Requeue(min(case.delay_seconds, _CHECK_SECONDS))
        change = _change(cr.attempts.move(AttemptStage.READY))
        if outdated:
            change = replace(change, status={"message": message}, reason=PendingReason.INTERRUPTED)
        await self._tools.status.annotate(case.kind, cr, change)
        return None

    async def give_up(self, case: Case) -> Requeue | None:
        """Move to Failed: the next attempt did not begin in time."""
        attempts = case.cr.attempts
        message = f"attempt {attempts.number} did not begin: {case.refused}; {attempts.explain_last()}"
        return await self._end(case, Phase.FAILED, message)

    async def start(self, case: Case) -> Requeue | None:
        """Let the mover of the attempt start its data path."""
        tools, cr, kind = self._tools, case.cr, case.kind
        try:
            await kind.confirm_volume(cr)
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if not tools.slots.acquire(cr.uid):
            return await self._await_slot(case)
        status = {"node": self._site.node, "nodeOS": self._site.os, "message": None}
        stored = await tools.status.annotate(kind, cr, _change(cr.attempts.move(AttemptStage.RUNNING), status))
        self._pending.forget(cr.uid)
        number, last = cr.attempts.number, cr.attempts.last
        if last is not None:
            lost_seconds = (tools.api_time() - last.at).total_seconds()
            tools.metrics.inc(RETRY_LOST_SECONDS, kind.spec.name, by=lost_seconds)
        message = f"data mover of attempt {number} may start its data path on node {self._site.node}"
        await tools.events.record(stored, "Retried", message)
        return None

    async def _find_obstacle(self, case: Case) -> str:
        """Return why another attempt would be of no use, whatever the limits are; empty: it may be."""
        if case.kind.spec.bound_to_node:
            try:
                await case.kind.confirm_volume(case.cr)
            except ExposeError as e:
                return str(e)
        return await read_owner_refusal(self._tools.client, case.cr)


def _explain_fence(case: Case, pending: Pending) -> Pending:
    """Return why the next attempt has to wait for the end of the old pod; unchanged unless that may still write."""
    last = case.cr.attempts.last
    writes = case.kind.spec.restores and case.pod is not None and last is not None and not last.terminated
    if last is None or not writes or pending.reason != PendingReason.CLEANING_UP:
        return pending
    message = f"{pending.message}; until it is gone, its data mover may write"
    if last.cause is InterruptionCause.NODE_LOST:
        message += f": delete Node {last.node} or taint it {_OUT_OF_SERVICE} once the machine is off"
    return Pending(PendingReason.FENCING, message, blocked=True)


def _change(attempts: Attempts, status: Mapping[str, object] | None = None) -> Change:
    return Change(status or {}, annotations={ATTEMPTS_ANNOTATION: attempts.to_json()})
