"""How fast volumes move, and how long they still take, from readings of their transfers. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Protocol

from core.models.phases import Phase

__all__ = ["Moving", "MovingVolume", "ProgressMeter", "VolumeProgress"]

_WINDOW_SECONDS: Final = 30.0
"""Movers report every few seconds, and by leaps: a rate over less time would jump."""


class MovingVolume(Protocol):
    """A volume of a backup or of a restore, by its transfer: what its row shows. Sizes in bytes."""

    @property
    def namespace(self) -> str: ...  # noqa: D102 - as in the models
    @property
    def claim(self) -> str: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def transfer(self) -> str: ...  # noqa: D102
    @property
    def phase(self) -> Phase: ...  # noqa: D102
    @property
    def reason(self) -> str: ...  # noqa: D102
    @property
    def message(self) -> str: ...  # noqa: D102
    @property
    def attempt(self) -> int: ...  # noqa: D102
    @property
    def bytes_done(self) -> int: ...  # noqa: D102
    @property
    def total_bytes(self) -> int: ...  # noqa: D102
    @property
    def created(self) -> datetime | None: ...  # noqa: D102
    @property
    def completed(self) -> datetime | None: ...  # noqa: D102


class Moving(Protocol):
    """A backup or a restore."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def created(self) -> datetime | None: ...  # noqa: D102
    @property
    def expected(self) -> int | None: ...  # noqa: D102
    @property
    def missing(self) -> int: ...  # noqa: D102
    @property
    def volumes(self) -> Sequence[MovingVolume]: ...  # noqa: D102


@dataclass(frozen=True)
class VolumeProgress:
    """One volume, with its rate over the last seconds; None: it is not known."""

    volume: MovingVolume
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
    """Remembers the readings of volumes, by their transfers; times are of a monotonic clock."""

    _readings: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def read(self, whole: Moving, at: float) -> list[VolumeProgress]:
        """Return the progress of each volume of a backup or of a restore, as it was at `at`."""
        return [VolumeProgress(volume, self._rate(volume, at)) for volume in whole.volumes]

    def _rate(self, volume: MovingVolume, at: float) -> float | None:
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
