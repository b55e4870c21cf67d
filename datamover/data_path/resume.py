"""A restore that the next attempt of its transfer can continue: what is finished is recorded, and not written again.

kopia skips a file if size and time are as in the snapshot, and any link. So before it continues, every file that is
not listed as finished is removed, and every link: what is left to skip is as kopia left it.
Source: kopia 0.23.1, snapshot/restore/restore.go (copyEntry), local_fs_output.go (FileExists, SymlinkExists).
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from core.errors import DataPathError, KopiaCrashError, StorageOutageError
from datamover.data_path.finished import (
    FinishedList,
    WalkProgress,
    find_finished,
    open_list,
    remove_list,
    remove_unlisted,
)
from datamover.data_path.run import DataPath
from datamover.kopia.process import FULL, match_texts
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.stalls import read_duration
from datamover.runtime.cancellation import Canceler, ShouldStop, run_beside, run_unless_canceled
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.work_dir import attempting

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE: Final = "DATA_MOVER_RESTORE_LIST_INTERVAL"
"""Inherited by mover pods from the node agent's DaemonSet."""

LIST_INTERVAL: Final = timedelta(seconds=5)
"""How long the mover waits before it lists finished files again."""

_NAME: Final = ".nodeagent-restore-"

_CLEANUP: Final = timedelta(seconds=5)
"""How long a failed restore waits for the removal of its list: the volume may hang."""

_FULL: Final = re.compile(match_texts(FULL))

_LISTING: Final = "listing finished files in {}"

_FIRST: Final = 6
"""The first record comes after so many intervals: a short restore makes none."""

_WALK_COST: Final = 20
_SYNC_COST: Final = 5
"""Walking through the target, and syncing it, take at most one part of the time in so many each. A sync writes what is
to be written anyway, but so it does for everybody whose volume is on the same disk."""


@dataclass(frozen=True)
class ResumeSettings:
    """Which transfer the restore is of, and the interval at which its mover records finished files; 0: never."""

    transfer_uid: str
    interval: timedelta


def read_list_interval(environment: Mapping[str, str]) -> timedelta:
    """Return how often finished files are recorded, from `DATA_MOVER_RESTORE_LIST_INTERVAL`, such as 30s; 0: never.

    Raises:
        ConfigError: its value is not a duration, or negative.
    """
    return read_duration(environment, _VARIABLE, LIST_INTERVAL)


