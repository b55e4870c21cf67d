"""A restore is complete when its data is on the disk, and not before."""

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
from tests.datamover.support.data_paths import backup_data_path, build_data_path, restore_data_path
from tests.support.clock import LoopClock

pytestmark = pytest.mark.processes


def _put_sync(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `/usr/bin/sync` by a script."""
    folder.mkdir()
    (folder / "sync").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sync").chmod(0o755)
    monkeypatch.setattr("datamover.runtime.child._SYNC", (str(folder / "sync"),))


async def _wanted(movers: Repository, volume: Path, mode: VolumeMode) -> RestoreParameters:
    """Back up the volume, and return the parameters of its restore."""
    backup = await back_up(movers, BackupParameters(volume, mode, "some/volume", parallel=2), backup_data_path())
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


async def test_a_restore_is_not_complete_before_its_data_is_on_the_disk(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "held")
    _put_sync(tmp_path / "bin", f"touch {tmp_path}/started; read line <{tmp_path}/held", monkeypatch)
    running = asyncio.create_task(restore(mover_repository, wanted, restore_data_path()))
    async with asyncio.timeout(30):
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
    assert wanted.target.exists()
    assert not running.done()
    # The script reads from it, so this opens immediately.
    (tmp_path / "held").write_text("go on\n")
    await running


async def test_a_disk_error_fails_the_restore(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_sync(tmp_path / "bin", "echo 'sync: Input/output error' >&2; exit 1", monkeypatch)
    with pytest.raises(
        DataPathError, match=r"cannot write restored data of .*target to the disk: sync: Input/output error$"
    ):
        await restore(mover_repository, wanted, restore_data_path())


@pytest.mark.looptime
async def test_a_slow_disk_is_reported() -> None:
    warn = AsyncMock()
    data_path = build_data_path(Direction.RESTORE, warn, LoopClock())
    await data_path.wait_for(asyncio.sleep(500), "writing")
    reported = [call.args[0] for call in warn.await_args_list]
    assert reported == [f"still writing after {span}" for span in ("2m0s", "4m0s", "8m0s")]
