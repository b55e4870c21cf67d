"""The steps while a mover may move data, and until its load is over.

Knows slots, the start, cancels, and what becomes of a mover's end. Does not know how a mover
pod comes to be (`nodeagent.node.expose_steps`), nor what is removed afterwards (`nodeagent.transfers.cleanup`).
"""

import math
from dataclasses import replace

from core.errors import ExposeError
from core.models.base import format_time
from core.models.names import CANCEL_REQUESTED_ANNOTATION, MOVER_LOST_ANNOTATION, OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.units import format_duration
from exposer.model import Pending
from exposer.pod_status import parse_pod_end
from nodeagent.node.lifecycle import Case, Stop
from nodeagent.node.mover_loss import MoverLoss, read_loss
from nodeagent.node.steps import StepBase
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import cancel_cause
from nodeagent.transfers.mover_pod import add_log_end, explain_loss
from nodeagent.transfers.outcome import Outcome, decide_outcome, has_final_message
from nodeagent.transfers.status import Change

__all__ = ["MoveSteps"]


class MoveSteps(StepBase):
    """Carries out what is due from Prepared to the final status."""

    async def await_slot(self, case: Case) -> Requeue | None:
        """Say that the node's slots are taken; end the load where its volume went away meanwhile.

        A mover that was made anew is noted: the next loss has its own time.
        """
        if self._rests(case):
            return self._rest(case)
        try:
            await case.kind.confirm_volume(case.cr)
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if loss := _unreplaced(case):
            change = Change(annotations={MOVER_LOST_ANNOTATION: loss.made_up_for().to_json()})
            await self._tools.status.annotate(case.kind, case.cr, change)
            return Requeue(0.0)
        return await self._await_slot(case)

    async def start(self, case: Case) -> Requeue | None:
        """Let the mover begin."""
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
        await tools.events.record(stored, "Started", "the data mover may move data now")
        return None

    async def move_canceling(self, case: Case) -> Requeue | None:
        """Note that the mover is to stop, and since when."""
        asked = {CANCEL_REQUESTED_ANNOTATION: format_time(self._tools.clock.now())}
        stored = await self._tools.status.move(case.kind, case.cr, Phase.CANCELING, Change(annotations=asked))
        await self._tools.events.record(stored, "Canceling", f"{cancel_cause(case.cr)}; the data mover is to stop")
        return None

    async def force_cancel(self, case: Case) -> Requeue | None:
        """End a load whose mover does not stop."""
        span = format_duration(self._limits.cancel)
        message = f"{cancel_cause(case.cr)}; the data mover did not stop within {span} and is removed"
        return await self._end(case, Phase.CANCELED, message)

    async def lose(self, case: Case) -> Requeue | None:
        """End a load whose mover pod is gone without a word."""
        gone = f"data mover pod {case.cr.metadata.namespace}/{case.cr.name} is gone"
        if case.view.stop is not Stop.NONE:
            return await self._end(case, Phase.CANCELED, f"{cancel_cause(case.cr)}; {gone}")
        why = explain_loss(case.departed) if case.departed is not None else ""
        message = f"{gone} from node {self._site.node}; it left no result" + (f": {why}" if why else "")
        return await self._end(case, Phase.FAILED, message)

    async def give_up(self, case: Case) -> Requeue | None:
        """End a load whose mover ended by itself before it was to begin."""
        outcome = self._read_outcome(case)
        message = outcome.message or "the data mover ended before its data path was started"
        return await self._end(case, Phase.FAILED, await self._with_log_end(case, message))

    async def keep_outcome(self, case: Case) -> Requeue | None:
        """Write down how the mover ended, before anything of it is touched."""
        kind, cr = case.kind, case.cr
        outcome = await self._judge(case, self._read_outcome(case))
        if outcome.phase is Phase.COMPLETED:
            try:
                outcome = await kind.keep(cr, outcome)
            except ExposeError as e:
                outcome = Outcome(phase=Phase.FAILED, message=str(e))
        elif outcome.phase is Phase.FAILED:
            outcome = replace(outcome, message=await self._with_log_end(case, outcome.message))
        outcome = replace(outcome, recorded_at=self._tools.clock.now())
        change = Change(annotations={OUTCOME_ANNOTATION: outcome.to_json()})
        await self._tools.status.annotate(kind, cr, change)
        return None

    async def finish(self, case: Case) -> Requeue | None:
        """Complete what the kept outcome asks for, then write the final status."""
        kind, cr, outcome = case.kind, case.cr, case.outcome
        if outcome is None:
            return None
        # Completing may delete the pod, and its log with it.
        await self._tools.logs.take_over(cr, case.pod)
        if outcome.phase is not Phase.COMPLETED:
            return await self._end(case, outcome.phase, outcome.message)
        try:
            waiting = await self._judged(kind.complete(cr, outcome))
        except ExposeError as e:
            return await self._end(case, Phase.FAILED, str(e))
        if waiting is not None:
            return await self._wait_to_complete(case, outcome, waiting)
        return await self._end(case, Phase.COMPLETED, "")

    async def _with_log_end(self, case: Case, message: str) -> str:
        """Return `message` and, where the mover had no last words, the end of its log."""
        tail = await self._tools.logs.take_over(case.cr, case.pod)
        end = parse_pod_end(case.pod) if case.pod is not None else None
        return message if end is not None and has_final_message(end) else add_log_end(message, tail)

    def _rests(self, case: Case) -> bool:
        """Whether a load that waits for a slot needs no look: it has just begun to, or had one lately."""
        if _unreplaced(case):
            return False
        uid, waiting = case.cr.uid, self._slot_wait()
        if self._waits.reason(uid) != waiting.reason:
            self._waits.decide_report(uid, waiting)
            self._waits.pause_checks(uid, self._waits.seconds_to_report(uid))
        return self._waits.paused_seconds(uid) > 0

    def _rest(self, case: Case) -> Requeue | None:
        """Return when to look again at a load that waits for a slot, None for not before it is its turn."""
        seconds = self._waits.paused_seconds(case.cr.uid)
        return None if math.isinf(seconds) else Requeue(seconds)

    async def _await_slot(self, case: Case) -> Requeue | None:
        uid, waiting = case.cr.uid, self._slot_wait()
        await self._tell_wait(case, waiting)
        if self._waits.is_reported(uid, waiting.reason):
            self._rest_until_slot(case)
        else:
            self._waits.pause_checks(uid, self._waits.seconds_to_report(uid))
        return self._rest(case)

    async def _wait_to_complete(self, case: Case, outcome: Outcome, waiting: Pending) -> Requeue | None:
        """Go on waiting for a completion, or end the load as Failed once that took too long."""
        since, span = outcome.recorded_at or self._tools.clock.now(), self._operation_span(case)
        if self._tools.clock.now() - since >= span:
            message = f"data was moved, but not handed over within {format_duration(span)}: {waiting.message}"
            return await self._end(case, Phase.FAILED, message)
        await self._tell_wait(case, waiting)
        return Requeue(self._waits.count_check(case.cr.uid))

    def _read_outcome(self, case: Case) -> Outcome:
        """Return what the end of the case's pod means."""
        end = parse_pod_end(case.pod) if case.pod is not None else None
        if end is None:
            return Outcome(phase=Phase.FAILED, message="the data mover pod left no result")
        requested = case.view.stop is not Stop.NONE
        return decide_outcome(end, case.kind.parse_result, cancel_requested=requested)

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


def _unreplaced(case: Case) -> MoverLoss | None:
    """Return the losses of a load whose mover is there again, where that is not noted yet."""
    loss = read_loss(case.cr)
    return None if loss is None or loss.replaced else loss
