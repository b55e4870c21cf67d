"""Why loads wait, and when to look at them again.

Knows for each load what its reader was told last and how often it was looked at in vain.
Does not know the cluster, nor who tells. A restarted agent tells each reason once more.
"""

from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from exposer.model import Waiting

__all__ = ["Telling", "Waits"]

_BACKOFF_SECONDS: Final = (1.0, 2.0, 4.0, 5.0)
"""Source: Velero v1.18 looks at a constrained load every 5 s; ours begins sooner."""

_SAME_REASON_PAUSE_SECONDS: Final = 10.0
"""Other words for the same reason are written at most so often: some count seconds."""


@dataclass
class _Wait:
    looks: int = 0
    reason: str = ""
    message: str = ""
    told_at_seconds: float = 0.0


@dataclass(frozen=True)
class Telling:
    """What is to be said about a wait: the message in the status, an Event, or nothing."""

    message: bool = False
    event: bool = False


class Waits:
    """The waits of one agent's loads, by uid."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def seconds_to_next_look(self, uid: str) -> float:
        """Return the pause before the next look at that load, longer each time."""
        wait = self._waits.setdefault(uid, _Wait())
        seconds = _BACKOFF_SECONDS[min(wait.looks, len(_BACKOFF_SECONDS) - 1)]
        wait.looks += 1
        return seconds

    def decide_telling(self, uid: str, waiting: Waiting) -> Telling:
        """Return what is to be said now about `waiting`, given what was said before."""
        wait = self._waits.setdefault(uid, _Wait())
        if waiting.reason != wait.reason:
            return Telling(message=True, event=True)
        pause_over = self._clock.monotonic() >= wait.told_at_seconds + _SAME_REASON_PAUSE_SECONDS
        return Telling(message=waiting.message != wait.message and pause_over)

    def told(self, uid: str, waiting: Waiting) -> None:
        """Note that the reader was told `waiting`."""
        wait = self._waits.setdefault(uid, _Wait())
        if waiting.reason != wait.reason:
            wait.looks = 0
        wait.reason, wait.message = waiting.reason, waiting.message
        wait.told_at_seconds = self._clock.monotonic()

    def last_message(self, uid: str) -> str:
        """Return what the reader was told last, empty where nothing was."""
        return self._waits[uid].message if uid in self._waits else ""

    def forget(self, uid: str) -> None:
        """Drop what is remembered about that load."""
        self._waits.pop(uid, None)
