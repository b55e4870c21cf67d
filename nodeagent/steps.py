"""One method for each action of the life cycle.

Knows which step carries out which action. Does not know when a step is due
(`nodeagent.lifecycle` decides, `nodeagent.reconciler` calls), nor how one is done:
`nodeagent.steps_expose`, `nodeagent.steps_move` and `nodeagent.transfers.cleanup` do. Each may run twice.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from core.logs import fields
from nodeagent.lifecycle import Action
from nodeagent.runtime.workqueue import Requeue
from nodeagent.step_base import Tools
from nodeagent.steps_expose import ExposeSteps
from nodeagent.steps_move import MoveSteps
from nodeagent.transfers.cleanup import CleanUp
from nodeagent.transfers.pending import Waits
from nodeagent.view import Case, Limits, ReadCurrent, Site

__all__ = ["Steps", "Tools"]

_log = logging.getLogger(__name__)


class Steps:
    """Carries out actions."""

    def __init__(self, tools: Tools, site: Site, limits: Limits, *, current: ReadCurrent) -> None:
        """Work with `tools` for the agent of `site`; `current` returns a load as last seen."""
        self._tools = tools
        self._waits = Waits(tools.clock)
        self._cleaner = CleanUp(tools.clock, tools.status, tools.story, self._waits, limits.resource)
        expose = ExposeSteps(tools, site, limits, waits=self._waits, current=current)
        self._move = move = MoveSteps(tools, site, limits, waits=self._waits)
        self._by_action: Mapping[Action, Callable[[Case], Awaitable[Requeue | None]]] = {
            Action.EXPOSE: expose.expose,
            Action.REMAKE: expose.remake,
            Action.TAKE_OVER: expose.prepare,
            Action.PREPARE: expose.prepare,
            Action.TIME_OUT: expose.time_out,
            Action.CANCEL: expose.cancel,
            Action.AWAIT_SLOT: move.await_slot,
            Action.START: move.start,
            Action.MOVE_CANCELING: move.move_canceling,
            Action.FORCE_CANCEL: move.force_cancel,
            Action.LOSE: move.lose,
            Action.GIVE_UP: move.give_up,
            Action.KEEP_OUTCOME: move.keep_outcome,
            Action.FINISH: move.finish,
            Action.CLEAN_UP: self._clean_up,
        }

    async def perform(self, action: Action, case: Case) -> Requeue | None:
        """Carry out `action`; return when to look at the load again without a change.

        Raises:
            KubeError: the API server refused; after a ConflictError read and decide again.
        """
        meta = case.cr.metadata
        told = fields(kind=case.kind.name, namespace=meta.namespace, name=meta.name, uid=meta.uid)
        _log.debug("next step: %s", action.name, extra=told)
        return await self._by_action[action](case)

    def rests(self, action: Action, case: Case) -> bool:
        """Whether nothing is gained by reading the load anew and carrying `action` out."""
        return action is Action.AWAIT_SLOT and self._move.rests(case)

    def rest(self, case: Case) -> Requeue | None:
        """Return when a load that rests is to be looked at again without a change."""
        return self._move.rest(case)

    def waits_for(self, uid: str) -> str:
        """Return what the load of that uid, or the clean-up behind it, waits for; empty where nothing is known."""
        return self._waits.last_message(uid)

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._waits.forget(uid)
        self._tools.logs.forget(uid)

    async def _clean_up(self, case: Case) -> Requeue | None:
        await self._tools.logs.take_over(case.cr, case.pod)
        return await self._cleaner.step(case.kind, case.cr)
