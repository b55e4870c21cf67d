"""When a transfer stands still: how long until somebody is told, and until it is given up.

Knows spans and what they are measured by. Does not know kopia, storages or who is told.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.errors import ConfigError
from core.models.units import parse_duration

__all__ = ["StallLimits", "Standstill", "read_stall_limits"]

_VARIABLE: Final = "DATA_MOVER_STALL_TIMEOUT"
"""Movers in pods inherit it from the node agent's DaemonSet."""

_WARN_SECONDS: Final = 120.0
"""kopia tries one file of the repository again for about this long where an endpoint refuses connections."""

_LOOK_SECONDS: Final = 5.0
_LOOKS_A_WARNING: Final = 4

_LONGEST_STEP_SECONDS: Final = 60.0
"""A container that was frozen for hours had no chance to move anything: its pause counts as this much."""

_ANSWERING_FACTOR: Final = 6


@dataclass(frozen=True)
class StallLimits:
    """How long a transfer may stand still; a `give_up` of 0 is for ever.

    The default outlasts kopia's own tries for one file of the repository, an endpoint that is
    restarted or moved, and a bucket that is throttled. A hole, however large, is no standstill:
    its zeros count as read. What stands still without a fault is an upload of a few parts of
    20 MiB over a very slow line, or a file that is fetched from a tape: so a transfer whose
    repository answers is given up six times later.
    """

    give_up: timedelta = timedelta(minutes=10)

    @property
    def warn_seconds(self) -> float:
        """After how long somebody is told first; then after each doubling."""
        return min(_WARN_SECONDS, self.give_up.total_seconds() / 2 or _WARN_SECONDS)

    @property
    def look_seconds(self) -> float:
        """How often to look."""
        return min(_LOOK_SECONDS, self.warn_seconds / _LOOKS_A_WARNING)

    def give_up_seconds(self, *, answers: bool) -> float:
        """After how long the transfer fails; `answers` says whether its repository does."""
        return (self.give_up.total_seconds() or float("inf")) * (_ANSWERING_FACTOR if answers else 1)


def read_stall_limits(environment: Mapping[str, str]) -> StallLimits:
    """Return the limits that `DATA_MOVER_STALL_TIMEOUT` sets, such as 30m; 0 is for ever.

    Raises:
        ConfigError: its value is no span of time.
    """
    text = environment.get(_VARIABLE, "")
    if not text:
        return StallLimits()
    try:
        give_up = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"{_VARIABLE}: {e}") from e
    if give_up < timedelta(0):
        raise ConfigError(f"{_VARIABLE}: {text!r} is less than nothing")
    return StallLimits(give_up)


class Standstill:
    """How long nothing has moved, and when that is a matter for somebody."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._seen: Hashable = None
        self._told_seconds = 0.0
        self.idle_seconds = 0.0

    @property
    def idle(self) -> timedelta:
        """How long nothing has moved."""
        return timedelta(seconds=round(self.idle_seconds))

    def take(self, seen: Hashable, elapsed_seconds: float) -> bool:
        """Look once more, so long after the last time; return whether it is time to tell, or to give up.

        `seen` is another value whenever something has moved.
        """
        if seen != self._seen:
            self._seen = seen
            self.idle_seconds = self._told_seconds = 0.0
            return False
        self.idle_seconds += min(elapsed_seconds, _LONGEST_STEP_SECONDS)
        if self.idle_seconds < self._next_seconds():
            return False
        self._told_seconds = self.idle_seconds
        return True

    def too_long(self, *, answers: bool) -> bool:
        """Whether the transfer is to be given up; `answers` says whether its repository does."""
        return self.idle_seconds >= self._limits.give_up_seconds(answers=answers)

    def _next_seconds(self) -> float:
        """After how long it is time again."""
        told, limits = self._told_seconds, self._limits
        if not told:
            return limits.warn_seconds
        ends = (limits.give_up_seconds(answers=answers) for answers in (False, True))
        return min([2 * told, *(end for end in ends if end > told)])
