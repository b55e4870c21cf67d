"""Data paths for tests of a backup or restore, without a reporter."""

from unittest.mock import AsyncMock

from core.clock import Clock, SystemClock
from datamover.data_path.run import DataPath, StallLimits, Warn, Watchdog
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Reachability

__all__ = ["restoring", "transfer", "uploading"]


def transfer(
    direction: Direction, warn: Warn, clock: Clock | None = None, *, limits: StallLimits | None = None
) -> DataPath:
    clock = clock or SystemClock()
    ask = AsyncMock(return_value=Reachability(reachable=True, message="the repository answers"))
    return DataPath(Meter(clock, direction), Watchdog(clock, warn, ask, limits or StallLimits()))


def uploading(warn: Warn | None = None) -> DataPath:
    return transfer(Direction.BACKUP, warn or AsyncMock())


def restoring() -> DataPath:
    return transfer(Direction.RESTORE, AsyncMock())
