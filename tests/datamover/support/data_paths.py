"""Data paths for tests of a backup or restore, without a reporter."""

from unittest.mock import AsyncMock

from core.clock import Clock, SystemClock
from datamover.data_path.run import DataPath
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.stalls import Reachability, Report, StallLimits, Watchdog


def build_data_path(
    direction: Direction, warn: Report, clock: Clock | None = None, *, limits: StallLimits | None = None
) -> DataPath:
    clock = clock or SystemClock()
    probe = AsyncMock(return_value=Reachability(reachable=True, message="the repository answers"))
    return DataPath(Meter(clock, direction), Watchdog(clock, warn, probe, limits or StallLimits()))


def backup_data_path(warn: Report | None = None) -> DataPath:
    return build_data_path(Direction.BACKUP, warn or AsyncMock())


def restore_data_path() -> DataPath:
    return build_data_path(Direction.RESTORE, AsyncMock())
