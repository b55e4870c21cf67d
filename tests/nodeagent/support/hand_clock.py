"""A clock that a test sets."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = ["NOON", "HandClock"]

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class HandClock:
    """Shows `seconds` after noon; sleeping is not supported."""

    seconds: float = 0.0

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError
