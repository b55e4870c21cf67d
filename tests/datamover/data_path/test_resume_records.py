"""When a restore records what it has finished, and what waits for that."""

import asyncio
import os
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.errors import DataPathError, KopiaCrashError, KopiaError, StorageOutageError
from datamover.data_path.resume import LIST_INTERVAL, ResumableRestore, ResumeSettings, open_resumable
from datamover.data_path.run import DataPath
from datamover.kopia.progress import Direction
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from tests.datamover.support.data_paths import build_data_path
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


class _Disk:
    """Takes so many seconds for each sync, and for other work in a thread; notes when syncs begin and end."""

    def __init__(self) -> None:
        self.seconds: float = 1
        self.thread_seconds: float = 0
        self.syncs: list[tuple[float, float]] = []
        self.synced = asyncio.Event()

    async def run(self, work: Callable[[ShouldStop], Any], *_: object) -> object:
        await asyncio.sleep(self.thread_seconds)
        return work(lambda: False)

    async def sync(self, *_: object) -> None:
        started = LoopClock().monotonic()
        await asyncio.sleep(self.seconds)
        self.syncs.append((started, LoopClock().monotonic()))
        self.synced.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    disk = _Disk()
    monkeypatch.setattr("datamover.data_path.resume.sync_file_system", disk.sync)
    # Virtual time does not wait for threads.
    monkeypatch.setattr(DataPath, "run_in_thread", staticmethod(disk.run))
    return disk


async def _begin(target: Path, interval: timedelta = LIST_INTERVAL, warn: AsyncMock | None = None) -> ResumableRestore:
    data_path = build_data_path(Direction.RESTORE, warn or AsyncMock(), LoopClock())
    snapshot = Snapshot("id", "s", "", "k0", 0, 0)
    restore = await open_resumable(snapshot, target, ResumeSettings("uid", interval), data_path)
    assert restore is not None
    return restore


@pytest.mark.parametrize("factor", [1, 5])
async def test_the_first_record_comes_in_proportion_to_the_interval(tmp_path: Path, disk: _Disk, factor: int) -> None:
    restore = await _begin(tmp_path, LIST_INTERVAL / factor)
    disk.seconds = 0
    await restore.record_during(lambda: asyncio.sleep(58 / factor))
    begun = [round(started * factor) for started, _ in disk.syncs]
    assert begun == [30, 35, 40, 45, 50, 55]


@pytest.mark.parametrize("seconds", [2, 20])
async def test_syncs_take_at_most_a_fifth_of_the_time(tmp_path: Path, disk: _Disk, seconds: int) -> None:
    restore = await _begin(tmp_path)
    disk.seconds = seconds
    await restore.record_during(lambda: asyncio.sleep(1000))
    pauses = [after[0] - before[1] for before, after in pairwise(disk.syncs)]
    assert len(pauses) >= 8
    assert all(pause == pytest.approx(4 * seconds, rel=0.05) for pause in pauses)


async def test_a_sync_that_hangs_is_reported(tmp_path: Path, disk: _Disk) -> None:
    """The restore waits for it at the end: the kernel reports an error of the disk only once."""
    warn = AsyncMock()
    restore = await _begin(tmp_path, warn=warn)
    disk.seconds = 300
    await restore.record_during(lambda: asyncio.sleep(31))
    assert [call.args[0] for call in warn.await_args_list] == [
        f"still writing restored data to the disk after {waited}" for waited in ("2m0s", "4m0s")
    ]
    assert len(disk.syncs) == 1


async def test_the_list_is_not_removed_while_files_are_appended(tmp_path: Path, disk: _Disk) -> None:
    """An NFS client would give it another name, and leave that in the volume."""
    restore = await _begin(tmp_path)
    (path,) = tmp_path.iterdir()
    header_bytes = path.stat().st_size
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (1, 1))
    disk.thread_seconds = 1
    await restore.record_during(disk.synced.wait)
    assert path.stat().st_size > header_bytes
    await restore.end()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "stays"),
    [(KopiaError("x"), False), (KopiaCrashError("x"), True), (StorageOutageError("x"), True)],
    ids=["final", "crash", "outage"],
)
async def test_a_list_stays_only_for_another_attempt(
    tmp_path: Path, disk: _Disk, error: DataPathError, *, stays: bool
) -> None:
    """An existing volume that the claim was bound to is not deleted after a failure."""

    async def fail() -> None:
        raise error

    restore = await _begin(tmp_path)
    with pytest.raises(type(error)):
        await restore.record_during(fail)
    assert len(list(tmp_path.iterdir())) == stays
    assert not disk.syncs
