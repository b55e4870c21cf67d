"""Finds objects whose load is gone, and has them removed: the dispatcher's broom.

Knows which owners exist, and when to look. Does not know the objects (`exposer.leaked_objects`). A load
that is there, final or not, is its agent's or the orphan keeper's business as long as it
carries its finalizer; this is for loads that were deleted by force.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import REPOSITORY_TYPE_LABEL
from exposer.leaked_objects import LeakedObjects, delete_leaked_objects, list_leaked_objects
from nodeagent.leader.index import Entry
from nodeagent.runtime.tasks import Faults

__all__ = ["GarbageCollector", "find_leaked"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
"""Between looks at what is in memory; they cost no request."""

_SWEEP_SECONDS: Final = 600.0
"""Between sweeps without a reason: four lists each."""

_AGAIN_SECONDS: Final = 10.0
"""Between sweeps while something is left, and at least after a reason for one."""

_SETTLED_SECONDS: Final = 30.0
"""How long an owner must have been seen gone: the cache of loads may lag behind."""


class GarbageCollector:
    """Sweeps one namespace while this agent leads."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        loads: Callable[[], Iterable[Entry]],
        check_leading: Callable[[], None],
    ) -> None:
        """Sweep what belongs to none of `loads`; `check_leading` raises unless writing is allowed."""
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._loads = loads
        self._check_leading = check_leading
        self._seen: dict[str, Entry] = {}
        self._gone_since_seconds: dict[str, float] = {}
        self._told: dict[str, str] = {}
        self._faults = Faults(_log)
        self._last_error = ""

    def report(self) -> JsonDict:
        """Return for the status page of how many vanished loads something is left, and what keeps it."""
        return {
            "vanishedLoads": len(self._gone_since_seconds),
            "waitsFor": sorted(set(self._told.values())),
            "lastError": self._last_error,
        }

    async def run(self) -> None:
        """Sweep until canceled: at first, now and then, and soon after a load vanished."""
        due_at_seconds = self._clock.monotonic()
        while True:
            if self._note_vanished():
                due_at_seconds = min(due_at_seconds, self._clock.monotonic() + _AGAIN_SECONDS)
            if self._clock.monotonic() >= due_at_seconds:
                pause_seconds = _AGAIN_SECONDS
                try:
                    pause_seconds = _AGAIN_SECONDS if await self._sweep() else _SWEEP_SECONDS
                except AgentError as e:
                    self._last_error = str(e)
                    _log.warning("orphaned objects could not be looked for: %s", e)
                due_at_seconds = self._clock.monotonic() + pause_seconds
            await self._clock.sleep(_LOOK_SECONDS)

    def _note_vanished(self) -> bool:
        """Return whether a load went since the last look for which something may be left."""
        now = {entry.uid: entry for entry in self._loads()}
        vanished = find_leaked(self._seen, now)
        self._seen = now
        return vanished

    async def _sweep(self) -> bool:
        """Take the next step for every owner that is gone; return whether to come back soon."""
        alive = {entry.uid for entry in self._loads() if entry.finalizer or not entry.phase.final}
        found = await list_leaked_objects(self._client, self._namespace)
        orphans = [left for uid, left in found.items() if uid not in alive and not _of_repository(left)]
        self._gone_since_seconds = {
            left.uid: self._gone_since_seconds.get(left.uid, self._clock.monotonic()) for left in orphans
        }
        self._told = {uid: told for uid, told in self._told.items() if uid in self._gone_since_seconds}
        for left in orphans:
            if self._clock.monotonic() - self._gone_since_seconds[left.uid] >= _SETTLED_SECONDS:
                await self._remove(left)
        return bool(orphans)

    async def _remove(self, left: LeakedObjects) -> None:
        self._check_leading()
        told = fields(namespace=self._namespace, uid=left.uid)
        try:
            waiting = await delete_leaked_objects(self._client, left)
        except AgentError as e:
            # One that cannot be removed holds up no other.
            waiting = self._last_error = str(e)
        except Exception as e:  # noqa: BLE001 - logged with its traceback; the sweep goes on
            # Nor does one that brings out a fault of ours, and it ends no dispatcher.
            waiting = self._last_error = repr(e)
            self._faults.report(left.uid, "a step of the sweep failed", e, extra=told)
        said = waiting or "all of it is gone"
        if self._told.get(left.uid) != said:
            self._told[left.uid] = said
            _log.warning("objects of a load that is gone are being removed: %s", said, extra=told)


def find_leaked(before: dict[str, Entry], now: dict[str, Entry]) -> bool:
    """Whether a load is gone for which something may be left: it was somebody's, and not released."""
    return any(
        uid not in now and entry.node_label and (entry.finalizer or not entry.phase.final)
        for uid, entry in before.items()
    )


def _of_repository(left: LeakedObjects) -> bool:
    """Whether the owner is a BackupRepository, whose init pod goes with it by its owner reference."""
    return any(_is_init_pod(pod) for pod in left.of(PODS))


def _is_init_pod(pod: JsonDict) -> bool:
    return REPOSITORY_TYPE_LABEL in (pod["metadata"].get("labels") or {})
