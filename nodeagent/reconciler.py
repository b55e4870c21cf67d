"""The owner's side of a load's life: each load of this node, brought forward step by step.

Knows which changes concern which load, and the order read, look, decide, act. Does not know
the rules (`nodeagent.lifecycle`) nor the steps (`nodeagent.steps`), and nothing about loads
that nobody accepted.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from core.errors import AgentError, ContractError
from core.kube.client import Selection
from core.kube.errors import ConflictError, NotFoundError
from core.kube.resources import PODS
from core.logs import fields
from core.models.base import JsonDict
from core.models.loads import Load
from core.models.names import NODE_LABEL, OWNER_UID_LABEL
from core.models.phases import Phase
from nodeagent.faults import Faults
from nodeagent.informer import Informer
from nodeagent.kinds.base import Kind
from nodeagent.lifecycle import Action, PodState, Stop, decide
from nodeagent.queue import Requeue, WorkQueue
from nodeagent.steps import Steps, Tools
from nodeagent.view import Case, Limits, LoadKey, Site, Viewer, pod_state, trim_load, trim_pod

__all__ = ["Reconciler"]

_log = logging.getLogger(__name__)

_WORKERS: Final = 32
"""Loads that are worked on at a time: a slow one stalls nobody."""

_DECISIONS: Final = 3
"""How often a load is read and decided on again after a conflict, before it has to wait."""

_REFUSED_PAUSE_SECONDS: Final = 30.0
"""After an error that trying again does not heal: rights may be given, a server mended."""

_GONE_PAUSE_SECONDS: Final = 5.0
"""Before a load is looked at again after something of it was not there."""

_UNSEEN_POD_PAUSE_SECONDS: Final = 5.0
"""Between two looks at a mover pod that no watch of ours shows."""

_RUNNING: Final = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})
_NEEDS_POD: Final = _RUNNING | {Phase.PREPARED}


class _UnreadableError(AgentError):
    """The load itself cannot be read; nothing can be done about it."""


class Reconciler:
    """Carries the loads with this node's label, and takes over those whose mover runs here."""

    def __init__(self, tools: Tools, site: Site, *, limits: Limits, kinds: Sequence[Kind]) -> None:
        """Work with `tools` for the agent of `site` on loads of `kinds`."""
        self._tools = tools
        self._site = site
        self._kinds = {kind.name: kind for kind in kinds}
        self._viewer = Viewer(tools.clock, site, limits, tools.slots)
        self._steps = Steps(tools, site, limits)
        self._queue: WorkQueue[LoadKey] = WorkQueue(tools.clock, name="loads", workers=_WORKERS)
        self._loads = {kind.name: self._load_informer(kind) for kind in kinds}
        self._pods = self._pod_informer()
        self._unreadable: set[str] = set()
        self._faults = Faults(_log)
        self._woken: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Work until canceled.

        Nothing is started before everything that runs already was seen: a restarted agent
        counts it first.
        """
        informers = [*self._loads.values(), self._pods]
        async with asyncio.TaskGroup() as group:
            for informer in informers:
                group.create_task(informer.run(), name="informer")
            group.create_task(self._tools.progress.run(), name="progress")
            for informer in informers:
                await informer.synced.wait()
            self._wake_next()
            await self._queue.run(self._handle)

    def slots_changed(self) -> None:
        """Look who is next in line: the number of slots has changed."""
        self._wake_next()

    def not_synced(self) -> list[str]:
        """Return which collections were not read yet, in words."""
        waiting = [f"{name}s" for name, informer in self._loads.items() if not informer.synced.is_set()]
        return waiting if self._pods.synced.is_set() else [*waiting, "mover pods"]

    def report(self) -> JsonDict:
        """Return the node's loads and slots for the status page."""
        slots = self._tools.slots
        keys = [
            (name, raw["metadata"]["namespace"], raw["metadata"]["name"])
            for name, informer in self._loads.items()
            for raw in informer.items()
        ]
        return {
            "slots": {"used": slots.used, "total": slots.limit, "waiting": slots.waiting},
            "loads": [
                {
                    "kind": cr.kind_name,
                    "namespace": cr.metadata.namespace,
                    "name": cr.name,
                    "phase": str(cr.phase),
                    "message": cr.status.message,
                    "progress": cr.status.progress.model_dump(by_alias=True),
                }
                for cr in map(self._cached_load, keys)
                if cr is not None
            ],
        }

    def _load_informer(self, kind: Kind) -> Informer:
        selection = Selection(
            kind.resource,
            self._site.namespace,
            label_selector=f"{NODE_LABEL}={self._site.label}",
        )
        return Informer(
            self._tools.client,
            selection,
            clock=self._tools.clock,
            trim=trim_load,
            on_change=lambda raw: self._on_load(kind, raw),
        )

    def _pod_informer(self) -> Informer:
        selection = Selection(
            PODS,
            self._site.namespace,
            label_selector=OWNER_UID_LABEL,
            field_selector=f"spec.nodeName={self._site.node}",
        )
        return Informer(
            self._tools.client,
            selection,
            clock=self._tools.clock,
            trim=trim_pod,
            on_change=self._on_pod,
        )

    def _on_load(self, kind: Kind, raw: JsonDict) -> None:
        """Note what a change of a load says about slots and progress, and enqueue it."""
        meta = raw["metadata"]
        key = (kind.name, meta["namespace"], meta["name"])
        cached = self._loads[kind.name].get(meta["namespace"], meta["name"])
        if cached is None or cached["metadata"]["uid"] != meta["uid"]:
            self._forget(key, meta["uid"])
        cr = self._cached_load(key)
        if cr is not None:
            self._look(kind, cr)
        self._queue.add(key)
        self._wake_next()

    def _on_pod(self, pod: JsonDict) -> None:
        """Enqueue the load that a mover pod belongs to."""
        for owner in pod["metadata"].get("ownerReferences") or []:
            if owner["kind"] in self._kinds:
                self._queue.add((owner["kind"], pod["metadata"]["namespace"], owner["name"]))

    async def _handle(self, key: LoadKey) -> Requeue | None:
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
            if self._faults.tell(key, "a step of the load failed", e, extra=_told(key)):
                await self._tell(key, "StepFailed", str(e))
            return Requeue(_REFUSED_PAUSE_SECONDS)
        else:
            self._faults.forget(key)
            return requeue
        finally:
            self._wake_next()

    async def _decide(self, key: LoadKey) -> Requeue | None:
        """Take a step; after a conflict read and decide again."""
        for _ in range(_DECISIONS - 1):
            try:
                return await self._step(key)
            except ConflictError as e:
                _log.debug("read and decided again: %s", e, extra=_told(key))
        return await self._step(key)

    async def _step(self, key: LoadKey) -> Requeue | None:
        """Decide by the caches; where there is something to do, read and decide again."""
        kind = self._kinds[key[0]]
        cached = self._loads[kind.name].get(key[1], key[2])
        pod = self._pods.get(key[1], key[2])
        if cached is not None:
            case = self._look(kind, _parse(kind, cached), pod)
            if decide(case.view) is Action.NOTHING:
                return self._revisit(case)
        elif pod_state(pod) not in {PodState.RUNNING, PodState.ENDED}:
            return None
        raw = await self._tools.client.read(kind.resource, key[1], key[2])
        if raw is None:
            return None
        cr = _parse(kind, raw)
        unseen = pod is None and cr.phase in _NEEDS_POD
        if unseen:
            # A cache may lag behind; a pod is missing only if the API says so.
            pod = await self._tools.client.read(PODS, key[1], key[2])
        case = self._look(kind, cr, pod)
        action = decide(case.view)
        if action is Action.NOTHING:
            # No watch of ours shows the mover of a peer, or one on another node.
            return Requeue(_UNSEEN_POD_PAUSE_SECONDS) if unseen else self._revisit(case)
        return await self._steps.perform(action, case)

    def _look(self, kind: Kind, cr: Load, pod: JsonDict | None = None) -> Case:
        """Return the case of a load, having its progress followed while it runs."""
        case = self._viewer.look(kind, cr, pod)
        if case.view.ours and cr.phase in _RUNNING:
            key = case.key
            self._tools.progress.follow(kind, cr, lambda: self._cached_load(key))
        else:
            self._tools.progress.leave(kind.name, cr.uid)
        return case

    def _revisit(self, case: Case) -> Requeue | None:
        """Return when a load that changes by time alone is due."""
        if case.view.ours and case.view.stop is Stop.ASKED and case.cr.phase is Phase.CANCELING:
            return Requeue(self._viewer.seconds_until_overdue(case.cr))
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

    async def _leave_alone(self, key: LoadKey, why: str) -> None:
        """Say once that a load cannot be read."""
        raw = self._loads[key[0]].get(key[1], key[2])
        if raw is None or raw["metadata"]["uid"] in self._unreadable:
            return
        self._unreadable.add(raw["metadata"]["uid"])
        _log.error("left alone: %s", why, extra=_told(key))
        await self._tell(key, "Unreadable", why)

    async def _tell(self, key: LoadKey, reason: str, why: str) -> None:
        """Tell on a load, whether it can be read or not, what keeps it from going on."""
        raw = self._loads[key[0]].get(key[1], key[2])
        if raw is not None:
            await self._tools.story.tell_trouble(raw, reason, why)

    def _cached_load(self, key: LoadKey) -> Load | None:
        """Return a load of this node as last seen.

        None where there is none, or none that can be read.
        """
        raw = self._loads[key[0]].get(key[1], key[2])
        try:
            return None if raw is None else self._kinds[key[0]].parse(raw)
        except ContractError:
            # Handling the key says so, once.
            return None

    def _forget(self, key: LoadKey, uid: str) -> None:
        self._viewer.forget(uid)
        self._steps.forget(uid)
        self._tools.progress.leave(key[0], uid)
        self._unreadable.discard(uid)
        self._faults.forget(key)


def _parse(kind: Kind, raw: JsonDict) -> Load:
    try:
        return kind.parse(raw)
    except ContractError as e:
        raise _UnreadableError(str(e)) from e


def _told(key: LoadKey) -> dict[str, object]:
    return fields(kind=key[0], namespace=key[1], name=key[2])
