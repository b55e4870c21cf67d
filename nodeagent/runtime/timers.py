"""Timers: how long this process has observed something, on its monotonic clock.

What may end a transfer, delete an object or skip a pause is measured here and never by a timestamp:
that is from the wall clock of another machine, and either clock may be wrong. A restarted process
begins with empty timers.
"""

from collections.abc import Set as AbstractSet

from core.clock import Clock

__all__ = ["Timers"]


class Timers:
    """One timer per key, such as the UID of a transfer."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._started: dict[str, tuple[str, float]] = {}

    def seconds(self, key: str, of: str = "") -> float:
        """Return how long `of` has been observed for `key`; 0.0 at first, and after something else was observed.

        In whole milliseconds: the rest of a timeout is then 0.0, and not a rounding error, when it is over.
        """
        now = self._clock.monotonic()
        started = self._started.get(key)
        if started is None or started[0] != of:
            started = self._started[key] = (of, now)
        return round(now - started[1], 3)

    def forget(self, key: str) -> None:
        """Remove the timer of `key`."""
        self._started.pop(key, None)

    def retain(self, keys: AbstractSet[str]) -> None:
        """Remove all timers but the ones of `keys`."""
        for key in self._started.keys() - keys:
            del self._started[key]

    def __len__(self) -> int:
        """Return the number of timers."""
        return len(self._started)
