"""Time, through one door.

Knows the wall clock, the monotonic clock and deadlines measured on it. Does not know what
anybody waits for. Tests inject a clock of their own.

How long to wait between failures.

Knows exponential growth with jitter. Does not know what failed, and does not wait itself.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

__all__ = ["Backoff", "Clock", "Deadline", "SystemClock"]


class Clock(Protocol):
    """The time of day (UTC), a monotonic reading in seconds, and sleeping."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment on a clock's monotonic scale, passed down instead of a number of seconds."""

    clock: Clock
    at_seconds: float

    @classmethod
    def after(cls, clock: Clock, span: timedelta) -> "Deadline":
        """Return the deadline that lies `span` from now."""
        return cls(clock, clock.monotonic() + span.total_seconds())

    @property
    def remaining_seconds(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_seconds - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.remaining_seconds <= 0.0


@dataclass(frozen=True)
class Backoff:
    """Waits from `first_seconds` to `limit_seconds`, each twice as long as the one before."""

    first_seconds: float
    limit_seconds: float

    def seconds_after(self, failures: int) -> float:
        """Return the wait after so many failures in a row (1 is the first).

        It is between half and all of what the number says, so that those who failed together
        do not come back together.
        """
        # Beyond 2^30 the limit holds in any case, and a float does not overflow.
        full = min(self.limit_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - guards no secret
