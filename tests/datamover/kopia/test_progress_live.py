"""Progress of real data paths: as frequent for a restore as for a backup."""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import pytest

from core.contract import BackupResult, ProgressMessage, RestoreResult, VolumeMode
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.trees import make_large_file

pytestmark = pytest.mark.processes

_SIZE = 150 << 20
_LEAST = 3
"""The minimum of different readings per second."""


async def _watch(
    moving: Awaitable[BackupResult | RestoreResult], meter: Meter
) -> tuple[list[ProgressMessage], BackupResult | RestoreResult]:
    readings = []
    task = asyncio.ensure_future(moving)
    while not task.done():
        readings.append(await meter.read())
        await asyncio.sleep(0.02)
    return readings, task.result()


def _check(readings: list[ProgressMessage]) -> None:
    done = [one.done_bytes for one in readings]
    assert done == sorted(done)
    assert len({count for count in done if 0 < count < _SIZE}) >= _LEAST
    assert all(one.done_bytes <= one.total_bytes for one in readings if one.total_bytes)
    assert any(one.bytes_per_second for one in readings)


@pytest.mark.sample("Filesystem")
@pytest.mark.parametrize("mode", list(VolumeMode), ids=str)
async def test_progress_is_frequent_and_never_decreases(
    mover_repository: Repository, tmp_path: Path, mode: VolumeMode
) -> None:
    file = make_large_file(tmp_path / "volume" / "file", _SIZE >> 20)
    target = tmp_path / "target"
    device = mode is VolumeMode.BLOCK
    if device:
        target.touch()
        os.truncate(target, _SIZE)

    async def unheard(message: str) -> None:
        pytest.fail(message)

    data_path = backup_data_path(unheard)
    request = BackupParameters(file if device else file.parent, mode, "some/volume", parallel=2)
    out, backup = await _watch(back_up(mover_repository, request, data_path), data_path.meter)
    assert isinstance(backup, BackupResult)
    data_path = restore_data_path()
    wanted = RestoreParameters(backup.snapshot_id, target, mode, 2)
    back, _ = await _watch(restore(mover_repository, wanted, data_path), data_path.meter)
    _check(out)
    _check(back)
    # Known before the first byte: the size of a device, and of a snapshot from its manifest.
    for readings in [back, *([out] if device else [])]:
        assert {one.total_bytes for one in readings if one.done_bytes} == {_SIZE}
