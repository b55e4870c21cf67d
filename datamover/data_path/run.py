"""One transfer through kopia, and whoever cares for it: progress is read, a standstill is told and ended.

Knows how a standstill is noticed and what is said of it. Does not know what is moved, or how
a repository is asked whether it answers.

When a transfer stands still: how long until somebody is told, and until it is given up.

Knows spans and what they are measured by. Does not know kopia, storages or who is told.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.errors import AgentError, ConfigError, DataPathError, RepositoryError
from core.models.units import format_duration, parse_duration
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Reachability
from datamover.runtime.cancellation import Canceller, run_beside, run_unless_canceled

__all__ = ["DataPath", "StallDetector", "StallLimits", "Warn", "Watchdog", "read_stall_limits"]


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


class StallDetector:
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


_logger = logging.getLogger(__name__)


_KEPT_WORDS: Final = 5


Warn = Callable[[str], Awaitable[None]]
"""Tells whoever waits for a load of something that does not fail it."""


@dataclass(frozen=True)
class Watchdog:
    """Who hears of a transfer's troubles, and how a standstill is looked into.

    `ask` tells whether the repository answers; it may take half a minute.
    """

    clock: Clock
    warn: Warn
    ask: Callable[[], Awaitable[Reachability]]
    limits: StallLimits = field(default_factory=StallLimits)


class DataPath:
    """A transfer that is measured by `meter` and cared for as `care` says."""

    def __init__(self, meter: Meter, care: Watchdog) -> None:
        self.meter = meter
        self._care = care
        self._words: deque[str] = deque(maxlen=_KEPT_WORDS)

    @property
    def clock(self) -> Clock:
        """What its time is measured by."""
        return self._care.clock

    async def warn(self, message: str) -> None:
        """Tell of something that does not fail the transfer."""
        await self._care.warn(message)

    async def run(self, kopia: Kopia, attempted: str, *arguments: str, files: KopiaFiles | None = None) -> KopiaAnswer:
        """Return kopia's answer, however long the transfer takes, as long as something moves.

        Cancellation kills kopia, which then leaves nothing behind.

        Raises:
            RepositoryError: nothing has moved for too long, and the repository does not answer.
            DataPathError: nothing has moved for far too long, although it does.
        """
        canceller = Canceller()

        async def transfer() -> KopiaAnswer:
            moving = kopia.transfer(
                attempted,
                *self.meter.arguments,
                *arguments,
                files=files or KopiaFiles(),
                listener=self,
            )
            return await run_beside(lambda: self._watch(attempted, canceller), moving, name="standstill")

        return await run_unless_canceled(transfer, canceller)

    async def wait_for(self, work: Awaitable[None], doing: str) -> None:
        """Return when `work` has; where that takes long it is told that the mover is still `doing` it."""

        async def tell() -> None:
            waited, span = 0.0, self._care.limits.warn_seconds
            while True:
                await self.clock.sleep(span - waited)
                waited, span = span, 2 * span
                await self.warn(f"still {doing} after {format_duration(timedelta(seconds=round(waited)))}")

        await run_beside(tell, work, name="patience")

    def take(self, line: str) -> str:
        """Take what a line of kopia's tells of progress; return the rest of it."""
        return self.meter.take(line)

    def hear(self, words: str) -> None:
        """Keep what else kopia said, for whoever hears of a standstill."""
        self._words.append(words)

    async def _watch(self, attempted: str, canceller: Canceller) -> None:
        """Look whether something moves, until the transfer has stood still for too long."""
        clock, limits = self._care.clock, self._care.limits
        still = StallDetector(limits)
        last = clock.monotonic()
        while True:
            await clock.sleep(limits.look_seconds)
            await self.meter.refresh()
            now = clock.monotonic()
            due, last = still.take(self.meter.activity, now - last), now
            if due and (error := await self._look_into(attempted, still)):
                canceller.fail(error)
                return

    async def _look_into(self, attempted: str, still: StallDetector) -> AgentError | None:
        """Tell of a standstill, and return what the transfer fails with if it was too long."""
        before = self.meter.activity
        reachability = await self._care.ask()
        await self.meter.refresh()
        if self.meter.activity != before:
            return None
        shown = format_duration(still.idle)
        if still.too_long(answers=reachability.answers):
            text = "\n".join([f"{attempted}: no progress for {shown}: {reachability.told}", *self._words])
            return DataPathError(text) if reachability.answers else RepositoryError(text)
        said = f"; kopia's last words: {self._words[-1]}" if self._words else ""
        await self._care.warn(f"no progress for {shown}: {reachability.told}{said}")
        return None
