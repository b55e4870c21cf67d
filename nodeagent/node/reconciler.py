"""The owner's side of a load's life: each load of this node, brought forward step by step.

Knows which changes concern which load, and the order read, look, decide, act. Does not know
the rules (`nodeagent.node.lifecycle`) nor the steps (`nodeagent.node.reconciler`), and nothing about loads
that nobody accepted.

One method for each action of the life cycle.

Knows which step carries out which action. Does not know when a step is due
(`nodeagent.node.lifecycle` decides, `nodeagent.node.reconciler` calls), nor how one is done:
`nodeagent.node.expose_steps`, `nodeagent.node.data_path_steps` and `nodeagent.transfers.cleanup` do. Each may run
twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from core.errors import AgentError, ContractError
from core.kube.errors import ConflictError, NotFoundError
from core.kube.resources import PODS
from core.logs import fields
from core.models.base import JsonDict
from core.models.phases import RUNNING_PHASES, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.node.cache import TransferCache
from nodeagent.node.cancel_requests import CancelRequests
from nodeagent.node.data_path_steps import MoveSteps
from nodeagent.node.expose_steps import ExposeSteps
from nodeagent.node.lifecycle import (
    Action,
    Case,
    Observation,
    ReadCurrent,
    Site,
    Stop,
    Timeouts,
    TransferKey,
    build_case,
    decide,
    is_owned,
)
from nodeagent.node.slots import Claim
from nodeagent.node.steps import Tools
from nodeagent.runtime.tasks import Faults
from nodeagent.runtime.workqueue import Requeue, WorkQueue
from nodeagent.transfers.cleanup import CleanUp
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import PodState, belongs_to, is_ours, pod_state
from nodeagent.transfers.pending import PendingRecords

__all__ = ["Reconciler", "Steps", "Tools"]


_log = logging.getLogger(__name__)


class Steps:
    """Carries out actions."""

    def __init__(self, tools: Tools, site: Site, limits: Timeouts, *, current: ReadCurrent) -> None:
        """Work with `tools` for the agent of `site`; `current` returns a load as last seen."""
        self._tools = tools
        self._waits = PendingRecords(tools.clock)
        self._cleaner = CleanUp(tools.clock, tools.status, tools.events, self._waits, limits.resource)
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
        return self._waits.message(uid)

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._waits.forget(uid)
        self._tools.logs.forget(uid)

    async def _clean_up(self, case: Case) -> Requeue | None:
        await self._tools.logs.take_over(case.cr, case.pod)
        return await self._cleaner.step(case.kind, case.cr)


_WORKERS: Final = 16
"""Loads that are worked on at a time: a slow one stalls nobody."""


_DECISIONS: Final = 3
"""How often a load is read and decided on again after a conflict, before it has to wait."""


_REFUSED_PAUSE_SECONDS: Final = 30.0
"""After an error that trying again does not heal: rights may be given, a server mended."""


_GONE_PAUSE_SECONDS: Final = 5.0
"""Before a load is looked at again after something of it was not there."""


_UNSEEN_POD_PAUSE_SECONDS: Final = 5.0
"""Between two looks at a mover pod that no watch of ours shows."""


_NEEDS_POD: Final = RUNNING_PHASES | {Phase.PREPARED}


class _UnreadableError(AgentError):
    """The load itself cannot be read; nothing can be done about it."""


class Reconciler:
    """Carries the loads with this node's label, and takes over those whose mover runs here."""

    def __init__(
        self, tools: Tools, site: Site, *, limits: Timeouts, kinds: Sequence[Kind], cache: TransferCache
    ) -> None:
        """Work with `tools` for the agent of `site` on transfers of `kinds`, as `cache` has them."""
        self._tools = tools
        self._kinds = {kind.name: kind for kind in kinds}
        self._site = site
        self._limits = limits
        self._cancels = CancelRequests(tools.clock, limits.cancel)
        self._queue: WorkQueue[TransferKey] = WorkQueue(tools.clock, name="loads", workers=_WORKERS)
        self._caches = cache
        cache.subscribe(self)
        self._steps = Steps(tools, site, limits, current=self._caches.current)
        self._unreadable: set[str] = set()
        self._faults = Faults(_log)
        self._woken: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Work until canceled.

        Nothing is started before everything that runs already was seen: a restarted agent
        counts it first.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._caches.run(), name="load caches")
            group.create_task(self._tools.progress.run(), name="progress")
            await self._caches.wait_synced()
            self._wake_next()
            await self._queue.run(self._handle)

    def slots_changed(self) -> None:
        """Look who is next in line: the number of slots has changed."""
        self._wake_next()

    def not_synced(self) -> list[str]:
        """Return which collections were not read yet, in words."""
        return self._caches.not_synced()

    def report(self) -> JsonDict:
        """Return the node's loads and slots for the status page."""
        slots = self._tools.slots
        loads = [cr for key in self._caches.transfer_keys() if (cr := self._caches.load(key)) is not None]
        return {
            "slots": {"used": slots.used, "total": slots.limit, "waiting": slots.waiting},
            "loads": [
                {
                    "kind": cr.kind_name,
                    "namespace": cr.metadata.namespace,
                    "name": cr.name,
                    "phase": str(cr.phase),
                    "message": cr.status.message,
                    "waitsFor": self._steps.waits_for(cr.uid),
                    "progress": cr.status.progress.to_wire(),
                }
                for cr in loads
            ],
        }

    def on_transfer(self, key: TransferKey, uid: str) -> None:
        """Note what a change of a load says about slots and progress, and enqueue it."""
        cached = self._caches.raw(key)
        if cached is None or cached["metadata"]["uid"] != uid:
            self._forget(key, uid)
        cr = self._caches.load(key)
        if cr is not None:
            self._observe(self._kinds[key[0]], cr)
        self._queue.add(key)
        self._wake_next()

    def on_pod(self, key: TransferKey) -> None:
        """Enqueue the load that a mover pod belongs to."""
        self._queue.add(key)

    async def _handle(self, key: TransferKey) -> Requeue | None:
        """Bring one load one step forward; return when to look again without a change."""
        try:
            requeue = await self._decide(key)
        except _UnreadableError as e:
            await self._leave_alone(key, str(e))
            return None
        except NotFoundError as e:
            # The load itself, or an object another one removed: the next look tells.
            _log.debug("gone while it was worked on: %s", e, extra=_told(key))
            return Requeue(_GONE_PAUSE_SECONDS)
        except AgentError as e:
            if e.retry:
                raise
            if self._faults.report(key, "a step of the load failed", e, extra=_told(key)):
                await self._tell(key, PendingReason.STEP_FAILED, str(e))
                await self._show(key, str(e))
            return Requeue(_REFUSED_PAUSE_SECONDS)
        else:
            self._faults.forget(key)
            return requeue
        finally:
            self._wake_next()

    async def _decide(self, key: TransferKey) -> Requeue | None:
        """Take a step; after a conflict read and decide again."""
        for tried in range(_DECISIONS - 1):
            try:
                return await self._step(key, anew=tried > 0)
            except ConflictError as e:
                _log.debug("read and decided again: %s", e, extra=_told(key))
        return await self._step(key, anew=True)

    async def _step(self, key: TransferKey, *, anew: bool) -> Requeue | None:
        """Decide by the caches; where there is something to do, read what may be missing in them and decide again.

        `anew`: they are known to lag behind.
        """
        kind = self._kinds[key[0]]
        cached, pod = self._caches.raw(key), self._caches.pod(key)
        if cached is not None:
            case = self._build_case(kind, _parse(kind, cached), pod)
            action = decide(case.view)
            if action is Action.NOTHING:
                return self._revisit(case)
            if self._steps.rests(action, case):
                return self._steps.rest(case)
            if action is Action.KEEP_OUTCOME:
                await self._tools.progress.end_writing(case.cr.uid)
        elif pod is None or not _may_take_over(pod):
            return None
        raw = None if anew else self._caches.current(key)
        if raw is None:
            raw = await self._tools.client.read(kind.resource, key[1], key[2])
        if raw is None:
            return None
        cr = _parse(kind, raw)
        # One that an earlier load of the name left in the cache hides nothing.
        unseen = (pod is None or not belongs_to(pod, cr)) and cr.phase in _NEEDS_POD
        if unseen:
            # A cache may lag behind; a pod is missing only if the API says so.
            pod = await self._tools.client.read(PODS, key[1], key[2])
        case = self._build_case(kind, cr, pod)
        action = decide(case.view)
        if action is Action.NOTHING:
            # No watch of ours shows a mover on another node, nor a load that is not ours yet.
            soon = unseen or (cached is None and not cr.phase.final)
            return Requeue(_UNSEEN_POD_PAUSE_SECONDS) if soon else self._revisit(case)
        return await self._steps.perform(action, case)

    def _observe(self, kind: Kind, cr: Transfer) -> None:
        """Update slots and cancel requests by an observed transfer, and watch its progress while it runs."""
        owned = is_owned(cr, self._site)
        if owned:
            self._tools.slots.observe(Claim.of(cr, now=self._tools.clock.now()), cr.phase)
            self._cancels.observe(cr)
        if owned and cr.phase in RUNNING_PHASES:
            key = (kind.name, cr.metadata.namespace, cr.name)
            self._tools.progress.follow(kind, cr, lambda: self._caches.load(key))
        else:
            self._tools.progress.leave(kind.name, cr.uid)

    def _build_case(self, kind: Kind, cr: Transfer, pod: JsonDict | None) -> Case:
        """Return the case of a transfer, observed just now."""
        self._observe(kind, cr)
        seen = Observation(
            cr,
            pod,
            self._caches.departed((kind.name, cr.metadata.namespace, cr.name)),
            now=self._tools.clock.now(),
            has_slot=self._tools.slots.is_turn_of(cr.uid),
            cancel_overdue=self._cancels.is_overdue(cr),
        )
        return build_case(kind, seen, self._site, self._limits)

    def _revisit(self, case: Case) -> Requeue | None:
        """Return when a load that changes by time alone is due."""
        if case.view.ours and case.view.stop is Stop.ASKED and case.cr.phase is Phase.CANCELING:
            return Requeue(self._cancels.seconds_until_overdue(case.cr))
        return None

    def _wake_next(self) -> None:
        """Enqueue the loads whose turn it has become; show the slots."""
        slots = self._tools.slots
        claims = slots.next_claims()
        for claim in claims:
            if claim.uid not in self._woken:
                self._queue.add(claim.key)
        self._woken = frozenset(claim.uid for claim in claims)
        self._tools.metrics.slots(slots.used, slots.limit)

    async def _leave_alone(self, key: TransferKey, why: str) -> None:
        """Say once that a load cannot be read."""
        raw = self._caches.raw(key)
        if raw is None or raw["metadata"]["uid"] in self._unreadable:
            return
        self._unreadable.add(raw["metadata"]["uid"])
        _log.error("left alone: %s", why, extra=_told(key))
        await self._tell(key, "Unreadable", why)

    async def _tell(self, key: TransferKey, reason: str, why: str) -> None:
        """Tell on a load, whether it can be read or not, what keeps it from going on."""
        raw = self._caches.raw(key)
        if raw is not None:
            await self._tools.events.record_warning(raw, reason, why)

    async def _show(self, key: TransferKey, why: str) -> None:
        """Write into the status of a load what keeps it from going on; its next step takes that back."""
        kind = self._kinds[key[0]]
        try:
            cr = kind.parse(await self._tools.client.get(kind.resource, key[1], key[2]))
            if not cr.phase.final and cr.status.message != why:
                await self._tools.status.report(kind, cr, message=why, reason=PendingReason.STEP_FAILED)
        except AgentError as e:
            # It may be this very right that is missing; the Event tells it.
            _log.debug("not written on the load: %s", e, extra=_told(key))

    def _forget(self, key: TransferKey, uid: str) -> None:
        self._tools.slots.forget(uid)
        self._cancels.forget(uid)
        self._steps.forget(uid)
        self._caches.forget(key)
        self._tools.progress.leave(key[0], uid)
        self._unreadable.discard(uid)
        self._faults.forget(key)


def _may_take_over(pod: JsonDict) -> bool:
    """Whether `pod`, of a load that is another agent's, may make it this one's."""
    return is_ours(pod) and pod_state(pod) in {PodState.RUNNING, PodState.ENDED}


def _parse(kind: Kind, raw: JsonDict) -> Transfer:
    try:
        return kind.parse(raw)
    except ContractError as e:
        raise _UnreadableError(str(e)) from e


def _told(key: TransferKey) -> dict[str, object]:
    return fields(kind=key[0], namespace=key[1], name=key[2])
