"""Backups and restores of devices whose kopia is killed or stopped: another attempt goes on, or begins again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import VolumeMode
from core.errors import CanceledError, KopiaCrashError
from datamover.data_path.backup import back_up
from datamover.data_path.checkpoints import BackupAttempt
from datamover.data_path.parents import BlockChanges, checkpoint_path
from datamover.data_path.restore import restore
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.repository import Repository
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import ONE_OPEN
from tests.datamover.support.checkpoints import Drain, kopia_frozen_after_a_checkpoint
from tests.datamover.support.data_paths import backup_data_path, restore_data_path, restore_parameters, restore_volume
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

_MIB = 1 << 20
_DEVICE_MIB = 150
_SOURCE = "snapshot-data-upload-download/velero-block/app/data"
_OFTEN = timedelta(milliseconds=10)
_CHECKED_BYTES = 8 * _MIB
"""The program reads so many bytes of what it takes from a checkpoint (tools/kopia/program/block_write.go)."""


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return make_large_file(tmp_path / "device", _DEVICE_MIB)


@pytest.fixture
def for_restores(repository: Path) -> Iterator[Repository]:
    """The repository as another mover opens it."""
    with opened(FileStorage(repository)) as found:
        yield found


async def _pass() -> None:
    pass


def _parameters(device: Path, number: int, *, uid: str = "du-1", alone: bool = True) -> BackupParameters:
    attempt = BackupAttempt(uid=uid, number=number, is_alone=AsyncMock(return_value=alone), check=_pass)
    return BackupParameters(
        device,
        VolumeMode.BLOCK,
        _SOURCE,
        parallel=2,
        tags={"snapshot-requester": "r", "snapshot-uploader": "velero-block", "velero.io/async-operation-id": "o"},
        checkpoint_interval=_OFTEN,
        by_block=True,
        changes=BlockChanges("snapshot-1", "volume-1"),
        attempt=attempt,
    )


def _saved(kopia: PlainKopia) -> list[dict[str, Any]]:
    """Return the checkpoints; nothing else of the source is there."""
    found = kopia.snapshots()
    assert {one["source"]["path"] for one in found} == {checkpoint_path("du-1")}
    return found


@asynccontextmanager
async def _frozen(
    movers: Repository, parameters: BackupParameters, repository: Path, kopia: PlainKopia, least_bytes: int = 1
) -> AsyncIterator[tuple[asyncio.Task[Any], int]]:
    """Yield a backup whose kopia is stopped, with its PID, once a checkpoint has that many bytes."""
    running = asyncio.create_task(back_up(movers, parameters, backup_data_path()))
    async with kopia_frozen_after_a_checkpoint(repository, kopia, least_bytes=least_bytes, verb="block-write") as pid:
        assert not running.done()
        yield running, pid


async def _kill(
    movers: Repository, parameters: BackupParameters, repository: Path, kopia: PlainKopia, least_bytes: int = 1
) -> int:
    """Back up until kopia is killed, and return how many bytes the checkpoint has that it leaves."""
    async with _frozen(movers, parameters, repository, kopia, least_bytes) as (running, pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KopiaCrashError):
        await running
    (left,) = _saved(kopia)
    return int(left["stats"]["totalSize"])


async def _check_restored(movers: Repository, snapshot_id: str, device: Path) -> None:
    target = device.with_name("target")
    target.write_bytes(b"\xff" * (device.stat().st_size + _MIB))
    await restore_volume(movers, snapshot_id, target, mode=VolumeMode.BLOCK)
    assert target.read_bytes() == device.read_bytes() + b"\xff" * _MIB


async def test_another_attempt_reads_what_no_earlier_one_has_saved(
    mover_repository: Repository, for_restores: Repository, repository: Path, device: Path, kopia: PlainKopia
) -> None:
    """Whatever maintenance has deleted between the attempts, without the margins by which it is safe beside backups."""
    saved_bytes = 0
    for number, least_mib in ((1, 10), (2, 40), (3, 80)):
        parameters = _parameters(device, number)
        left_bytes = await _kill(mover_repository, parameters, repository, kopia, least_mib * _MIB)
        assert left_bytes >= max(saved_bytes, least_mib * _MIB)
        saved_bytes = left_bytes
        kopia.run("maintenance", "run", "--full", "--safety=none")
    (left,) = _saved(kopia)
    assert not [key for key in left["tags"] if "snapshot-" in key or "velero" in key]
    data_path = backup_data_path(warn := AsyncMock())
    backup = await back_up(mover_repository, _parameters(device, 4), data_path)
    assert data_path.meter.hashed_bytes <= _DEVICE_MIB * _MIB - saved_bytes
    assert data_path.meter.cached_bytes >= saved_bytes
    assert (backup.incremental_bytes, backup.restart_cause) == (_DEVICE_MIB * _MIB, UNSET)
    warn.assert_not_awaited()
    assert [one["id"] for one in kopia.snapshots()] == [backup.snapshot_id]
    await _check_restored(for_restores, backup.snapshot_id, device)
    kopia.run("snapshot", "verify", "--verify-files-percent=100")


@pytest.mark.parametrize(
    ("doubt", "cause"),
    [
        ("snapshot", "it is of another device"),
        ("size", "it is of another device"),
        ("content", "the device has other bytes at 0"),
    ],
)
@pytest.mark.sample("content")
async def test_a_device_in_doubt_is_read_from_its_start(
    doubt: str,
    cause: str,
    mover_repository: Repository,
    for_restores: Repository,
    repository: Path,
    device: Path,
    kopia: PlainKopia,
) -> None:
    await _kill(mover_repository, _parameters(device, 1), repository, kopia)
    changes, size_bytes = BlockChanges("snapshot-1", "volume-1"), _DEVICE_MIB * _MIB
    match doubt:
        case "snapshot":
            changes = replace(changes, change_id="snapshot-2")
        case "size":
            size_bytes += 512
            os.truncate(device, size_bytes)
        case _:
            with device.open("r+b") as file:
                file.write(b"other")
    data_path = backup_data_path(warn := AsyncMock())
    backup = await back_up(mover_repository, replace(_parameters(device, 2), changes=changes), data_path)
    assert data_path.meter.hashed_bytes == _DEVICE_MIB * _MIB
    assert backup.restart_cause == f"the checkpoint of an earlier attempt is not used: {cause}"
    warn.assert_awaited_once_with(f"read the device again from its start: {backup.restart_cause}")
    assert [one["id"] for one in kopia.snapshots()] == [backup.snapshot_id]
    await _check_restored(for_restores, backup.snapshot_id, device)


async def test_a_backup_that_is_canceled_leaves_no_checkpoint(
    mover_repository: Repository,
    repository: Path,
    device: Path,
    kopia: PlainKopia,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor one that an earlier attempt has left, if it has saved none of its own."""
    monkeypatch.setattr("datamover.data_path.backup._CANCELED_CLEANUP", timedelta(seconds=20))
    for interval in (_OFTEN, timedelta(hours=1)):
        await _kill(mover_repository, _parameters(device, 1), repository, kopia)
        parameters = replace(_parameters(device, 2), checkpoint_interval=interval)
        if interval is _OFTEN:
            async with _frozen(mover_repository, parameters, repository, kopia, 50 * _MIB) as (running, _):
                running.cancel()
        else:
            data_path = backup_data_path()
            running = asyncio.create_task(back_up(mover_repository, parameters, data_path))
            await data_path.meter.wait_snapshot_started()
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert kopia.snapshots() == []


