"""The steps before a mover may begin: expose, make anew, take over, time out, cancel.

Knows how a load gets its mover pod, and another one where the cluster took the first away. Does
not know when a step is due, nor what happens once the mover may begin (`nodeagent.node.data_path_steps`).

The check between the steps of an expose: is the load still ours to expose?

Knows what makes a load ours. Does not know what is exposed, nor what is undone.
"""

from collections.abc import Callable
from dataclasses import replace

from core.errors import ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL
from core.models.phases import HOLDING_PHASES, Phase
from core.models.reasons import PendingReason
from core.models.units import format_duration
from exposer.model import Exposed, Guard, NotOwnerError, Pending
from exposer.ownership import delete_object
from nodeagent.node.lifecycle import Case, ReadCurrent, Site, Timeouts
from nodeagent.node.mover_loss import LostPod, count_loss, read_loss
from nodeagent.node.slots import Claim
from nodeagent.node.steps import StepBase, Tools
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import cancel_cause
from nodeagent.transfers.mover_pod import PodState, add_log_end, explain_loss, pod_node, pod_state, was_killed
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import Change

__all__ = ["ExposeSteps", "build_guard"]


def build_guard(client: KubeClient, case: Case, site: Site, *, current: Callable[[], JsonDict | None]) -> Guard:
    """Return the check that the load of `case` has not begun and has the label of `site`.

    `current` returns the load as last seen; None where that is not known, or older than what we wrote.
    """
    kind, cr = case.kind, case.cr
    place = f"{kind.name} {cr.metadata.namespace}/{cr.name}"

    async def guard(*, sure: bool) -> None:
        raw = None if sure else current()
        if raw is None:
            raw = await client.read(kind.resource, cr.metadata.namespace, cr.name)
        now = kind.parse(raw) if raw is not None else None
        if now is None or now.uid != cr.uid or now.phase.final:
            raise NotOwnerError(f"{place} ended meanwhile", ended=True)
        ours = now.metadata.labels.get(NODE_LABEL) == site.label
        if now.phase not in HOLDING_PHASES or not ours:
            raise NotOwnerError(f"{place} is another agent's by now, or further on", ended=False)

    return guard


_LOSS_LOOK_SECONDS = 20.0
"""The longest pause before a load is looked at again whose next pod has to wait: it may be late by then."""


