"""Why loads wait, and when to look at them again.

Knows for each load what it waits for, what its reader was told last, and how often it was
looked at in vain. Does not know the cluster, nor who tells. A restarted agent begins anew.
"""

import re
from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from exposer.model import Pending

__all__ = ["Telling", "Waits"]

_LOOK_SECONDS: Final = 5.0
"""Source: Velero v1.18 looks at a constrained load so often."""

_QUICK_SECONDS: Final = (1.0, 2.0, 4.0)
"""The first looks after a step of ours: what it set going is mostly done by then."""

_QUICK_LOOKS: Final = 6
_QUICK_WINDOW_SECONDS: Final = 60.0
"""A load has so many quick looks in this time: reasons that take turns must not become a loop."""

_GRACE_SECONDS: Final = 3.0
"""A wait that is over sooner is part of every good run: telling it would only cost writes. Trouble is told at once."""

_SAME_REASON_PAUSE_SECONDS: Final = 10.0
"""Other words for the same reason are written at most so often: some count seconds."""

_OTHER_CAUSE_PAUSE_SECONDS: Final = 4.0
"""For trouble whose words name another cause by now: less than the pause between two looks."""

_NUMBERS: Final = re.compile(r"\d+")
_NOTHING: Final = Pending("", "")


@dataclass(slots=True)
class _Wait:
    current: Pending = _NOTHING
    since_seconds: float = 0.0
    looks: int = 0
    quick_looks: int = 0
    quick_since_seconds: float = 0.0
    told: Pending = _NOTHING
    told_at_seconds: float = 0.0
    rests_until_seconds: float = 0.0


_NO_WAIT: Final = _Wait()


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
        wait, now = self._waits.setdefault(uid, _Wait()), self._clock.monotonic()
        looks, wait.looks = wait.looks, wait.looks + 1
        if now - wait.quick_since_seconds >= _QUICK_WINDOW_SECONDS:
            wait.quick_looks, wait.quick_since_seconds = 0, now
        if looks >= len(_QUICK_SECONDS) or wait.quick_looks >= _QUICK_LOOKS:
            return _LOOK_SECONDS
        wait.quick_looks += 1
        return _QUICK_SECONDS[looks]

    def note_step(self, uid: str, waiting: Pending) -> None:
        """Note that the load waits for `waiting`, which nobody is told; another one than before is looked at soon."""
        wait = self._waits.setdefault(uid, _Wait())
        if waiting != wait.current:
            wait.current, wait.looks, wait.rests_until_seconds = waiting, 0, 0.0

    def decide_telling(self, uid: str, waiting: Pending, *, at_once: bool = False) -> Telling:
        """Note that the load waits for `waiting`; return what is to be said about it now.

        `at_once`: looking again, to tell it if it lasts, would cost more than telling it.
        """
        wait, now = self._waits.setdefault(uid, _Wait()), self._clock.monotonic()
        if waiting.reason != wait.current.reason:
            wait.since_seconds, wait.looks, wait.rests_until_seconds = now, 0, 0.0
        wait.current = waiting
        if waiting.reason != wait.told.reason:
            lasts = at_once or waiting.blocked or now >= wait.since_seconds + _GRACE_SECONDS
            return Telling(message=lasts, event=lasts)
        other_cause = waiting.blocked and _gist(waiting.message) != _gist(wait.told.message)
        pause_seconds = _OTHER_CAUSE_PAUSE_SECONDS if other_cause else _SAME_REASON_PAUSE_SECONDS
        pause_over = now - wait.told_at_seconds >= pause_seconds
        return Telling(message=waiting.message != wait.told.message and pause_over, event=other_cause and pause_over)

    def rest(self, uid: str, seconds: float) -> None:
        """Note that for so long nothing is gained by another look, as long as the load waits for the same."""
        self._waits.setdefault(uid, _Wait()).rests_until_seconds = self._clock.monotonic() + seconds

    def seconds_to_rest(self, uid: str) -> float:
        """Return for how long nothing is gained by another look at a load that still waits for the same."""
        wait = self._waits.get(uid, _NO_WAIT)
        return max(0.0, wait.rests_until_seconds - self._clock.monotonic())

    def seconds_to_telling(self, uid: str) -> float:
        """Return after how long a wait that was not told is worth telling, if it is no trouble."""
        wait = self._waits.get(uid, _NO_WAIT)
        return max(0.0, wait.since_seconds + _GRACE_SECONDS - self._clock.monotonic())

    def told(self, uid: str, waiting: Pending) -> None:
        """Note that the reader was told `waiting`."""
        wait = self._waits.setdefault(uid, _Wait())
        wait.told, wait.told_at_seconds = waiting, self._clock.monotonic()

    def is_told(self, uid: str, reason: str) -> bool:
        """Whether the reader was told that the load waits for `reason`."""
        return uid in self._waits and self._waits[uid].told.reason == reason

    def told_message(self, uid: str) -> str:
        """Return what the reader was told last; empty where that is nothing."""
        return self._waits[uid].told.message if uid in self._waits else ""

    def last_reason(self, uid: str) -> str:
        """Return the reason of what the load waits for, told or not; empty where nothing is known."""
        return self._waits.get(uid, _NO_WAIT).current.reason

    def last_message(self, uid: str) -> str:
        """Return what the load waits for, told or not; empty where nothing is known."""
        return self._waits[uid].current.message if uid in self._waits else ""

    def forget(self, uid: str) -> None:
        """Drop what is remembered about that load."""
        self._waits.pop(uid, None)


def _gist(message: str) -> str:
    """Return what two messages about one cause have in common: all but the numbers."""
    return _NUMBERS.sub("", message)
