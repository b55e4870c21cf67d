"""How fast the volumes of a backup move, and how long they still take, from readings of their transfers. Pure."""

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from core.models.phases import Phase
from nodeagent.operations.backups.view import Backup, BackupVolume

__all__ = ["ProgressMeter", "VolumeProgress"]

_WINDOW_SECONDS: Final = 30.0
"""Movers report every few seconds, and by leaps: a rate over less time would jump."""


@dataclass(frozen=True)
class VolumeProgress:
    """One volume, with its rate over the last seconds; None: it is not known."""

    volume: BackupVolume
    bytes_per_second: float | None = None

    @property
    def remaining(self) -> timedelta | None:
        """How long it still takes at that rate; None: that is not known."""
        left = self.volume.total_bytes - self.volume.bytes_done
        if not self.bytes_per_second or left <= 0:
            return None
        return timedelta(seconds=left / self.bytes_per_second)


@dataclass
class ProgressMeter:
    """Remembers the readings of a backup's volumes, by their transfers; times are of a monotonic clock."""

    _readings: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def read(self, backup: Backup, at: float) -> list[VolumeProgress]:
        """Return the progress of each volume, of the backup as it was at `at`."""
        return [VolumeProgress(volume, self._rate(volume, at)) for volume in backup.volumes]

    def _rate(self, volume: BackupVolume, at: float) -> float | None:
        if volume.phase is not Phase.IN_PROGRESS:
            self._readings.pop(volume.transfer, None)
            return None
        readings = self._readings.setdefault(volume.transfer, deque())
        if readings and volume.bytes_done < readings[-1][1]:
            # Another attempt began.
            readings.clear()
        readings.append((at, volume.bytes_done))
        while len(readings) > 2 and at - readings[1][0] >= _WINDOW_SECONDS:  # noqa: PLR2004 - two make a rate
            readings.popleft()
        began, first = readings[0]
        return (volume.bytes_done - first) / (at - began) if at > began else None