async def test_a_drained_backup_saves_a_checkpoint_at_once(
    mover_repository: Repository, repository: Path, device: Path, kopia: PlainKopia
) -> None:
    drain = Drain()
    parameters = replace(_parameters(device, 1), stop=drain.stop)
    async with _frozen(mover_repository, parameters, repository, kopia) as (running, pid):
        await drain.signal(pid)
    with pytest.raises(CanceledError, match="kopia saved a checkpoint"):
        await running
    (left,) = _saved(kopia)
    data_path = backup_data_path()
    await back_up(mover_repository, _parameters(device, 2), data_path)
    assert data_path.meter.hashed_bytes <= _DEVICE_MIB * _MIB - left["stats"]["totalSize"]


async def test_another_transfer_deletes_what_it_cannot_continue_from(
    mover_repository: Repository, repository: Path, device: Path, kopia: PlainKopia
) -> None:
    """Unless one may be under way that can."""
    await _kill(mover_repository, _parameters(device, 1), repository, kopia)
    (left,) = _saved(kopia)
    ids = {left["id"]}
    for alone in (False, True):
        parameters = _parameters(device, 1, uid=f"du-{alone}", alone=alone)
        data_path = backup_data_path()
        backup = await back_up(mover_repository, parameters, data_path)
        assert (data_path.meter.hashed_bytes, backup.restart_cause) == (_DEVICE_MIB * _MIB, UNSET)
        ids = ids - {left["id"]} if alone else ids
        ids |= {backup.snapshot_id}
        assert {one["id"] for one in kopia.snapshots()} == ids


async def test_a_restore_that_is_killed_goes_on_from_what_is_on_the_device(
    mover_repository: Repository, for_restores: Repository, device: Path
) -> None:
    """What is there is compared by its hash, and not read from the repository."""
    backup = await back_up(mover_repository, _parameters(device, 1), backup_data_path())
    target = device.with_name("target")
    target.touch()
    os.truncate(target, _DEVICE_MIB * _MIB)
    wanted = restore_parameters(backup.snapshot_id, target, mode=VolumeMode.BLOCK)
    for number, least_mib in enumerate((20, 60, 100)):
        running = asyncio.create_task(restore(for_restores, replace(wanted, again=number > 0), restore_data_path()))
        os.kill(await _write_some(target, least_mib * _MIB), signal.SIGKILL)
        with pytest.raises(KopiaCrashError):
            await running
    written_bytes = target.stat().st_blocks * 512
    data_path = restore_data_path()
    await restore(for_restores, replace(wanted, again=True), data_path)
    assert target.read_bytes() == device.read_bytes()
    # Blocks that were being written may be there in part.
    assert written_bytes - 4 * _MIB <= data_path.meter.cached_bytes < _DEVICE_MIB * _MIB


async def _write_some(target: Path, least_bytes: int) -> int:
    """Let kopia write that many bytes, a little at a time, and return its PID while it is stopped."""
    async with asyncio.timeout(200):
        while not (found := running_kopia("mover-restore" if ONE_OPEN else "block-read")):
            await asyncio.sleep(0.002)
        while target.stat().st_blocks * 512 < least_bytes:
            os.kill(found[0].pid, signal.SIGCONT)
            await asyncio.sleep(0.005)
            os.kill(found[0].pid, signal.SIGSTOP)
    return found[0].pid
