"""One method for each action of the life cycle: what is done, written and told.

Knows how a step is carried out through the kind's adapter, the status writer and the story.
Does not know when a step is due: `nodeagent.lifecycle` decides, `nodeagent.reconciler` calls.
Each step may run twice.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from core.clock import Clock
from core.errors import ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, InvalidError
from core.logs import BoundLogger, bind
from core.models.duration import format_duration
from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import Phase
from exposer.diagnose import parse_pod_end
from exposer.model import NotOwnerError, Waiting
from nodeagent.concurrency import Slots
from nodeagent.guard import build_guard
from nodeagent.lifecycle import Action, Stop
from nodeagent.metrics import Metrics
from nodeagent.mover_logs import MoverLogs
from nodeagent.outcome import Outcome, decide_outcome
from nodeagent.progress import ProgressFollower
from nodeagent.queue import Requeue
from nodeagent.refusals import judge_refusal
from nodeagent.status import Change, StatusWriter
from nodeagent.story import Story
from nodeagent.view import Case, Limits, Site
from nodeagent.waits import Waits

__all__ = ["Steps", "Tools"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tools:
    """What the steps are carried out with."""

    client: KubeClient
    clock: Clock
    status: StatusWriter
    story: Story
    logs: MoverLogs
    progress: ProgressFollower
    slots: Slots
    metrics: Metrics


class Steps:
    """Carries out actions."""

    def __init__(self, tools: Tools, site: Site, limits: Limits) -> None:
        """Work with `tools` for the agent of `site`."""
        self._tools = tools
        self._site = site
        self._limits = limits
        self._waits = Waits(tools.clock)
        self._by_action: Mapping[Action, Callable[[Case], Awaitable[Requeue | None]]] = {
            Action.EXPOSE: self._expose,
            Action.TAKE_OVER: self._prepare,
            Action.PREPARE: self._prepare,
            Action.TIME_OUT: self._time_out,
            Action.CANCEL: self._cancel,
            Action.AWAIT_SLOT: self._await_slot,
            Action.START: self._start,
            Action.MOVE_CANCELING: self._move_canceling,
            Action.FORCE_CANCEL: self._force_cancel,
            Action.LOSE: self._lose,
            Action.GIVE_UP: self._give_up,
            Action.KEEP_OUTCOME: self._keep_outcome,
            Action.FINISH: self._finish,
            Action.CLEAN_UP: self._clean_up,
        }

    async def perform(self, action: Action, case: Case) -> Requeue | None:
        """Carry out `action`; return when to look at the load again without a change.

        Raises:
            KubeError: the API server refused; after a ConflictError read and decide again.
        """
        self._log(case).debug("next step: %s", action.name)
        return await self._by_action[action](case)

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._waits.forget(uid)
        self._tools.logs.forget(uid)

    async def _expose(self, case: Case) -> Requeue | None:
        kind, cr = case.kind, case.cr
        try:
            answer = await kind.ensure_exposed(cr, build_guard(self._tools.client, case, self._site))
        except NotOwnerError as e:
            self._log(case).debug("the expose stops: %s", e)
            return None
        except (ForbiddenError, InvalidError) as e:
            try:
                answer = judge_refusal(e)
            except ExposeError as refused:
                return await self._end(case, Phase.FAILED, str(refused))
        except (ExposeError, ContractError) as e:
            return await self._end(case, Phase.FAILED, str(e))
        if isinstance(answer, Waiting):
            await self._tell_wait(case, answer)
        # An exposed load moves on when the watch shows its pod, here or on another node.
        return Requeue(self._waits.seconds_to_next_look(cr.uid))

    async def _prepare(self, case: Case) -> Requeue | None:
        change = Change(
            status={"node": self._site.node, "nodeOS": self._site.os},
            labels={NODE_LABEL: self._site.label},
        )
        stored = await self._tools.status.move(case.kind, case.cr, Phase.PREPARED, change)
        await self._tools.story.tell(stored, "Prepared", f"the data mover pod runs on node {self._site.node}")
        return None

    async def _time_out(self, case: Case) -> Requeue | None:
        span = format_duration(self._limits.prepare)
        why = self._waits.last_message(case.cr.uid) or case.cr.status.message
        message = f"not prepared within {span}" + (f": {why}" if why else "")
        return await self._end(case, Phase.FAILED, message)

    async def _cancel(self, case: Case) -> Requeue | None:
        message = f"canceled while {case.view.phase}: {_who_stops(case)}"
        return await self._end(case, Phase.CANCELED, message)

    async def _await_slot(self, case: Case) -> Requeue | None:
        message = f"waiting for a free slot on node {self._site.node} (loadConcurrency {self._tools.slots.limit})"
        waiting = Waiting("WaitingForSlot", message)
        await self._tell_wait(case, waiting)
        if self._waits.is_told(case.cr.uid, waiting.reason):
            # Freeing a slot wakes the next in line.
            return None
        return Requeue(self._waits.seconds_to_next_look(case.cr.uid))

    async def _start(self, case: Case) -> Requeue | None:
        tools, cr = self._tools, case.cr
        try:
            await case.kind.confirm_volume(cr)
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if not tools.slots.take(cr.uid):
            return await self._await_slot(case)
        stored = await tools.status.move(case.kind, cr, Phase.IN_PROGRESS)
        created = cr.metadata.creation_timestamp
        if created is not None:
            tools.metrics.waited(case.kind.name, (tools.clock.now() - created).total_seconds())
        case.kind.count(stored, tools.metrics)
        await tools.story.tell(stored, "Started", "the data mover may move data now")
        return None

    async def _move_canceling(self, case: Case) -> Requeue | None:
        stored = await self._tools.status.move(case.kind, case.cr, Phase.CANCELING)
        await self._tools.story.tell(stored, "Canceling", f"{_who_stops(case)}; the data mover is to stop")
        return None

    async def _force_cancel(self, case: Case) -> Requeue | None:
        span = format_duration(self._limits.cancel)
        message = f"{_who_stops(case)}; the data mover did not stop within {span} and is removed"
        return await self._end(case, Phase.CANCELED, message)

    async def _lose(self, case: Case) -> Requeue | None:
        gone = f"data mover pod {case.cr.metadata.namespace}/{case.cr.name} is gone"
        if case.view.stop is not Stop.NONE:
            return await self._end(case, Phase.CANCELED, f"{_who_stops(case)}; {gone}")
        where = f" from node {self._site.node}"
        return await self._end(case, Phase.FAILED, f"{gone}{where}; it left no result")

    async def _give_up(self, case: Case) -> Requeue | None:
        outcome = self._read_outcome(case)
        message = outcome.message or "the data mover ended before its data path was started"
        return await self._end(case, Phase.FAILED, message)

    async def _keep_outcome(self, case: Case) -> Requeue | None:
        kind, cr = case.kind, case.cr
        outcome = await self._judge(case, self._read_outcome(case))
        if outcome.phase is Phase.COMPLETED:
            try:
                outcome = await kind.keep(cr, outcome)
            except ExposeError as e:
                outcome = Outcome(phase=Phase.FAILED, message=str(e))
        elif not _said(case):
            tail = await self._tools.logs.take_over(cr, case.pod)
            message = f"{outcome.message}; its log ends: {tail}" if tail else outcome.message
            outcome = outcome.model_copy(update={"message": message})
        outcome = outcome.model_copy(update={"kept_at": self._tools.clock.now()})
        change = Change(annotations={OUTCOME_ANNOTATION: outcome.to_annotation()})
        await self._tools.status.annotate(kind, cr, change)
        return None

    async def _finish(self, case: Case) -> Requeue | None:
        kind, cr, outcome = case.kind, case.cr, case.outcome
        if outcome is None:
            return None
        # Completing may delete the pod, and its log with it.
        await self._tools.logs.take_over(cr, case.pod)
        if outcome.phase is not Phase.COMPLETED:
            return await self._end(case, outcome.phase, outcome.message)
        try:
            waiting = await kind.complete(cr, outcome)
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if waiting is not None:
            return await self._wait_to_complete(case, outcome, waiting)
        return await self._end(case, Phase.COMPLETED, "")

    async def _wait_to_complete(self, case: Case, outcome: Outcome, waiting: Waiting) -> Requeue | None:
        """Go on waiting for a completion, or end the load as Failed once that took too long."""
        since = outcome.kept_at or self._tools.clock.now()
        if self._tools.clock.now() - since >= self._limits.resource:
            span = format_duration(self._limits.resource)
            message = f"data was moved, but not handed over within {span}: {waiting.message}"
            return await self._end(case, Phase.FAILED, message)
        await self._tell_wait(case, waiting)
        return Requeue(self._waits.seconds_to_next_look(case.cr.uid))

    async def _clean_up(self, case: Case) -> Requeue | None:
        kind, cr = case.kind, case.cr
        await self._tools.logs.take_over(cr, case.pod)
        waiting = await kind.clean_up(cr)
        if waiting is not None:
            self._log(case).debug("clean-up waits: %s", waiting.message)
            self._waits.note_step(cr.uid, waiting)
            return Requeue(self._waits.seconds_to_next_look(cr.uid))
        await self._tools.status.release(kind, cr)
        self._log(case).info("everything that was made for the load is gone")
        return None

    async def _end(self, case: Case, phase: Phase, message: str) -> Requeue | None:
        """Write the final status in one patch, then tell and count it."""
        tools, kind = self._tools, case.kind
        status: dict[str, object] = {"message": message} if message else {}
        if phase is Phase.COMPLETED and case.outcome is not None:
            status |= kind.final_status(case.outcome)
            tools.progress.finish(kind.name, case.cr.uid, case.outcome.total_bytes)
        stored = await tools.status.move(kind, case.cr, phase, Change(status=status))
        tools.slots.forget(stored.uid)
        self._waits.forget(stored.uid)
        tools.metrics.load_finished(kind.name, phase)
        kind.count(stored, tools.metrics)
        words = message or "the data is where it belongs"
        await tools.story.tell(stored, str(phase), words, warning=phase is Phase.FAILED)
        return None

    async def _tell_wait(self, case: Case, waiting: Waiting) -> None:
        """Write why the load waits where that is news."""
        tools, cr = self._tools, case.cr
        telling = self._waits.decide_telling(cr.uid, waiting)
        if not telling.message:
            return
        # After a restart the status may say it already.
        if cr.status.message != waiting.message:
            await tools.status.report(case.kind, cr, message=waiting.message)
            if telling.event:
                await tools.story.tell(cr, waiting.reason, waiting.message, warning=waiting.trouble)
        self._waits.told(cr.uid, waiting)

    def _read_outcome(self, case: Case) -> Outcome:
        """Return what the end of the case's pod means."""
        end = parse_pod_end(case.pod) if case.pod is not None else None
        if end is None:
            return Outcome(phase=Phase.FAILED, message="the data mover pod left no result")
        asked = case.view.stop is not Stop.NONE
        return decide_outcome(end, case.kind.parse_result, cancel_asked=asked)

    async def _judge(self, case: Case, outcome: Outcome) -> Outcome:
        """Return `outcome`, or Failed where the volume went away under the mover."""
        if outcome.phase is Phase.CANCELED:
            return outcome
        try:
            await case.kind.confirm_volume(case.cr)
        except ExposeError as e:
            said = f"; the data mover said: {outcome.message}" if outcome.message else ""
            return Outcome(phase=Phase.FAILED, message=f"{e}{said}")
        return outcome

    def _log(self, case: Case) -> BoundLogger:
        cr = case.cr
        return bind(
            _log,
            kind=case.kind.name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            phase=str(cr.phase),
            node=self._site.node,
        )


def _who_stops(case: Case) -> str:
    if case.cr.spec.cancel:
        return "cancel was asked for by spec.cancel"
    return "the custom resource is being deleted"


def _said(case: Case) -> bool:
    end = parse_pod_end(case.pod) if case.pod is not None else None
    return end is not None and bool(end.message)