class ExposeSteps(StepBase):
    """Carries out what is due before InProgress."""

    def __init__(
        self, tools: Tools, site: Site, limits: Timeouts, *, waits: PendingRecords, current: ReadCurrent
    ) -> None:
        """Work like all steps; `current` returns a load as last seen, if nothing that we wrote is missing in it."""
        super().__init__(tools, site, limits, waits=waits)
        self._current = current

    async def expose(self, case: Case) -> Requeue | None:
        """Bring the volume one step nearer to a mover pod, and say what that waits for."""
        if case.view.phase is Phase.PREPARED and case.view.pod in {PodState.ABSENT, PodState.LEAVING}:
            noted = await self._note_loss(case)
            if noted:
                return Requeue(0.0)
        answer = await self._ensure(case)
        if not isinstance(answer, Exposed | Pending):
            return answer
        if isinstance(answer, Exposed):
            if pod_state(answer.pod) is PodState.DISPLACED:
                # On another node, so that no watch of ours showed it.
                return await self.remake(replace(case, pod=answer.pod))
            await self._await_taker(case, answer)
        elif overdue := self._overdue(case, answer):
            return await self._end(case, Phase.FAILED, overdue)
        else:
            await self._tell_wait(case, answer)
        return Requeue(self._waits.count_check(case.cr.uid))

    async def remake(self, case: Case) -> Requeue | None:
        """Say that the cluster took the mover pod away, and remove it once another may be made."""
        if await self._note_loss(case):
            return Requeue(0.0)
        loss = read_loss(case.cr)
        if loss is not None:
            pause = (loss.remake_at - self._tools.clock.now()).total_seconds()
            if pause > 0:
                return Requeue(min(pause, _LOSS_LOOK_SECONDS))
        if case.pod is not None:
            await self._tools.logs.take_over(case.cr, case.pod)
            await delete_object(self._tools.client, PODS, case.pod)
        return Requeue(self._waits.count_check(case.cr.uid))

    async def prepare(self, case: Case) -> Requeue | None:
        """Make the load this node's, and Prepared; a message about its wait goes, or tells that it waits for a slot."""
        change = Change(
            status={"node": self._site.node, "nodeOS": self._site.os},
            labels={NODE_LABEL: self._site.label},
        )
        told = f"the data mover pod runs on node {self._site.node}"
        self._waits.forget(case.cr.uid)
        if case.view.phase is Phase.PREPARED:
            # Its first pod was lost, and the next one came to another node.
            status = {**change.status, "message": None}
            stored = await self._tools.status.annotate(case.kind, case.cr, Change(status, change.labels))
            await self._tools.events.record(stored, "TakenOver", told)
            return None
        if MOVER_LOST_ANNOTATION in case.cr.metadata.annotations:
            change = Change(change.status, change.labels, {MOVER_LOST_ANNOTATION: None})
        if not self._tools.slots.has_none_for(Claim.of(case.cr, now=self._tools.clock.now())):
            stored = await self._tools.status.move(case.kind, case.cr, Phase.PREPARED, change)
            await self._tools.events.record(stored, "Prepared", told)
            return None
        # Told here, the wait costs no write of its own.
        waiting = self._slot_wait()
        change = replace(change, status={**change.status, "message": waiting.message}, reason=waiting.reason)
        stored = await self._tools.status.move(case.kind, case.cr, Phase.PREPARED, change)
        await self._tools.events.record(stored, "Prepared", f"{told}; {waiting.message}")
        self._waits.decide_report(case.cr.uid, waiting)
        self._waits.mark_reported(case.cr.uid, waiting)
        self._rest_until_slot(case)
        return None

    async def time_out(self, case: Case) -> Requeue | None:
        """End a load that had no mover in time."""
        span = format_duration(self._limits.prepare)
        why = self._waits.message(case.cr.uid) or case.cr.status.message
        loss = read_loss(case.cr)
        what = "not prepared" if case.view.phase is Phase.ACCEPTED else "data mover pod was lost and not replaced"
        message = f"{what} within {span}" + (f": {why}" if why else "")
        if loss is not None:
            message += f"; data mover pods lost: {loss.times}, the last one by {loss.why or 'deletion'}"
        return await self._end(case, Phase.FAILED, message)

    async def cancel(self, case: Case) -> Requeue | None:
        """End a load at once that is not to begin any more."""
        return await self._end(case, Phase.CANCELED, f"canceled while {case.view.phase}: {cancel_cause(case.cr)}")

    async def _ensure(self, case: Case) -> Exposed | Pending | Requeue | None:
        """Return what the exposer says; anything else where there is nothing more to do about it."""
        try:
            guard = build_guard(self._tools.client, case, self._site, current=lambda: self._current(case.key))
            return await self._judged(case.kind.ensure_exposed(case.cr, guard))
        except NotOwnerError as e:
            self._logger(case).debug("the expose stops: %s", e)
            return None
        except (ExposeError, ContractError) as e:
            return await self._end(case, Phase.FAILED, str(e))

    async def _await_taker(self, case: Case, exposed: Exposed) -> None:
        """Say so where the mover is up on a node whose agent has not noticed."""
        node = pod_node(exposed.pod)
        if node in {"", self._site.node}:
            await self._stop_waiting(case)
            return
        place = f"{case.cr.metadata.namespace}/{case.cr.name}"
        message = f"data mover pod {place} is on node {node}, whose node agent has not taken it over yet"
        await self._tell_wait(case, Pending(PendingReason.NOT_TAKEN_OVER, message))

    def _overdue(self, case: Case, waiting: Pending) -> str:
        """Return why the load ends where one operation took too long; empty where it may go on."""
        span = self._operation_span(case)
        if waiting.since is None or self._tools.clock.now() - waiting.since < span:
            return ""
        return f"{waiting.message}; that took longer than {format_duration(span)}"

    async def _note_loss(self, case: Case) -> bool:
        """Write once for each lost pod that it was lost, and why; return whether that was news.

        Where there is to be no other pod, the load ends.
        """
        before, pod = read_loss(case.cr), LostPod()
        if case.pod is not None:
            pod = LostPod(case.pod["metadata"]["uid"], explain_loss(case.pod), was_killed(case.pod))
        loss = count_loss(before, pod, self._tools.clock.now())
        if loss == before:
            return False
        why = pod.why
        place = f"{case.cr.metadata.namespace}/{case.cr.name}"
        if loss.verdict:
            tail = await self._tools.logs.take_over(case.cr, case.pod)
            await self._end(case, Phase.FAILED, add_log_end(f"data mover pod {place} {loss.verdict}", tail))
            return True
        message = f"data mover pod {place} was lost before it began{f' ({why})' if why else ''}; another one is made"
        waiting = Pending(PendingReason.MOVER_LOST, message)
        marks = {MOVER_LOST_ANNOTATION: loss.to_json()}
        change = Change(status={"message": message}, annotations=marks, reason=waiting.reason)
        stored = await self._tools.status.annotate(case.kind, case.cr, change)
        await self._tools.events.record(stored, waiting.reason, message, warning=True)
        self._waits.mark_reported(case.cr.uid, waiting)
        return True
