"""One transfer through kopia, and whoever cares for it: progress is read, a standstill is told and ended.

Knows how a standstill is noticed and what is said of it. Does not know what is moved, or how
a repository is asked whether it answers.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.errors import AgentError, DataPathError, RepositoryError
from core.models.units import format_duration
from datamover.canceller import Canceller, run_beside, run_unless_canceled
from datamover.kopia import Kopia, KopiaAnswer, KopiaFiles
from datamover.progress import Meter
from datamover.repository import Reachability
from datamover.stall import StallLimits, Standstill

__all__ = ["Care", "Transfer", "Warn"]

_logger = logging.getLogger(__name__)

_KEPT_WORDS: Final = 5

Warn = Callable[[str], Awaitable[None]]
"""Tells whoever waits for a load of something that does not fail it."""


@dataclass(frozen=True)
class Care:
    """Who hears of a transfer's troubles, and how a standstill is looked into.

    `ask` tells whether the repository answers; it may take half a minute.
    """

    clock: Clock
    warn: Warn
    ask: Callable[[], Awaitable[Reachability]]
    limits: StallLimits = field(default_factory=StallLimits)


class Transfer:
    """A transfer that is measured by `meter` and cared for as `care` says."""

    def __init__(self, meter: Meter, care: Care) -> None:
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
        still = Standstill(limits)
        last = clock.monotonic()
        while True:
            await clock.sleep(limits.look_seconds)
            await self.meter.refresh()
            now = clock.monotonic()
            due, last = still.take(self.meter.activity, now - last), now
            if due and (error := await self._look_into(attempted, still)):
                canceller.fail(error)
                return

    async def _look_into(self, attempted: str, still: Standstill) -> AgentError | None:
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
