"""A restore is complete when its data is on the disk, and not before."""

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.contract import VolumeMode
from core.errors import DataPathError
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.progress import Direction
from datamover.kopia.repository import Repository
from datamover.runtime.child import sync_file_system
from datamover.runtime.work_dir import open_root
from tests.datamover.support.data_paths import backup_data_path, build_data_path, restore_data_path
from tests.datamover.support.loopdevice import make_ext4, mounted_image
from tests.datamover.support.mounts import mounted
from tests.support.clock import LoopClock

pytestmark = pytest.mark.processes


def _put_sync(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the program that syncs by a script."""
    monkeypatch.setattr("datamover.runtime.child._SYNC", ("/bin/sh", "-c", script))


@pytest.fixture(params=list(VolumeMode), ids=str)
async def wanted(request: pytest.FixtureRequest, mover_repository: Repository, tmp_path: Path) -> RestoreParameters:
    """The parameters of a restore of what was backed up."""
    volume, target, mode = tmp_path / "volume", tmp_path / "target", request.param
    if mode is VolumeMode.BLOCK:
        volume.write_bytes(b"x" * 100_000)
        target.write_bytes(bytes(100_000))
    else:
        volume.mkdir()
    parameters = BackupParameters(volume, mode, "some/volume", parallel=2)
    backup = await back_up(mover_repository, parameters, backup_data_path())
    return RestoreParameters(backup.snapshot_id, target, mode, workers=2)


async def test_a_restore_is_not_complete_before_its_data_is_on_the_disk(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "held")
    _put_sync(f"touch {tmp_path}/started; read line <{tmp_path}/held", monkeypatch)
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
    mover_repository: Repository, wanted: RestoreParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_sync("echo 'Input/output error' >&2; exit 1", monkeypatch)
    with pytest.raises(DataPathError, match=r"cannot write restored data of .*target to the disk: Input/output error$"):
        await restore(mover_repository, wanted, restore_data_path())


async def test_a_sync_that_was_killed_fails_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_sync("kill -9 $$", monkeypatch)
    with (
        open_root(tmp_path) as fd,
        pytest.raises(DataPathError, match=r"its child exited with code -9$"),
    ):
        await sync_file_system(fd, tmp_path)


async def test_a_disk_error_that_another_program_was_told_is_told_again(tmp_path: Path) -> None:
    """The disk is larger than what it is kept in."""
    with mounted(tmp_path / "small", "size=2m") as small:
        image = small / "image"
        make_ext4(image, 64 << 20, "-O", "^has_journal")
        with mounted_image(image, tmp_path / "volume") as volume, open_root(volume) as held, open_root(volume) as other:
            (volume / "file").write_bytes(os.urandom(4 << 20))
            with pytest.raises(DataPathError, match="cannot write restored data of"):
                await sync_file_system(other, volume)
            with open_root(volume) as opened_later:
                await sync_file_system(opened_later, volume)
            with pytest.raises(DataPathError, match="cannot write restored data of"):
                await sync_file_system(held, volume)


def _open_on(path: Path) -> set[int]:
    links = list(Path("/proc/self/fd").iterdir())
    return {int(link.name) for link in links if link.is_symlink() and link.readlink() == path}


async def test_a_restore_syncs_by_a_descriptor_from_before_its_first_write(
    mover_repository: Repository, wanted: RestoreParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, synced, run = set[int](), list[int](), DataPath.run

    async def run_kopia(*arguments: Any, **options: Any) -> KopiaAnswer:
        before.update(_open_on(wanted.target))
        return await run(*arguments, **options)

    async def sync(fd: int, _: Path) -> None:
        synced.append(fd)

    monkeypatch.setattr(DataPath, "run", run_kopia)
    monkeypatch.setattr("datamover.data_path.restore.sync_file_system", sync)
    monkeypatch.setattr("datamover.data_path.block.sync_device", sync)
    await restore(mover_repository, wanted, restore_data_path())
    assert len(synced) == 1
    assert before.issuperset(synced)


@pytest.mark.looptime
async def test_a_slow_disk_is_reported() -> None:
    warn = AsyncMock()
    data_path = build_data_path(Direction.RESTORE, warn, LoopClock())
    await data_path.wait_for(asyncio.sleep(500), "writing")
    reported = [call.args[0] for call in warn.await_args_list]
    assert reported == [f"still writing after {span}" for span in ("2m0s", "4m0s", "8m0s")]
