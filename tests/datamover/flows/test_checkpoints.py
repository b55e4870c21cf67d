"""The checkpoints of a long backup are deleted when it fails, but not when its node is drained."""

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.errors import CanceledError, KopiaError
from datamover.data_path.checkpoints import inherit
from datamover.kopia.repository import Repository
from tests.datamover.support.checkpoints import Drain, kopia_frozen_after_a_checkpoint
from tests.datamover.support.data_paths import back_up_volume, backup_data_path
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

_OFTEN = timedelta(milliseconds=100)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_large_file(tmp_path_factory.mktemp("large") / "file", 150)


@pytest.fixture
def volume(tmp_path: Path, large_file: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "file").hardlink_to(large_file)
    return folder


async def _break_off(
    movers: Repository, volume: Path, repository: Path, *, plain_kopia: PlainKopia, cancel: bool
) -> None:
    """Back up until there is a checkpoint, then end the backup."""
    data_path = backup_data_path()
    running = asyncio.create_task(back_up_volume(movers, volume, data_path, checkpoint_interval=_OFTEN))
    async with kopia_frozen_after_a_checkpoint(repository, plain_kopia) as pid:
        async with asyncio.timeout(30):
            # kopia may be so much faster than the mover reads its output.
            await data_path.meter.wait_snapshot_started()
        assert not running.done()
        if cancel:
            running.cancel()
        else:
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(asyncio.CancelledError if cancel else KopiaError):
        await running


@pytest.mark.parametrize("cancel", [True, False], ids=["canceled", "killed"])
async def test_a_failed_backup_leaves_no_checkpoint(
    cancel: bool,
    mover_repository: Repository,
    volume: Path,
    kopia: PlainKopia,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datamover.data_path.backup._CANCELED_CLEANUP", timedelta(seconds=20))
    await _break_off(mover_repository, volume, volume.parent / "repository", plain_kopia=kopia, cancel=cancel)
    assert kopia.snapshots() == []


async def test_a_drained_backup_keeps_its_checkpoints(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    drain = Drain()
    backing_up = back_up_volume(mover_repository, volume, checkpoint_interval=_OFTEN, stop=drain.stop)
    running = asyncio.create_task(backing_up)
    async with kopia_frozen_after_a_checkpoint(volume.parent / "repository", kopia) as pid:
        await drain.signal(pid)
    with pytest.raises(CanceledError, match="kopia saved a checkpoint"):
        await running
    assert {one["incomplete"] for one in kopia.snapshots()} == {"checkpoint", "canceled"}
    assert not any("pins" in one for one in kopia.snapshots())


async def test_the_next_backup_deletes_the_remaining_checkpoints(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the ones of a mover that was killed; none is used as parent."""
    monkeypatch.setattr("datamover.data_path.backup._CANCELED_CLEANUP", timedelta(0))
    await _break_off(mover_repository, volume, volume.parent / "repository", plain_kopia=kopia, cancel=True)
    left = [one["id"] for one in kopia.snapshots()]
    warn = AsyncMock()
    backup = await back_up_volume(mover_repository, volume, backup_data_path(warn))
    assert left
    warn.assert_awaited_once_with(f"removed {len(left)} incomplete snapshots of earlier backups")
    assert [one["id"] for one in kopia.snapshots()] == [backup.snapshot_id]
    assert backup.incremental_bytes == backup.total_bytes


async def test_other_sources_and_complete_snapshots_are_kept(
    mover_repository: Repository, tree: Path, kopia: PlainKopia
) -> None:
    """Also the parent directories of a source, which kopia lists if the source itself has none."""
    for source in ("some", "some/volume", "some/volume/below"):
        await back_up_volume(mover_repository, tree, source=source)
    assert len(kopia.snapshots()) == 3
    for source in ("some/volume", "some/volume/below/more"):
        assert not (await inherit(mover_repository.kopia, f"default@default:{source}", None)).warning
    assert len(kopia.snapshots()) == 3
