"""Loads that only the queue holds back, each told so once.

Knows who was told, by this dispatcher or one before it. Does not know how a load is looked at
(`nodeagent.admission`), nor how many places there are (`nodeagent.dispatcher`).
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from core.clock import Clock
from nodeagent.admission import HELD_BACK, Examiner, Look
from nodeagent.crowds import NODE_BUSY
from nodeagent.load_index import Entry
from nodeagent.runtime.tasks import attempt

__all__ = ["HeldBack"]

_LASTS_SECONDS: Final = 10.0
"""So long a node must have had room for a load that it held back, before its reader is told that it is the queue
now: room comes and goes, and each time would be a look and a write."""


class HeldBack:
    """Tells loads that they have to wait for a place."""

    def __init__(
        self, examiner: Examiner, clock: Clock, examine: Callable[[Sequence[Entry]], Awaitable[list[Look]]]
    ) -> None:
        """Look at loads by `examine`, tell them through `examiner`."""
        self._examiner = examiner
        self._clock = clock
        self._examine = examine
        self._told: set[str] = set()
        self._news_at: dict[str, float] = {}

    def __contains__(self, uid: object) -> bool:
        """Whether that load was told."""
        return uid in self._told

    def retain(self, uids: AbstractSet[str]) -> None:
        """Forget all loads but those."""
        self._told &= uids
        self._news_at = {uid: at for uid, at in self._news_at.items() if uid in uids}

    def forget(self, uids: Iterable[str]) -> None:
        """Note that those loads wait for something else."""
        for uid in uids:
            self._told.discard(uid)
            self._news_at.pop(uid, None)

    def has_news(self, line: Iterable[Entry]) -> bool:
        """Whether anybody in `line` is to be looked at now: finding out costs less than bringing all into order."""
        return any(self._is_news(entry) and self._examiner.is_due(entry.uid) for entry in line)

    async def tell(self, line: Iterable[Entry], *, limit: int, most: int) -> int:
        """Look once at those in `line`, in its order, who were not told yet; tell those who could start.

        Args:
            line: who has to wait for a place, in order.
            limit: how many places there are.
            most: how many to look at, at most.

        Returns:
            How many were looked at.
        """
        news = list(islice(((n, entry) for n, entry in enumerate(line, start=1) if self._is_news(entry)), most))
        positions = {entry.uid: position for position, entry in news}
        for look in await self._examine([entry for _, entry in news]):
            if look.ready:
                self._told.add(look.entry.uid)
                told = self._examiner.hold_back(look, limit=limit, position=positions[look.entry.uid])
                await attempt(look.entry.log_fields, told)
        return len(news)

    def _is_news(self, entry: Entry) -> bool:
        if entry.message.startswith(HELD_BACK):
            # One that a former dispatcher told need not be told again.
            self._told.add(entry.uid)
        if entry.uid in self._told:
            return False
        now = self._clock.monotonic()
        if entry.message.endswith(NODE_BUSY):
            return self._news_at.setdefault(entry.uid, now + _LASTS_SECONDS) <= now
        return True
