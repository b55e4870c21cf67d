"""The time that a benchmark spends in each stage, and what it does now.

Knows a clock and standard error. Does not know what is done in a stage.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from core.clock import Clock

_NO_STAGE: Final = "anything else"


class Stages:
    """Counts each moment for one stage: one that begins within another stops the other's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._since = clock.monotonic()
        self._open = [_NO_STAGE]
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def seconds(self) -> float:
        """The time since the beginning."""
        return self._clock.monotonic() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what passes for the stage called `name`; there may be many of that name."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def say(self, text: str) -> None:
        """Print to standard error, with the time since the beginning."""
        sys.stderr.write(f"[{self.seconds:4.0f} s] {text}\n")

    def line(self) -> str:
        """Return how long each stage took, the longest first; all together are the time since the beginning."""
        self._count()
        taken = sorted(self._seconds.items(), key=lambda each: each[1], reverse=True)
        return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in taken)

    def _count(self) -> None:
        now = self._clock.monotonic()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
