"""The two directions of a data mover's traffic, each with a rate that all of its connections share.

Knows how much may pass when. Does not know what passes (`datamover.bandwidth.relay`).
"""

from typing import Final

from core.clock import Clock
from core.models.bandwidth import BandwidthLimits

__all__ = ["Lane", "Lanes"]

_BURST_SECONDS: Final = 0.25
"""So much of what was not used in the last moment may pass later: this process may get no CPU for a while. A second
has at most a quarter more than its rate, then, and what was received ahead."""

_PIECES_PER_SECOND: Final = 64
"""A connection sends a piece, then it is the turn of the others. It receives one piece ahead of its turn."""

_LARGEST_PIECE_BYTES: Final = 2**20


class Lane:
    """One direction; a `rate` of 0 bytes per second is no limit."""

    def __init__(self, clock: Clock, rate: int = 0) -> None:
        self._clock = clock
        self.rate = rate
        self._free_at = clock.monotonic()

    @property
    def piece_bytes(self) -> int:
        """The most that a connection may pass at once."""
        return min(self.rate // _PIECES_PER_SECOND or 1, _LARGEST_PIECE_BYTES) if self.rate else _LARGEST_PIECE_BYTES

    async def take(self, size_bytes: int) -> None:
        """Return once so many bytes may pass, in the order of the calls."""
        if not self.rate:
            return
        now = self._clock.monotonic()
        begin = max(self._free_at, now - _BURST_SECONDS)
        self._free_at = begin + size_bytes / self.rate
        if begin > now:
            await self._clock.sleep(begin - now)


class Lanes:
    """Both directions, as seen from the node; without limits at first."""

    def __init__(self, clock: Clock) -> None:
        self.upload = Lane(clock)
        self.download = Lane(clock)

    def limit(self, limits: BandwidthLimits) -> None:
        """Apply other limits from now on."""
        self.upload.rate = limits.upload_bytes_per_second
        self.download.rate = limits.download_bytes_per_second
