"""Keeps the history of backups, which outlives their transfers and this leader."""

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from core.aio import run_for_many
from core.clock import Backoff
from core.errors import AgentError
from core.kube.resources import CONFIG_MAPS
from core.kube.types import Manifest
from nodeagent.coverage.history import (
    HISTORY_DAYS,
    HISTORY_KEY,
    EndedBackup,
    block_of,
    content_of,
    count_volumes,
    merge_history,
    name_of_block,
)
from nodeagent.leader.context import Cluster
from nodeagent.leader.election import NotLeaderError
from nodeagent.leader.index import Entry

__all__ = ["HistoryKeeper"]

_log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 60.0
"""Between two writes: each writes all volumes of a month."""

_RETRY: Final = Backoff(_PAUSE_SECONDS, 3600.0)

_MOST_PENDING: Final = 100_000
"""Backups that wait to be added, which is for long without the permission to write."""


class HistoryKeeper:
    """Adds each complete backup to the history once."""

    def __init__(self, cluster: Cluster, namespace: str, *, entries: Callable[[], Sequence[Entry]]) -> None:
        """Write ConfigMaps in `namespace`; `entries` returns all transfers, and is called once."""
        self._cluster = cluster
        self._namespace = namespace
        self._entries = entries
        self._ended: dict[str, EndedBackup] = {}
        self._added: dict[str, int] = {}
        self._changed = asyncio.Event()

    def observe(self, entry: Entry) -> None:
        """Add the changed `entry` soon, if it is a complete backup; also one that was deleted before."""
        backup = _backup_of(entry)
        # An older one was there when this leader began.
        if backup is None or backup.day < self._today() - 1 or backup.uid in self._added:
            return
        if len(self._ended) >= _MOST_PENDING:
            return
        self._ended[backup.uid] = backup
        self._changed.set()

    async def run(self) -> None:
        """Keep the history until canceled.

        Raises:
            NotLeaderError: this agent is not the leader any more.
        """
        self._ended |= {one.uid: one for entry in self._entries() if (one := _backup_of(entry)) is not None}
        failures = 0
        while True:
            self._changed.clear()
            try:
                await self._write()
            except NotLeaderError:
                raise
            except AgentError as e:
                failures += 1
                log = _log.warning if failures == 1 else _log.debug
                log("cannot write the history of backups, will retry: %s", e)
                await self._cluster.clock.sleep(_RETRY.seconds_after(failures))
                continue
            failures = 0
            await self._changed.wait()
            await self._cluster.clock.sleep(_PAUSE_SECONDS)

    def _today(self) -> int:
        return self._cluster.now().toordinal()

    async def _write(self) -> None:
        """Add what has ended.

        Raises:
            NotLeaderError: this agent is not the leader any more.
            KubeError: the API server rejected a request; what was not added is added later.
        """
        today, ended = self._today(), dict(self._ended)
        shown = [one for one in ended.values() if one.day > today - HISTORY_DAYS]
        shown.sort(key=lambda one: one.completed)
        for block, members in groupby(shown, key=lambda one: block_of(one.day)):
            await self._add(block, list(members), today)
        self._ended = {uid: one for uid, one in self._ended.items() if uid not in ended}
        added = self._added | {uid: one.day for uid, one in ended.items()}
        self._added = {uid: day for uid, day in added.items() if day >= today - 1}

    async def _add(self, block: int, backups: Sequence[EndedBackup], today: int) -> None:
        client, name = self._cluster.client, name_of_block(block)
        stored = await client.read(CONFIG_MAPS, self._namespace, name)
        before = content_of(stored)
        number = max(len(backups), count_volumes(before or b""))
        after = await run_for_many(number, merge_history, before, block, backups, today)
        if after is None:
            return
        change = {"binaryData": {HISTORY_KEY: base64.b64encode(after).decode()}}
        self._cluster.check_leading()
        if stored is not None:
            await client.patch_if_unchanged(CONFIG_MAPS, stored, change)
            return
        meta = {"name": name, "namespace": self._namespace}
        manifest: Manifest = {"apiVersion": CONFIG_MAPS.api_version, "kind": CONFIG_MAPS.kind, "metadata": meta}
        await client.create(CONFIG_MAPS, manifest | change)


def _backup_of(entry: Entry) -> EndedBackup | None:
    """Return the backup that a transfer was; None: it is none, or is not complete."""
    copy = entry.copy
    if copy is None or not copy.complete or copy.completed is None or not entry.managed:
        return None
    return EndedBackup(
        entry.uid, entry.queue, copy.claim or "", copy.completed, copy.bytes, copy.new_bytes, max(0.0, copy.seconds)
    )
