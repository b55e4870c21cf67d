"""Garbage collection of leaked objects: expose objects of transfers that were force-deleted."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from core.clock import Backoff
from core.errors import AgentError
from core.kube.resources import PODS
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import REPOSITORY_TYPE_LABEL, STORAGE_LOCATION_LABEL
from exposer.leaked_objects import LeakedObjects, delete_leaked_objects, list_leaked_objects
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.runtime.workqueue import Faults

_log = logging.getLogger(__name__)

_SCAN_SECONDS: Final = 5.0
"""Between scans of the index; they cost no request."""

_COLLECT_SECONDS: Final = 600.0
"""Between collections without a cause; each makes seven list requests, with copies nine."""

_AGAIN_SECONDS: Final = 10.0
"""Between collections while leaked objects exist, and until the first one after a deletion."""

_AGAIN: Final = Backoff(_AGAIN_SECONDS, limit_seconds=60.0)
"""The same while nothing changes, such as for days because of a finalizer: some lists are of the whole cluster."""

_SETTLED_SECONDS: Final = 30.0
"""How long an owner must be missing: the index may be stale."""


class GarbageCollector:
    """Collects leaked objects in one namespace while this agent is the leader."""

    def __init__(self, cluster: Cluster, rules: DispatchRules, *, transfers: Callable[[], Iterable[Entry]]) -> None:
        """Delete the objects that belong to none of the `transfers` of the index, which is called before each time."""
        self._cluster = cluster
        self._clock = cluster.clock
        self._rules = rules
        self._transfers = transfers
        self._seen: dict[str, Entry] = {}
        self._missing_since_seconds: dict[str, float] = {}
        self._logged: dict[str, str] = {}
        self._faults = Faults(_log)
        self._last_error = ""

    def report(self) -> JsonDict:
        """Return for the status page: transfers with leaked objects, and what blocks their deletion."""
        return {
            "deletedTransfers": len(self._missing_since_seconds),
            "pendingMessages": sorted(set(self._logged.values())),
            "lastError": self._last_error,
        }

    async def run(self) -> None:
        """Collect until canceled: at the start, every ten minutes, and soon after a transfer was deleted."""
        due_at_seconds, blocked = self._clock.monotonic(), 1
        while True:
            if self._observe_deletions():
                due_at_seconds = min(due_at_seconds, self._clock.monotonic() + _AGAIN_SECONDS)
            if self._clock.monotonic() >= due_at_seconds:
                pause_seconds, before = _AGAIN_SECONDS, self._logged
                try:
                    left = await self._collect()
                    blocked = blocked + 1 if before == self._logged and left == len(before) else 1
                    pause_seconds = _AGAIN.seconds_after(blocked) if left else _COLLECT_SECONDS
                except Exception as e:  # noqa: BLE001 - a bug that one object triggers must not stop every leader in turn
                    known = e if isinstance(e, AgentError) else None
                    self._last_error = str(known or repr(e))
                    level = logging.WARNING if known else logging.ERROR
                    self._faults.report("", "garbage collection failed, will retry", e, level=level)
                    # A missing permission is not granted within seconds, and each attempt lists all objects again.
                    pause_seconds = _COLLECT_SECONDS if known and not known.retry else _AGAIN_SECONDS
                else:
                    self._faults.forget("")
                due_at_seconds = self._clock.monotonic() + pause_seconds
            await self._clock.sleep(_SCAN_SECONDS)

    def _observe_deletions(self) -> bool:
        """Return whether a transfer that may have leaked objects was deleted since the last scan."""
        before, self._seen = self._seen, {entry.uid: entry for entry in self._transfers()}
        return may_have_leaked(before, self._seen)

    async def _collect(self) -> int:
        """Take the next deletion step for every missing owner; return how many have leaked objects left."""
        transfers = list(self._transfers())
        alive = {entry.uid for entry in transfers if entry.finalizer or not entry.phase.final}
        config = self._rules.config()
        copies = bool(config.copied_secrets or config.copied_config_maps)
        found = await list_leaked_objects(self._cluster.client, self._rules.namespace, copies=copies)
        for uid in {entry.uid for entry in transfers} & found.keys():
            found[uid] = replace(found[uid], bases=[])
        leaked = [left for uid, left in found.items() if uid not in alive and left and not _of_repository(left)]
        self._missing_since_seconds = {
            left.uid: self._missing_since_seconds.get(left.uid, self._clock.monotonic()) for left in leaked
        }
        self._logged = {uid: text for uid, text in self._logged.items() if uid in self._missing_since_seconds}
        for left in leaked:
            if self._clock.monotonic() - self._missing_since_seconds[left.uid] >= _SETTLED_SECONDS:
                await self._delete(left)
        return len(leaked)

    async def _delete(self, left: LeakedObjects) -> None:
        self._cluster.check_leading()
        log_fields = fields(namespace=self._rules.namespace, uid=left.uid)
        try:
            blocked = await delete_leaked_objects(self._cluster.client, left)
        except Exception as e:  # noqa: BLE001 - one owner must not block the others, nor a bug stop the dispatcher
            known = isinstance(e, AgentError)
            blocked = self._last_error = str(e) if known else repr(e)
            if not known:
                self._faults.report(left.uid, "garbage collection of one transfer failed", e, extra=log_fields)
        state = blocked or "all deleted"
        if self._logged.get(left.uid) != state:
            self._logged[left.uid] = state
            _log.warning("deleting leaked objects of a deleted transfer: %s", state, extra=log_fields)


def may_have_leaked(before: dict[str, Entry], now: dict[str, Entry]) -> bool:
    """Return whether a missing transfer may have leaked objects: it had an agent, and its cleanup was not done."""
    missing = (entry for uid, entry in before.items() if uid not in now)
    return any(entry.node_label and (entry.finalizer or not entry.phase.final) for entry in missing)


def _of_repository(left: LeakedObjects) -> bool:
    """Return whether the owner is a BackupRepository or a location; Kubernetes deletes its pod by owner reference."""
    labels = [pod["metadata"].get("labels") or {} for pod in left.of(PODS)]
    return any(REPOSITORY_TYPE_LABEL in each or STORAGE_LOCATION_LABEL in each for each in labels)
