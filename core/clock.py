"""Clocks, deadlines and backoff.

All code reads time through a `Clock`, so that tests can inject one.
"""

import asyncio
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The time of day (UTC), a monotonic reading in seconds, and sleeping."""

    def now(self) -> datetime:
        """Return the time of day in UTC."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class SystemClock:
    """The clocks of the machine; `offset` moves the wall clock, for tests."""

    def __init__(self, offset: timedelta = timedelta()) -> None:
        self._offset = offset

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.now(UTC) + self._offset

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Deadline:
    """A point in time on a clock's monotonic scale, passed down instead of a number of seconds."""

    clock: Clock
    at_seconds: float

    @classmethod
    def after(cls, clock: Clock, timeout: timedelta) -> "Deadline":
        """Return the deadline that is `timeout` from now."""
        return cls(clock, clock.monotonic() + timeout.total_seconds())

    @property
    def remaining_seconds(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_seconds - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining_seconds <= 0.0


@dataclass(frozen=True)
class Backoff:
    """Exponential delays from `first_seconds` to `limit_seconds`, doubling with each failure."""

    first_seconds: float
    limit_seconds: float

    def seconds_after(self, failures: int) -> float:
        """Return the delay after that many consecutive failures (1 is the first).

        It is between half and all of the nominal delay: clients that failed together do not retry together.
        """
        # Beyond 2^30 the limit applies in any case; capping the exponent keeps the float finite.
        full = min(self.limit_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - guards no secret