class ResumableRestore:
    """One restore of files into a volume that only data movers of this transfer have."""

    def __init__(self, finished: FinishedList, since_ns: int, settings: ResumeSettings, data_path: DataPath) -> None:
        self._target = finished.path.parent
        self._finished = finished
        self._since_ns = since_ns
        self._interval = settings.interval.total_seconds()
        self._data_path = data_path
        self._using = asyncio.Lock()
        self._failure: DataPathError | None = None

    @property
    def resumed(self) -> bool:
        """Whether it continues an earlier attempt: kopia skips what exists."""
        return self._finished.resumed

    async def discard_unfinished(self) -> None:
        """Remove what an earlier attempt did not finish; the rest counts as done; raises DataPathError."""
        progress = WalkProgress()
        with _named(self._target):
            await self._in_thread(lambda stop: remove_unlisted(self._finished, stop, progress), progress)
            self._since_ns = await self._in_thread(lambda _: self._finished.now_ns(), progress)
        self._finished.forget()
        self._data_path.meter.cached_bytes = progress.listed_bytes
        _logger.info(
            "an earlier attempt finished %d files with %d bytes; removed %d others and links",
            progress.listed_files,
            progress.listed_bytes,
            progress.removed,
        )

    async def record_during(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `work` returns, which writes to the target, and record meanwhile what is finished.

        After a failure that no attempt follows, the list is removed: a volume that existed before stays. If that was
        full, the work is done once more: the data may need the room that the list took. Raises DataPathError if the
        disk failed.
        """
        canceler = Canceler()

        async def settle() -> _T:
            result = await work()
            # A sync that runs still may fail; and no thread has the list open when it is removed.
            async with self._using:
                if self._failure:
                    raise self._failure
            return result

        with _named(self._target):
            fd = await self._in_thread(lambda _: os.open(self._target, os.O_DIRECTORY), WalkProgress())
        try:
            return await run_unless_canceled(
                lambda: run_beside(partial(self._record, fd, canceler), settle(), name="finished-files"), canceler
            )
        except DataPathError as e:
            if not isinstance(e, (KopiaCrashError, StorageOutageError)):
                await self._data_path.clean_up(self.end, "restore-list", _CLEANUP)
            if self.resumed or not await self._may_fit(e):
                raise
            _logger.info("target %s is full: writing all files again, without a list of finished ones", self._target)
            return await work()
        finally:
            os.close(fd)

    async def _may_fit(self, error: DataPathError) -> bool:
        """Return whether the target was full, and is as large as the data."""
        if not _FULL.search(str(error)):
            return False
        with _named(self._target):
            space = await self._in_thread(lambda _: os.statvfs(self._target), WalkProgress())
        return space.f_blocks * space.f_frsize >= self._data_path.meter.total_bytes

    async def end(self) -> None:
        """Remove the list: the restore is complete. Raises DataPathError if it cannot be removed."""
        with _named(self._target):
            await self._in_thread(lambda _: remove_list(self._finished.path), WalkProgress())

    async def _record(self, fd: int, canceler: Canceler) -> None:
        clock, seconds = self._data_path.clock, _FIRST * self._interval
        while True:
            await clock.sleep(seconds)
            try:
                seconds = max(self._interval, await self._record_once(fd))
            except OSError as e:
                _logger.warning("cannot list finished files, so another attempt would write them again: %s", e.strerror)
                return
            except DataPathError as e:
                canceler.fail(e)
                return

    async def _record_once(self, fd: int) -> float:
        """List what was finished since the last time in the target `fd`; return how many seconds to wait then."""
        progress, clock = WalkProgress(), self._data_path.clock
        started = clock.monotonic()
        async with self._using:
            now_ns = await self._in_thread(lambda _: self._finished.now_ns(), progress)
        find = partial(find_finished, self._target, self._since_ns, progress=progress)
        found = await self._in_thread(lambda stop: find(stop=stop), progress)
        walked = clock.monotonic()
        async with self._using:
            # Also if nothing was finished: a large file that is synced only at its end is listed long after it.
            try:
                await self._data_path.wait_for(sync_file_system(fd, self._target), WRITING)
            except DataPathError as e:
                self._failure = e
                raise
            synced = clock.monotonic()
            if found:
                await self._in_thread(lambda _: self._finished.append(found), progress)
        self._since_ns = now_ns
        return max((_WALK_COST - 1) * (walked - started), (_SYNC_COST - 1) * (synced - walked))

    async def _in_thread(self, work: Callable[[ShouldStop], _T], progress: WalkProgress) -> _T:
        return await self._data_path.run_in_thread(
            work, _LISTING.format(self._target), lambda: (progress.entries, progress.removed)
        )


async def open_resumable(
    snapshot: Snapshot, target: Path, settings: ResumeSettings, data_path: DataPath
) -> ResumableRestore | None:
    """Begin the restore, or continue an earlier attempt's; None: there is no list, so everything is written.

    The earlier attempt's list is removed then: a file system may keep none, for example since it syncs no directory.

    Raises:
        DataPathError: the target hangs, or what an earlier attempt left cannot be removed.
    """
    name = f"{_NAME}{settings.transfer_uid}"
    owner = json.dumps({"version": 1, "transfer": settings.transfer_uid, "snapshot": snapshot.snapshot_id}).encode()

    def begin(stop: ShouldStop) -> tuple[FinishedList, int] | None:
        finished = open_list(target, name, owner, stop)
        return (finished, finished.now_ns()) if finished else None

    begun = None
    cause = "it has files, and no list of finished ones" if settings.interval else f"{_VARIABLE} is 0"
    try:
        if settings.interval:
            begun = await data_path.run_in_thread(begin, _LISTING.format(target))
    except OSError as e:
        cause = f"cannot list finished files: {e.strerror}"
    if begun is None:
        with suppress(OSError):
            await data_path.run_in_thread(lambda _: (target / name).unlink(), _LISTING.format(target))
        _logger.info("all files are written to target %s: %s", target, cause)
        return None
    restore = ResumableRestore(*begun, settings, data_path)
    if begun[0].resumed:
        await restore.discard_unfinished()
    return restore


def _named(target: Path) -> AbstractContextManager[None]:
    return attempting(f"continue the restore in target {target}")
