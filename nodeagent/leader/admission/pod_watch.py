"""Loads that wait for a pod of somebody else's: woken when that pod changes.

Knows the pods of a namespace for as long as a load waits for one of them, by UID, node, phase
and the state of `restore-wait`. Does not know what a load makes of its pod: it is looked at
again, and reads the pod then (`nodeagent.leader.admission.examiner`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import PODS
from core.models.base import JsonDict
from exposer.workload import RESTORE_WAIT
from nodeagent.runtime.informer import Informer

__all__ = ["Place", "PodWatch"]

_log = logging.getLogger(__name__)

Place = tuple[str, str]
"""Where a pod is: namespace and name."""


class _Pod(NamedTuple):
    """What is kept of a pod: where it is, and what decides whether a volume of it can be filled now."""

    place: Place
    state: object


@dataclass(frozen=True)
class _Watched:
    """One namespace that is followed."""

    informer: Informer[_Pod]
    task: asyncio.Task[None]


class PodWatch:
    """One watch for each namespace with a pod that a load waits for."""

    def __init__(self, client: KubeClient, clock: Clock, *, on_change: Callable[[], None]) -> None:
        """Watch through `client`; `on_change` is called when there is somebody to wake."""
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._awaited: dict[str, Place] = {}
        self._loads_of: dict[Place, set[str]] = {}
        self._states: dict[Place, object] = {}
        self._woken: set[str] = set()
        self._watched: dict[str, _Watched] = {}
        self._wanted_changed = asyncio.Event()

    async def run(self) -> None:
        """Keep one watch for each namespace that is waited for, until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wanted_changed.clear()
                wanted = {namespace for namespace, _ in self._loads_of}
                for namespace in self._watched.keys() - wanted:
                    self._watched.pop(namespace).task.cancel()
                for namespace in wanted - self._watched.keys():
                    informer = self._build_informer(namespace)
                    task = group.create_task(
                        informer.run_despite_rejections(partial(_warn, namespace)), name=f"pods of {namespace}"
                    )
                    self._watched[namespace] = _Watched(informer, task)
                await self._wanted_changed.wait()

    def expect(self, uid: str, place: Place) -> None:
        """Wake the load of that uid whenever the pod at `place` changes."""
        if self._awaited.get(uid) == place:
            return
        self.leave(uid)
        self._awaited[uid] = place
        self._loads_of.setdefault(place, set()).add(uid)
        self._wanted_changed.set()

    def leave(self, uid: str) -> None:
        """Wake the load of that uid no more."""
        place = self._awaited.pop(uid, None)
        self._woken.discard(uid)
        if place is None:
            return
        self._loads_of[place].discard(uid)
        if not self._loads_of[place]:
            del self._loads_of[place]
            self._states.pop(place, None)
            self._wanted_changed.set()

    def follows(self, uid: str) -> bool:
        """Whether the pod that the load of that uid waits for is watched, so that nobody need ask for it."""
        place = self._awaited.get(uid)
        watched = self._watched.get(place[0]) if place is not None else None
        return watched is not None and watched.informer.synced.is_set()

    def take_woken(self) -> set[str]:
        """Return the loads whose pods changed since the last call."""
        woken, self._woken = self._woken, set()
        return woken

    def _build_informer(self, namespace: str) -> Informer[_Pod]:
        selection = Selection(PODS, namespace)
        return Informer(self._client, selection, clock=self._clock, trim=_trim, on_change=self._on_pod)

    def _on_pod(self, pod: _Pod) -> None:
        place = pod.place
        loads = self._loads_of.get(place)
        watched = self._watched.get(place[0])
        if loads is None or watched is None:
            return
        # A deletion tells the last state once more.
        gone = watched.informer.get(*place) is None
        state = None if gone else pod.state
        if place in self._states and self._states[place] == state:
            return
        self._states[place] = state
        self._woken |= loads
        self._on_change()


def _warn(namespace: str, error: KubeError) -> None:
    _log.warning("the pods of namespace %s cannot be watched: %s", namespace, error)


def _trim(pod: JsonDict) -> _Pod:
    meta, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("initContainerStatuses") or []
    waits = any(c["name"] == RESTORE_WAIT and "running" in (c.get("state") or {}) for c in containers)
    node = (pod.get("spec") or {}).get("nodeName", "")
    state = (meta["uid"], node, status.get("phase", ""), waits, "deletionTimestamp" in meta)
    return _Pod((meta["namespace"], meta["name"]), state)
