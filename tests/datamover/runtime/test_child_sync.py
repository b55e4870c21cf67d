"""Success is said when the data is on the disk, and not before."""

import asyncio
import os
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.contract import VolumeMode
from core.errors import DataPathError
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.progress import Direction
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import restoring, transfer, uploading
from tests.support.clock import LoopClock


def _put_sync(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script be what writes a file system to the disk."""
    folder.mkdir()
    (folder / "sync").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


async def _wanted(movers: Repository, volume: Path, mode: VolumeMode) -> RestoreParameters:
    """Return the request to restore what is backed up here."""
    backup = await back_up(movers, BackupParameters(volume, mode, "some/volume", parallel=2), uploading())
    target = volume.with_name("target")
    if mode is VolumeMode.BLOCK:
        target.write_bytes(bytes(volume.stat().st_size))
    return RestoreParameters(backup.snapshot_id, target, mode, workers=2)


@pytest.fixture(params=list(VolumeMode), ids=str)
async def wanted(request: pytest.FixtureRequest, mover_repository: Repository, tmp_path: Path) -> RestoreParameters:
    volume = tmp_path / "volume"
    if request.param is VolumeMode.BLOCK:
        volume.write_bytes(b"x" * 100_000)
    else:
        volume.mkdir()
    return await _wanted(mover_repository, volume, request.param)


async def test_a_restore_is_not_over_before_its_data_is_on_the_disk(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "held")
    _put_sync(tmp_path / "bin", f"touch {tmp_path}/begun; read line <{tmp_path}/held", monkeypatch)
    running = asyncio.create_task(restore(mover_repository, wanted, restoring()))
    async with asyncio.timeout(30):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
    assert wanted.target.exists()
    assert not running.done()
    # The script reads from it: this opens at once.
    (tmp_path / "held").write_text("go on\n")
    await running


async def test_a_disk_that_does_not_take_the_data_fails_the_restore(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_sync(tmp_path / "bin", "echo 'sync: Input/output error' >&2; exit 1", monkeypatch)
    with pytest.raises(DataPathError, match=r"target did not reach the disk: sync: Input/output error$"):
        await restore(mover_repository, wanted, restoring())


@pytest.mark.looptime
async def test_a_disk_that_takes_its_time_is_told_of() -> None:
    warn = AsyncMock()
    moving = transfer(Direction.RESTORE, warn, LoopClock())
    await moving.wait_for(asyncio.sleep(500), "writing")
    told = [call.args[0] for call in warn.await_args_list]
    assert told == [f"still writing after {span}" for span in ("2m0s", "4m0s", "8m0s")]
