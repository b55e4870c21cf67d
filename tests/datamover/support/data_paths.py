"""Data paths for tests of a backup or restore, without a reporter, and whole backups and restores of volumes."""

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from core.clock import Clock, SystemClock
from core.contract import BackupResult, RestoreResult, VolumeMode
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import Reachability, Report, StallLimits, Watchdog
from datamover.local.command import LocalMover


def build_data_path(
    direction: Direction, warn: Report, clock: Clock | None = None, *, limits: StallLimits | None = None
) -> DataPath:
    clock = clock or SystemClock()
    probe = AsyncMock(return_value=Reachability(reachable=True, message="the repository answers"))
    return DataPath(Meter(clock, direction), Watchdog(clock, warn, probe, limits or StallLimits()))


def backup_data_path(warn: Report | None = None) -> DataPath:
    return build_data_path(Direction.BACKUP, warn or AsyncMock())


def restore_data_path(warn: Report | None = None) -> DataPath:
    return build_data_path(Direction.RESTORE, warn or AsyncMock())


def backup_parameters(volume: Path, **more: Any) -> BackupParameters:
    """Return the parameters for a backup of a file system with the source path `some/volume`, but for `more`."""
    given: dict[str, Any] = {"mode": VolumeMode.FILESYSTEM, "source": "some/volume", "parallel": 2}
    return BackupParameters(volume, **given | more)


def restore_parameters(snapshot_id: str, target: Path, **more: Any) -> RestoreParameters:
    """Return the parameters for a restore of a file system, but for `more`."""
    given: dict[str, Any] = {"mode": VolumeMode.FILESYSTEM, "workers": 2, "packs": 2}
    return RestoreParameters(snapshot_id, target, **given | more)


async def back_up_volume(
    repository: Repository, volume: Path, data_path: DataPath | None = None, **more: Any
) -> BackupResult:
    return await back_up(repository, backup_parameters(volume, **more), data_path or backup_data_path())


async def copy_volume(mover: LocalMover, volume: Path) -> tuple[BackupResult, Path]:
    """Back up a volume and restore it beside it; return the result of the backup, and the target."""
    backup, out = await mover.back_up(volume, "", None), volume.with_name("out")
    await mover.restore(backup.snapshot_id, out, None)
    return backup, out


async def restore_volume(
    repository: Repository, snapshot_id: str, target: Path, data_path: DataPath | None = None, **more: Any
) -> RestoreResult:
    return await restore(repository, restore_parameters(snapshot_id, target, **more), data_path or restore_data_path())
