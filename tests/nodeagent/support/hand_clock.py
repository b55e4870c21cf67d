"""A clock that a test turns by hand."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

__all__ = ["NOON", "HandClock"]

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class HandClock:
    """Reads `seconds` after noon; nobody may sleep on it."""

    seconds: float = 0.0

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError
