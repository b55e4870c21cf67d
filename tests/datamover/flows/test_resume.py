"""A backup whose mover was killed: the next attempt continues from its checkpoint."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import UNSET

from core.contract import BackupResult, VolumeMode
from core.errors import KopiaError
from datamover.data_path.backup import back_up
from datamover.data_path.checkpoints import BackupAttempt
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kinds import AUTO_PARENT
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import CHECKPOINT_INTERVAL
from tests.datamover.support.checkpoints import kopia_frozen_after_a_checkpoint
from tests.datamover.support.data_paths import backup_data_path
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

_SOURCE = "some/volume"
_OFTEN = timedelta(milliseconds=100)
_MIB = 1 << 20
_FILE_MIB = 4
_FILES = 40
_TOTAL_BYTES = _FILES * _FILE_MIB * _MIB
_LEAST_BYTES = 10 * _FILE_MIB * _MIB
"""In the checkpoint that the next attempt continues from; the last file may not be complete in it."""

_KEPT_BYTES = 0.995 * (_LEAST_BYTES - _FILE_MIB * _MIB)
"""What the next attempt takes from it; kopia shows three digits."""

_UID = "5d5a16c1-0000-4000-8000-000000000001"


async def _alone() -> bool:
    return True


async def _not_alone() -> bool:
    return False


async def _check() -> None:
    """Find no other attempt."""


def _parameters(
    volume: Path, number: int, starts: tuple[datetime, ...] = (), is_alone: Callable[[], Awaitable[bool]] = _alone
) -> BackupParameters:
    attempt = BackupAttempt(_UID, number, is_alone, _check, starts)
    return BackupParameters(
        volume, VolumeMode.FILESYSTEM, _SOURCE, parallel=1, checkpoint_interval=_OFTEN, attempt=attempt
    )


def _of_another(parameters: BackupParameters) -> BackupParameters:
    """Return the parameters of another transfer of the same source."""
    return replace(parameters, attempt=BackupAttempt("another", 1, _alone, _check))


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # What a mover that is killed itself cannot do.
    monkeypatch.setattr("datamover.data_path.backup._FAILED_CLEANUP", timedelta(0))
    for number in range(_FILES):
        make_large_file(tmp_path / "volume" / f"directory {number % 3}" / f"file {number}", _FILE_MIB)
    return tmp_path / "volume"


async def _interrupt(movers: Repository, parameters: BackupParameters, kopia: PlainKopia) -> datetime:
    """Back up until there is a checkpoint, kill kopia, and return the start that the mover reports."""
    data_path = backup_data_path()
    running = asyncio.create_task(back_up(movers, parameters, data_path))
    repository = parameters.volume.parent / "repository"
    async with kopia_frozen_after_a_checkpoint(repository, kopia, least_bytes=_LEAST_BYTES) as pid:
        assert not running.done()
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KopiaError, match="killed by signal 9"):
        await running
    assert data_path.meter.snapshot_started is not None
    return data_path.meter.snapshot_started


async def _resume(movers: Repository, parameters: BackupParameters) -> tuple[BackupResult, DataPath]:
    """Back up to the end; a checkpoint that kopia saves in the last moment would stay."""
    data_path = backup_data_path()
    rarely = replace(parameters, checkpoint_interval=CHECKPOINT_INTERVAL)
    return await back_up(movers, rarely, data_path), data_path


async def test_the_next_attempt_reads_only_what_the_last_checkpoint_lacks(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    """All of the first backup of a volume is incremental, whichever attempt has read it."""
    start = await _interrupt(mover_repository, _parameters(volume, 1), kopia)
    checkpoints = kopia.snapshots()
    assert {abs(datetime.fromisoformat(one["startTime"]) - start) <= timedelta(seconds=10) for one in checkpoints} == {
        True
    }
    result, data_path = await _resume(mover_repository, _parameters(volume, 2, (start,)))
    assert result.total_bytes == result.incremental_bytes == _TOTAL_BYTES
    assert data_path.meter.cached_bytes >= _KEPT_BYTES
    assert data_path.meter.hashed_bytes + data_path.meter.cached_bytes == pytest.approx(_TOTAL_BYTES, rel=0.005)
    # Without a warning: nothing of another backup was removed.
    data_path.watchdog.warn.assert_not_awaited()  # type: ignore[attr-defined]
    assert [one["id"] for one in kopia.snapshots()] == [result.snapshot_id]


async def test_what_an_earlier_attempt_read_counts_as_incremental(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    first, _ = await _resume(mover_repository, _of_another(_parameters(volume, 1)))
    kept = sorted(volume.rglob("file *"))[:5]
    changed = [file for file in volume.rglob("file *") if file not in kept]
    for file in changed:
        make_large_file(file, _FILE_MIB)
    start = await _interrupt(mover_repository, _parameters(volume, 1), kopia)
    result, data_path = await _resume(mover_repository, _parameters(volume, 2, (start,)))
    expected = len(changed) * _FILE_MIB * _MIB
    assert data_path.meter.hashed_bytes <= expected - (_KEPT_BYTES - len(kept) * _FILE_MIB * _MIB)
    assert result.incremental_bytes == pytest.approx(expected, rel=0.005)
    assert {one["id"] for one in kopia.snapshots()} == {first.snapshot_id, result.snapshot_id}


@pytest.mark.sample("two")
@pytest.mark.parametrize(
    ("late", "is_alone"), [(timedelta(seconds=20), _alone), (timedelta(), _not_alone)], ids=["other start", "two"]
)
async def test_a_checkpoint_that_may_be_another_transfers_is_removed(
    mover_repository: Repository,
    volume: Path,
    kopia: PlainKopia,
    late: timedelta,
    is_alone: Callable[[], Awaitable[bool]],
) -> None:
    """Everything is read then, and not sent again."""
    start = await _interrupt(mover_repository, _parameters(volume, 1), kopia)
    left = [one["id"] for one in kopia.snapshots()]
    result, data_path = await _resume(mover_repository, _parameters(volume, 2, (start + late,), is_alone))
    assert data_path.meter.cached_bytes == 0
    assert result.incremental_bytes == _TOTAL_BYTES
    data_path.watchdog.warn.assert_awaited_once_with(  # type: ignore[attr-defined]
        f"removed {len(left)} incomplete snapshots of earlier backups"
    )
    assert [one["id"] for one in kopia.snapshots()] == [result.snapshot_id]


async def test_the_last_attempt_removes_the_complete_snapshots_of_those_it_overtook(
    mover_repository: Repository, tree: Path, kopia: PlainKopia
) -> None:
    """Not the ones of other transfers of the same source."""
    earlier, _ = await _resume(mover_repository, _of_another(_parameters(tree, 1)))
    await _resume(mover_repository, _parameters(tree, 1))
    assert len(kopia.snapshots()) == 2
    last, _ = await _resume(mover_repository, _parameters(tree, 2, (datetime.now(UTC),)))
    assert {one["id"] for one in kopia.snapshots()} == {earlier.snapshot_id, last.snapshot_id}


@pytest.mark.sample("named parent")
@pytest.mark.parametrize("named", [False, True], ids=["automatic", "named parent"])
async def test_what_a_complete_snapshot_that_nobody_saw_has_read_counts_as_incremental(
    mover_repository: Repository, tmp_path: Path, kopia: PlainKopia, *, named: bool
) -> None:
    """Its node was lost at the end: kopia takes all from it, and it is not the parent that a transfer may name."""
    volume = tmp_path / "small"
    for name in ("same", "changed"):
        make_large_file(volume / name, 1)
    earlier, _ = await _resume(mover_repository, _of_another(_parameters(volume, 1)))
    make_large_file(volume / "changed", 2)
    parent = earlier.snapshot_id if named else AUTO_PARENT
    first, _ = await _resume(mover_repository, replace(_parameters(volume, 1), parent=parent))
    second, data_path = await _resume(mover_repository, replace(_parameters(volume, 2), parent=parent))
    assert data_path.meter.hashed_bytes == 0
    # kopia shows three digits of what it read.
    assert first.incremental_bytes == pytest.approx(2 * _MIB, rel=0.005)
    assert second.incremental_bytes == 2 * _MIB
    assert (first.note, second.note) == (UNSET, UNSET)
    assert {one["id"] for one in kopia.snapshots()} == {earlier.snapshot_id, second.snapshot_id}


async def test_a_device_is_read_again_and_only_what_no_checkpoint_covers_is_sent_again(
    mover_repository: Repository, tmp_path: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a device has no file, but with it kopia writes its indexes: without one, after 10 minutes."""
    monkeypatch.setattr("datamover.data_path.backup._FAILED_CLEANUP", timedelta(0))
    repository = tmp_path / "repository"

    def sent_bytes() -> int:
        return sum(pack.stat().st_size for pack in repository.glob("p*/**/*.f"))

    device = make_large_file(tmp_path / "device", _TOTAL_BYTES // _MIB)
    parameters = replace(_parameters(device, 1), mode=VolumeMode.BLOCK)
    running = asyncio.create_task(back_up(mover_repository, parameters, backup_data_path()))
    half = kopia_frozen_after_a_checkpoint(repository, kopia, until=lambda: sent_bytes() >= _TOTAL_BYTES // 2)
    async with half as pid:
        assert not running.done()
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(KopiaError, match="killed by signal 9"):
        await running
    result, data_path = await _resume(mover_repository, replace(_parameters(device, 2), mode=VolumeMode.BLOCK))
    assert (data_path.meter.cached_bytes, result.incremental_bytes) == (0, _TOTAL_BYTES)
    # At least half of the first half was in an index.
    assert sent_bytes() <= 1.25 * _TOTAL_BYTES
