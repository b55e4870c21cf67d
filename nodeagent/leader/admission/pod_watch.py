"""Watches of the workload pods that pending transfers depend on.

One watch covers each namespace with such a pod. Of a pod only what decides whether one of its volumes
can be restored is compared: UID, node, phase and the state of `restore-wait`. A change makes the pod's
transfers due, and their check reads the pod itself.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import PODS
from core.kube.types import Pod
from exposer.workload import describe_restore_wait
from nodeagent.runtime.informer import Informer

__all__ = ["PodKey", "PodWatch"]

_log = logging.getLogger(__name__)

PodKey = tuple[str, str]
"""Namespace and name of a pod."""


class _Pod(NamedTuple):
    """What is kept of a pod: its key, and what decides whether a volume of it can be restored now."""

    key: PodKey
    state: object


@dataclass(frozen=True)
class _Watched:
    """The informer of one namespace, and the task that runs it."""

    informer: Informer[_Pod]
    task: asyncio.Task[None]


class PodWatch:
    """One watch for each namespace with a pod that is followed."""

    def __init__(self, client: KubeClient, clock: Clock, *, on_change: Callable[[], None]) -> None:
        """Watch through `client`; `on_change` is called whenever `take_changed` has something to return."""
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._followers: Counter[PodKey] = Counter()
        self._states: dict[PodKey, object] = {}
        self._changed: set[PodKey] = set()
        self._watched: dict[str, _Watched] = {}
        self._wanted_changed = asyncio.Event()

    async def run(self) -> None:
        """Keep one watch for each namespace with a followed pod, until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wanted_changed.clear()
                wanted = {namespace for namespace, _ in self._followers}
                for namespace in self._watched.keys() - wanted:
                    self._watched.pop(namespace).task.cancel()
                for namespace in wanted - self._watched.keys():
                    informer = self._build_informer(namespace)
                    task = group.create_task(
                        informer.run_despite_rejections(partial(_warn, namespace)), name=f"pods of {namespace}"
                    )
                    self._watched[namespace] = _Watched(informer, task)
                await self._wanted_changed.wait()

    def follow(self, pod: PodKey) -> None:
        """Observe the changes of `pod`, until `leave` was called as often."""
        self._followers[pod] += 1
        self._wanted_changed.set()

    def leave(self, pod: PodKey) -> None:
        """Undo one call of `follow`."""
        self._followers[pod] -= 1
        if not self._followers[pod]:
            del self._followers[pod]
            self._states.pop(pod, None)
            self._changed.discard(pod)
            self._wanted_changed.set()

    def is_synced(self, pod: PodKey) -> bool:
        """Return whether changes of `pod` are observed, so that it need not be polled."""
        watched = self._watched.get(pod[0])
        return pod in self._followers and watched is not None and watched.informer.synced.is_set()

    def take_changed(self) -> set[PodKey]:
        """Return the followed pods that changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def _build_informer(self, namespace: str) -> Informer[_Pod]:
        selection = Selection(PODS, namespace)
        return Informer(self._client, selection, clock=self._clock, trim=_trim, on_change=self._on_pod)

    def _on_pod(self, pod: _Pod) -> None:
        key = pod.key
        watched = self._watched.get(key[0])
        if key not in self._followers or watched is None:
            return
        # A deletion repeats the last state.
        gone = watched.informer.get(*key) is None
        state = None if gone else pod.state
        if key in self._states and self._states[key] == state:
            return
        self._states[key] = state
        self._changed.add(key)
        self._on_change()


def _warn(namespace: str, error: KubeError) -> None:
    _log.warning("the pods of namespace %s cannot be watched: %s", namespace, error)


def _trim(pod: Pod) -> _Pod:
    meta, status = pod["metadata"], pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName", "")
    state = (meta["uid"], node, status.get("phase", ""), describe_restore_wait(pod), "deletionTimestamp" in meta)
    return _Pod((meta["namespace"], meta["name"]), state)
