"""Clock for tests that follows the running loop, so that looptime controls all time."""

import asyncio
import math
from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class LoopClock:
    """A Clock that reads `NOON` plus the loop's time, and `NOON` where no loop runs; `skew` moves its wall clock."""

    def __init__(self, skew: timedelta = timedelta()) -> None:
        self._skew = skew

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.monotonic()) + self._skew

    def monotonic(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0

    async def sleep(self, seconds: float) -> None:
        # looptime counts whole microseconds: a timer between two of them is never reached.
        await asyncio.sleep(math.ceil(seconds * 1000) / 1000)
