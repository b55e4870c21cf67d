"""How long the whole benchmark may take, and each of its scenarios.

Knows the time that is left, and that later scenarios want some of it. Does not know the scenarios.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["Budget", "usual_minutes"]

_ENOUGH_CORES: Final = 4
_MINUTES: Final = 25.0
_MINUTES_ON_FEW_CORES: Final = 40.0

_END_SECONDS: Final = 30.0
"""For the table, and for servers to end."""

_KEPT_SHARE: Final = 0.5
"""Of the time that later scenarios usually take, so much is kept for them: a slow one may take the rest."""


def usual_minutes() -> float:
    """Return how long all of it may take on this machine."""
    return _MINUTES if (os.cpu_count() or 1) >= _ENOUGH_CORES else _MINUTES_ON_FEW_CORES


class Budget:
    """The time there is, from now on."""

    def __init__(self, minutes: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now, on `clock`, which returns seconds."""
        self._clock = clock
        self._until = clock() + minutes * 60 - _END_SECONDS

    @property
    def left_seconds(self) -> float:
        """How much time is left for scenarios."""
        return max(0.0, self._until - self._clock())

    def share(self, later: Sequence[float]) -> float:
        """Return how many seconds the next scenario may take.

        Args:
            later: how many seconds each one after it usually takes.
        """
        return max(0.0, self.left_seconds - _KEPT_SHARE * sum(later))
