"""A backup or restore whose kopia or mover was killed or stopped: the next attempt goes on from what is there."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import BackupResult, VolumeMode
from core.errors import KopiaCrashError
from datamover.data_path.backup import back_up
from datamover.data_path.checkpoints import BackupAttempt
from datamover.data_path.parents import BlockChanges, checkpoint_path
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kinds import AUTO_PARENT
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import CHECKPOINT_INTERVAL
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.data_paths import backup_data_path, restore_volume
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

_MIB = 1 << 20
_FILE_MIB = 4
_FILES = 40
_TOTAL_BYTES = _FILES * _FILE_MIB * _MIB
_LEAST_BYTES = 10 * _FILE_MIB * _MIB
"""In the checkpoint that the next attempt continues from; the last file may not be complete in it."""

_KEPT_BYTES = 0.995 * (_LEAST_BYTES - _FILE_MIB * _MIB)
"""What the next attempt takes from it; kopia shows three digits."""

_UID = "5d5a16c1-0000-4000-8000-000000000001"


@dataclass(frozen=True)
class _Bed:
    """A repository, kopia by itself on it, and a volume; `block`: the parameters of a backup by block."""

    movers: Repository
    repository: Path
    kopia: PlainKopia
    volume: Path
    block: dict[str, Any]

    def parameters(
        self, number: int, *starts: datetime, uid: str = _UID, alone: bool = True, **more: Any
    ) -> BackupParameters:
        attempt = BackupAttempt(uid, number, AsyncMock(return_value=alone), AsyncMock(), starts)
        files: dict[str, Any] = {"mode": VolumeMode.FILESYSTEM, "checkpoint_interval": timedelta(milliseconds=100)}
        more = files | {"attempt": attempt} | self.block | more
        return BackupParameters(self.volume, source="some/volume", parallel=1, **more)

    async def back_up(self, number: int, *starts: datetime, **more: Any) -> tuple[BackupResult, DataPath]:
        """Back up to the end; a checkpoint of files that kopia saves in the last moment would stay."""
        data_path, rarely = backup_data_path(), {"checkpoint_interval": CHECKPOINT_INTERVAL} | self.block
        parameters = self.parameters(number, *starts, **rarely | more)
        return await back_up(self.movers, parameters, data_path), data_path

    @asynccontextmanager
    async def frozen(
        self, parameters: BackupParameters, least_bytes: int = 1, until: Callable[[], bool] | None = None
    ) -> AsyncIterator[tuple[asyncio.Task[Any], int, DataPath]]:
        """Yield a backup whose kopia is stopped, with its PID, once a checkpoint has that many bytes."""
        data_path, until = backup_data_path(), until or (lambda: self._has_checkpoint(least_bytes))
        running = asyncio.create_task(back_up(self.movers, parameters, data_path))
        async with asyncio.timeout(200):
            while not (found := running_kopia("block-write" if self.block else BACKUP_VERB)):
                await asyncio.sleep(0.002)
            before = self._manifests()
            while not until():
                os.kill(found[0].pid, signal.SIGCONT)
                while self._manifests() == before:
                    await asyncio.sleep(0.002)
                os.kill(found[0].pid, signal.SIGSTOP)
                before = self._manifests()
        assert not running.done()
        yield running, found[0].pid, data_path

    def _manifests(self) -> int:
        return sum(1 for _ in self.repository.glob("q*/**/*.f"))

    def _has_checkpoint(self, least_bytes: int) -> bool:
        found = (one["rootEntry"]["summ"]["size"] for one in self.kopia.snapshots() if "incomplete" in one)
        return any(size >= least_bytes for size in found)

    async def kill(
        self, parameters: BackupParameters, least_bytes: int = 1, until: Callable[[], bool] | None = None
    ) -> datetime | None:
        """Back up until kopia is killed, and return the start that the mover reports."""
        async with self.frozen(parameters, least_bytes, until) as (running, pid, data_path):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(KopiaCrashError, match="killed by signal 9"):
            await running
        return data_path.meter.snapshot_started

    async def kill_files(self) -> datetime:
        """Kill the first attempt, and return its start."""
        start = await self.kill(self.parameters(1), _LEAST_BYTES)
        assert start is not None
        return start

    @property
    def ids(self) -> set[str]:
        return {one["id"] for one in self.kopia.snapshots()}

    async def check_restored(self, snapshot_id: str) -> None:
        """Check what another mover restores of a device."""
        target = self.volume.with_name("target")
        target.write_bytes(b"\xff" * (self.volume.stat().st_size + _MIB))
        with opened(FileStorage(self.repository)) as movers:
            await restore_volume(movers, snapshot_id, target, mode=VolumeMode.BLOCK)
        assert target.read_bytes() == self.volume.read_bytes() + b"\xff" * _MIB


@pytest.fixture
def bed(mover_repository: Repository, repository: Path, kopia: PlainKopia, tmp_path: Path) -> _Bed:
    for number in range(_FILES):
        make_large_file(tmp_path / "volume" / f"directory {number % 3}" / f"file {number}", _FILE_MIB)
    return _Bed(mover_repository, repository, kopia, tmp_path / "volume", {})


@pytest.fixture
def device(mover_repository: Repository, repository: Path, kopia: PlainKopia, tmp_path: Path) -> _Bed:
    block = {
        "mode": VolumeMode.BLOCK,
        "tags": {"snapshot-requester": "r", "snapshot-uploader": "velero-block", "velero.io/async-operation-id": "o"},
        "checkpoint_interval": timedelta(milliseconds=10),
        "by_block": True,
        "changes": BlockChanges("snapshot-1", "volume-1"),
    }
    path = make_large_file(tmp_path / "device", _TOTAL_BYTES // _MIB)
    return _Bed(mover_repository, repository, kopia, path, block)


def _saved(bed: _Bed) -> dict[str, Any]:
    """Return the last checkpoint of a device; a killed kopia may leave the one before, and nothing else is there."""
    found = bed.kopia.snapshots()
    assert {one["source"]["path"] for one in found} == {checkpoint_path(_UID)}
    last: dict[str, Any] = max(found, key=lambda one: one["stats"]["totalSize"])
    return last


async def test_the_next_attempt_reads_only_what_the_last_checkpoint_lacks(bed: _Bed) -> None:
    """All of the first backup of a volume is incremental, whichever attempt has read it."""
    start = await bed.kill_files()
    starts = [datetime.fromisoformat(one["startTime"]) for one in bed.kopia.snapshots()]
    assert all(abs(one - start) <= timedelta(seconds=10) for one in starts)
    result, data_path = await bed.back_up(2, start)
    assert result.total_bytes == result.incremental_bytes == _TOTAL_BYTES
    assert data_path.meter.cached_bytes >= _KEPT_BYTES
    assert data_path.meter.hashed_bytes + data_path.meter.cached_bytes == pytest.approx(_TOTAL_BYTES, rel=0.005)
    # Without a warning: nothing of another backup was removed.
    data_path.watchdog.warn.assert_not_awaited()  # type: ignore[attr-defined]
    assert bed.ids == {result.snapshot_id}


async def test_what_an_earlier_attempt_read_counts_as_incremental(bed: _Bed) -> None:
    first, _ = await bed.back_up(1, uid="another")
    kept = sorted(bed.volume.rglob("file *"))[:5]
    changed = [file for file in bed.volume.rglob("file *") if file not in kept]
    for file in changed:
        make_large_file(file, _FILE_MIB)
    start = await bed.kill_files()
    result, data_path = await bed.back_up(2, start)
    expected = len(changed) * _FILE_MIB * _MIB
    assert data_path.meter.hashed_bytes <= expected - (_KEPT_BYTES - len(kept) * _FILE_MIB * _MIB)
    assert result.incremental_bytes == pytest.approx(expected, rel=0.005)
    assert bed.ids == {first.snapshot_id, result.snapshot_id}


@pytest.mark.sample("two")
@pytest.mark.parametrize(("late_seconds", "alone"), [(20, True), (0, False)], ids=["other start", "two"])
async def test_a_checkpoint_that_may_be_another_transfers_is_removed(
    bed: _Bed, late_seconds: int, *, alone: bool
) -> None:
    """Everything is read then, and not sent again."""
    start = await bed.kill_files() + timedelta(seconds=late_seconds)
    left = len(bed.ids)
    result, data_path = await bed.back_up(2, start, alone=alone)
    assert (data_path.meter.cached_bytes, result.incremental_bytes) == (0, _TOTAL_BYTES)
    data_path.watchdog.warn.assert_awaited_once_with(  # type: ignore[attr-defined]
        f"removed {left} incomplete snapshots of earlier backups"
    )
    assert bed.ids == {result.snapshot_id}


@pytest.mark.parametrize(
    ("cancel", "cleanup_seconds"), [(True, 20), (False, 20), (True, 0)], ids=["canceled", "killed", "no time"]
)
async def test_a_failed_backup_that_no_attempt_follows_leaves_no_checkpoint_or_the_next_one_removes_it(
    bed: _Bed, cancel: bool, cleanup_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.data_path.backup._CANCELED_CLEANUP", timedelta(seconds=cleanup_seconds))
    async with bed.frozen(bed.parameters(1, attempt=None)) as (running, pid, data_path):
        async with asyncio.timeout(30):
            # kopia may be so much faster than the mover reads its output.
            await data_path.meter.wait_snapshot_started()
        assert not running.done()
        if cancel:
            running.cancel()
        else:
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError if cancel else KopiaCrashError):
        await running
    left = len(bed.ids)
    assert bool(left) is (cleanup_seconds == 0)
    if left:
        result, data_path = await bed.back_up(1, attempt=None)
        data_path.watchdog.warn.assert_awaited_once_with(  # type: ignore[attr-defined]
            f"removed {left} incomplete snapshots of earlier backups"
        )
        assert (bed.ids, result.incremental_bytes) == ({result.snapshot_id}, _TOTAL_BYTES)


@pytest.mark.sample("named parent")
@pytest.mark.parametrize("named", [False, True], ids=["automatic", "named parent"])
async def test_what_a_complete_snapshot_that_nobody_saw_has_read_counts_as_incremental(
    bed: _Bed, tmp_path: Path, *, named: bool
) -> None:
    """Its node was lost at the end: kopia takes all from it, and it is not the parent that a transfer may name."""
    bed = replace(bed, volume=tmp_path / "small")
    for name in ("same", "changed"):
        make_large_file(bed.volume / name, 1)
    earlier, _ = await bed.back_up(1, uid="another")
    make_large_file(bed.volume / "changed", 2)
    parent = earlier.snapshot_id if named else AUTO_PARENT
    first, _ = await bed.back_up(1, parent=parent)
    second, data_path = await bed.back_up(2, parent=parent)
    assert data_path.meter.hashed_bytes == 0
    # kopia shows three digits of what it read.
    assert first.incremental_bytes == pytest.approx(2 * _MIB, rel=0.005)
    assert second.incremental_bytes == 2 * _MIB
    assert (first.note, second.note) == (UNSET, UNSET)
    assert bed.ids == {earlier.snapshot_id, second.snapshot_id}


async def test_a_device_as_one_file_is_read_again_and_only_what_no_checkpoint_covers_is_sent_again(
    device: _Bed,
) -> None:
    """A checkpoint of it has no file, but with it kopia writes its indexes: without one, after 10 minutes."""
    bed = replace(device, block={})

    def sent_bytes() -> int:
        return sum(pack.stat().st_size for pack in bed.repository.glob("p*/**/*.f"))

    await bed.kill(bed.parameters(1, mode=VolumeMode.BLOCK), until=lambda: sent_bytes() >= _TOTAL_BYTES // 2)
    result, data_path = await bed.back_up(2, mode=VolumeMode.BLOCK)
    assert (data_path.meter.cached_bytes, result.incremental_bytes) == (0, _TOTAL_BYTES)
    # At least half of the first half was in an index.
    assert sent_bytes() <= 1.25 * _TOTAL_BYTES


async def test_another_attempt_by_block_reads_what_no_earlier_one_has_saved(device: _Bed) -> None:
    """Whatever maintenance has deleted between the attempts, without the margins by which it is safe beside backups."""
    saved_bytes = 0
    for number, least_mib in ((1, 10), (2, 40), (3, 80)):
        await device.kill(device.parameters(number), least_mib * _MIB)
        left_bytes = _saved(device)["stats"]["totalSize"]
        assert left_bytes >= max(saved_bytes, least_mib * _MIB)
        saved_bytes = left_bytes
        device.kopia.run("maintenance", "run", "--full", "--safety=none")
    assert not [key for key in _saved(device)["tags"] if "snapshot-" in key or "velero" in key]
    backup, data_path = await device.back_up(4)
    assert data_path.meter.hashed_bytes <= _TOTAL_BYTES - saved_bytes
    assert data_path.meter.cached_bytes >= saved_bytes
    assert (backup.incremental_bytes, backup.restart_cause) == (_TOTAL_BYTES, UNSET)
    data_path.watchdog.warn.assert_not_awaited()  # type: ignore[attr-defined]
    assert device.ids == {backup.snapshot_id}
    await device.check_restored(backup.snapshot_id)
    device.kopia.run("snapshot", "verify", "--verify-files-percent=100")


async def test_a_device_with_other_bytes_is_read_from_its_start(device: _Bed) -> None:
    await device.kill(device.parameters(1))
    with device.volume.open("r+b") as file:
        file.write(b"other")
    backup, data_path = await device.back_up(2)
    assert data_path.meter.hashed_bytes == _TOTAL_BYTES
    cause = "the checkpoint of an earlier attempt is not used: the device has other bytes at 0"
    assert backup.restart_cause == cause
    data_path.watchdog.warn.assert_awaited_once_with(  # type: ignore[attr-defined]
        f"read the device again from its start: {cause}"
    )
    assert device.ids == {backup.snapshot_id}
    await device.check_restored(backup.snapshot_id)


async def test_a_backup_by_block_that_is_canceled_leaves_no_checkpoint(
    device: _Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that an earlier attempt has left, if it has saved none of its own."""
    monkeypatch.setattr("datamover.data_path.backup._CANCELED_CLEANUP", timedelta(seconds=20))
    for saves in (True, False):
        await device.kill(device.parameters(1))
        if saves:
            async with device.frozen(device.parameters(2), 50 * _MIB) as (running, _, _):
                running.cancel()
        else:
            data_path, parameters = backup_data_path(), device.parameters(2, checkpoint_interval=timedelta(hours=1))
            running = asyncio.create_task(back_up(device.movers, parameters, data_path))
            await data_path.meter.wait_snapshot_started()
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert device.ids == set()


async def test_another_transfer_deletes_what_it_cannot_continue_from(device: _Bed) -> None:
    """Unless one may be under way that can."""
    await device.kill(device.parameters(1))
    left = device.ids
    complete = set[str]()
    for alone in (False, True):
        backup, data_path = await device.back_up(1, uid=f"du-{alone}", alone=alone)
        assert (data_path.meter.hashed_bytes, backup.restart_cause) == (_TOTAL_BYTES, UNSET)
        complete.add(backup.snapshot_id)
        assert device.ids == complete | (set() if alone else left)
