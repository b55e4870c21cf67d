"""Data paths for tests of a backup or restore, without a reporter, and whole backups and restores of volumes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from core.clock import Clock, SystemClock
from core.contract import BackupResult, RestoreResult, VolumeMode
from core.models.transfer_settings import InPlace
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import Reachability, Report, StallLimits, Watchdog
from datamover.local.command import LocalMover
from tests.datamover.support.plainkopia import PlainKopia


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


INCREMENTAL = InPlace(incremental=True)


@dataclass(frozen=True)
class VolumeBed:
    """A repository, kopia by itself on it, and a folder for a volume and what becomes of it."""

    movers: Repository
    kopia: PlainKopia
    folder: Path

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    def write(self, *names: str, text: str | None = None) -> Path:
        """Write files of the volume with that text, or else their names, and return the volume."""
        for name in names:
            (self.volume / name).parent.mkdir(parents=True, exist_ok=True)
            (self.volume / name).write_text(name if text is None else text)
        return self.volume

    async def back_up(self, data_path: DataPath | None = None, **more: Any) -> BackupResult:
        return await back_up_volume(self.movers, self.volume, data_path, **more)

    async def snapshot(self, volume: Path | None = None, **more: Any) -> str:
        """Back up the volume, or another one, and return the ID of the snapshot."""
        return (await back_up_volume(self.movers, volume or self.volume, **more)).snapshot_id

    async def restore(self, snapshot_id: str, target: Path, **more: Any) -> RestoreResult:
        return await restore_volume(self.movers, snapshot_id, target, **more)

    async def restore_in_place(
        self, snapshot_id: str, rule: InPlace = INCREMENTAL, target: Path | None = None
    ) -> RestoreResult:
        return await self.restore(snapshot_id, target or self.volume, in_place=rule)
