"""The steps before a data path may start: expose, recreate, take over, time out, cancel."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from core.errors import ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.kube.types import UncheckedObject
from core.models.base import JsonDict
from core.models.names import BLOCK_PREFERRED_ANNOTATION, FS_DATA_MOVER, MOVER_LOST_ANNOTATION, NODE_LABEL, label_value
from core.models.phases import Phase
from core.models.reasons import NotPrepared, PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from core.redact import redact
from exposer.model import LINUX, Exposed, Guard, NoDeviceError, NotOwnerError, Pending
from exposer.ownership import delete_object
from nodeagent.metrics import EXPOSE_SECONDS
from nodeagent.node.lifecycle import Case, Site
from nodeagent.node.steps import SlotRequest, StepBase
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers import mover_pod
from nodeagent.transfers.retries import NOTHING
from nodeagent.transfers.status import Change, cancel_cause


def build_guard(client: KubeClient, case: Case, site: Site, *, current: Callable[[], UncheckedObject | None]) -> Guard:
    """Return the check that the transfer of `case` is where it was, before its start, and has the label of `site`.

    `current` returns the transfer as cached; None if it is not cached, or older than the last write of this agent.
    """
    kind, cr = case.kind, case.cr
    place = f"{kind.spec.name} {cr.place}"

    def parse(raw: UncheckedObject | None) -> Transfer | None:
        """Return the transfer if it is this one, and not final."""
        now = kind.parse(raw) if raw is not None else None
        return None if now is None or now.uid != cr.uid or now.phase.final else now

    async def guard(*, sure: bool) -> None:
        now = None if sure else parse(current())
        if now is None:
            # Only an answer of the API server proves the end: the cache may still have an earlier transfer of the name.
            now = parse(await client.read(kind.spec.resource, cr.metadata.namespace, cr.name))
        if now is None:
            raise NotOwnerError(f"{place} no longer exists or is final", ended=True)
        owned = now.metadata.labels.get(NODE_LABEL) == site.label
        there = now.between_attempts if cr.between_attempts else now.preparing
        if not there or not owned or now.attempts.number != cr.attempts.number:
            raise NotOwnerError(f"{place} has another owning agent or has started", ended=False)

    return guard


_LOSS_CHECK_SECONDS: Final = 20.0
"""The longest pause before a transfer is reconciled whose next pod has to wait: it may time out meanwhile."""


class ExposeSteps(StepBase):
    """The steps before InProgress."""

    async def expose(self, case: Case) -> Requeue | None:
        """Take the next step toward a mover pod, and report what that is pending for."""
        gone = {mover_pod.PodState.ABSENT, mover_pod.PodState.TERMINATING}
        if case.view.phase is Phase.PREPARED and case.view.pod in gone and await self._record_loss(case):
            return Requeue(0.0)
        answer = await self._ensure(case)
        if not isinstance(answer, Exposed | Pending):
            return answer
        if isinstance(answer, Exposed):
            if mover_pod.pod_state(answer.pod) is mover_pod.PodState.LOST:
                # On another node, which no watch of this agent covers.
                return await self.recreate(replace(case, pod=answer.pod))
            await self._report_not_taken_over(case, answer)
        elif overdue := self._overdue(case, answer):
            return await self._end(case, Phase.FAILED, overdue, not_prepared=NotPrepared.OPERATION_TIMEOUT)
        else:
            await self._report_pending(case, answer)
        return Requeue(self._pending.count_check(case.cr.uid))

    async def recreate(self, case: Case) -> Requeue | None:
        """Record that the mover pod was lost, and delete it once another one may be created."""
        if await self._record_loss(case):
            return Requeue(0.0)
        loss = mover_pod.MoverLoss.from_annotations(case.cr.metadata.annotations)
        if loss is not None:
            waited_seconds = self._pending.operation_seconds(case.cr.uid, f"replacement {loss.times}")
            pause = loss.pause.total_seconds() - waited_seconds
            if pause > 0:
                if why := await self._find_volume_fault(case):
                    return await self._end(case, Phase.FAILED, why)
                return Requeue(min(pause, _LOSS_CHECK_SECONDS))
        if case.pod is not None:
            await self._tools.logs.copy(case.cr, case.pod)
            await delete_object(self._tools.client, PODS, case.pod)
        return Requeue(self._pending.count_check(case.cr.uid))

    async def prepare(self, case: Case) -> Requeue | None:
        """Become the owning agent, and move to Prepared; a stale message is removed, or reports a missing slot."""
        tools, cr = self._tools, case.cr
        status: JsonDict = {"node": self._site.node, "nodeOS": LINUX}
        labels = {NODE_LABEL: self._site.label}
        message = f"data mover pod runs on node {self._site.node}"
        self._pending.forget(cr.uid)
        if case.view.phase is not Phase.ACCEPTED:
            # The first pod was lost, and its replacement or another attempt's was scheduled to another node.
            stored = await tools.status.annotate(case.kind, cr, Change(status | {"message": None}, labels))
            await tools.events.record(stored, "TakenOver", message)
            return None
        change = Change(status, labels)
        if MOVER_LOST_ANNOTATION in cr.metadata.annotations:
            change = replace(change, annotations={MOVER_LOST_ANNOTATION: None})
        full = tools.slots.is_full_for(SlotRequest.of(cr, now=tools.api_time()))
        pending = self._slot_pending()
        if full:
            # Reported here, the missing slot costs no write of its own.
            change = replace(change, status=status | {"message": pending.message}, reason=pending.reason)
            message = f"{message}; {pending.message}"
        stored = await tools.status.move(case.kind, cr, Phase.PREPARED, change)
        if cr.accepted_at is not None:
            seconds = (tools.api_time() - cr.accepted_at).total_seconds()
            tools.metrics.observe(EXPOSE_SECONDS, seconds, case.kind.spec.name)
        await tools.events.record(stored, "Prepared", message)
        if full:
            self._pending.decide_report(cr.uid, pending)
            self._pending.mark_reported(cr.uid, pending)
            self._pause_until_slot(case)
        return None

    async def hand_over(self, case: Case) -> Requeue | None:
        """Name the agent that works on the transfer as the owning one, and leave it alone."""
        node = case.cr.status.node or ""
        self._pending.forget(case.cr.uid)
        change = Change(labels={NODE_LABEL: label_value(node)})
        stored = await self._tools.status.annotate(case.kind, case.cr, change)
        await self._tools.events.record(stored, "TakenOver", f"the node agent on node {node} continues it")
        return None

    async def time_out(self, case: Case) -> Requeue | None:
        """Move to Failed: there was no mover pod in time."""
        timeout = format_duration(self._limits.prepare)
        cause = self._pending.get(case.cr.uid).current.message or case.cr.status.message
        loss = mover_pod.MoverLoss.from_annotations(case.cr.metadata.annotations)
        what = "not prepared" if case.view.phase is Phase.ACCEPTED else "data mover pod was lost and not replaced"
        if case.view.phase is Phase.IN_PROGRESS:
            what = f"attempt {case.cr.attempts.number} not prepared"
        message = f"{what} within {timeout}" + (f": {cause}" if cause else "")
        if loss is not None:
            message += f"; lost data mover pods: {loss.times}, the last one because of {loss.why or 'its deletion'}"
        return await self._end(case, Phase.FAILED, message, not_prepared=NotPrepared.PREPARE_TIMEOUT)

    async def cancel(self, case: Case) -> Requeue | None:
        """Move to Canceled: the data path has not started."""
        return await self._end(case, Phase.CANCELED, f"canceled while {case.view.phase}: {cancel_cause(case.cr)}")

    async def _ensure(self, case: Case) -> Exposed | Pending | Requeue | None:
        current = partial(self._tools.cache.current, case.cr.key)
        guard = build_guard(self._tools.client, case, self._site, current=current)
        try:
            return await self._pending_if_rejected(case.kind.ensure_exposed(case.cr, guard))
        except NoDeviceError as e:
            if case.cr.prefers_block:
                return await self._use_files(case, str(e))
            return await self._end(case, Phase.FAILED, str(e))
        except (ExposeError, ContractError) as e:
            return await self._end(case, Phase.FAILED, str(e))

    async def _use_files(self, case: Case, cause: str) -> Requeue:
        """Have files backed up instead of a device: `spec.datamover` always names the format that is written."""
        cause = redact(cause)
        change = Change(annotations={BLOCK_PREFERRED_ANNOTATION: cause}, spec={"datamover": FS_DATA_MOVER})
        stored = await self._tools.status.annotate(case.kind, case.cr, change)
        await self._tools.events.record(stored, "FilesInstead", f"files are backed up instead: {cause}", warning=True)
        return Requeue(0.0)

    async def _report_not_taken_over(self, case: Case, exposed: Exposed) -> None:
        """Report a mover pod on another node whose agent has not taken over the transfer."""
        node = mover_pod.pod_node(exposed.pod)
        if node in {None, self._site.node}:
            # Not forgotten: without a watch of the pods, the quick checks would never end.
            self._pending.observe(case.cr.uid, NOTHING)
            if case.cr.status.message:
                await self._tools.status.report(case.kind, case.cr, message="")
            return
        message = f"data mover pod {case.cr.place} is on node {node}, whose node agent has not taken it over yet"
        await self._report_pending(case, Pending(PendingReason.NOT_TAKEN_OVER, message))

    def _overdue(self, case: Case, pending: Pending) -> str | None:
        timeout = pending.timeout or self._operation_timeout(case)
        uid, operation = case.cr.uid, pending.operation
        if not operation or self._pending.operation_seconds(uid, operation) < timeout.total_seconds():
            return None
        return f"timed out after {format_duration(timeout)}: {pending.message}"

    async def _record_loss(self, case: Case) -> bool:
        """Record each lost pod once, and fail where no other is to be created; return whether this one is new."""
        before, pod = mover_pod.MoverLoss.from_annotations(case.cr.metadata.annotations), case.pod
        loss = mover_pod.count_loss(before, pod, self._tools.api_time())
        if loss == before:
            return False
        if loss.failure:
            tail = await self._tools.logs.copy(case.cr, case.pod)
            message = mover_pod.add_log_end(f"data mover pod {case.cr.place} {loss.failure}", tail)
            await self._end(case, Phase.FAILED, message, not_prepared=NotPrepared.MOVER_LOST)
            return True
        cause = f": {loss.why}" if loss.why else ""
        rejected = mover_pod.rejection_reason(pod) if pod is not None else None
        what = "was rejected by its kubelet" if rejected else "was lost before its data path started"
        message = f"data mover pod {case.cr.place} {what}, will be recreated{cause}"
        pending = Pending(rejected or PendingReason.MOVER_LOST, message)
        marks = {MOVER_LOST_ANNOTATION: loss.to_json()}
        change = Change(status={"message": message}, annotations=marks, reason=pending.reason)
        stored = await self._tools.status.annotate(case.kind, case.cr, change)
        await self._tools.events.record(stored, pending.reason, message, warning=True)
        self._pending.mark_reported(case.cr.uid, pending)
        return True
