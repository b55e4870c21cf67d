"""A clock that a test sets."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class HandClock:
    """Shows `seconds` after noon, on a wall clock that is ahead by `skew`; sleeping is not supported.

    What renews a Lease in the background sleeps until it is canceled.
    """

    seconds: float = 0.0
    skew: timedelta = timedelta()

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds) + self.skew

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("renewal"):
            await asyncio.Event().wait()
        self.step(seconds)

    def step(self, seconds: float) -> None:
        raise NotImplementedError


class FreeClock(HandClock):
    """Sleeping takes no time, and moves it on."""

    def step(self, seconds: float) -> None:
        self.seconds += seconds
