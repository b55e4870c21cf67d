"""Shows the backups of volumes in the metrics while this agent is the leader."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from core.aio import wait_for_event
from core.clock import Clock
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.plans import PlanReader
from nodeagent.leader.volumes.states import ClaimKey, Plans, Remembered, build_states
from nodeagent.runtime.metrics import Metrics

__all__ = ["VolumeView"]

_READ_SECONDS: Final = 300.0
"""Between two lists of all PVCs, which take one request and about a megabyte for each 500 of them;"""

_CLAIMS_PER_SECOND: Final = 100
"""longer for more of them, so that 100,000 take less than one request in five seconds."""

_SHOW_SECONDS: Final = 2.0
"""Between two updates while transfers change; longer for more of them,"""

_ENTRIES_PER_SECOND: Final = 5000
"""so that 100,000 take some percent of a core."""


class VolumeView:
    """Keeps the metrics of volumes up to date."""

    def __init__(
        self, metrics: Metrics, clock: Clock, plans: PlanReader, entries: Callable[[], Sequence[Entry]]
    ) -> None:
        """Show in `metrics` what `entries` returns, with what `plans` reads."""
        self._metrics = metrics
        self._clock = clock
        self._plans = plans
        self._entries = entries
        self._changed = asyncio.Event()
        self._memory: dict[ClaimKey, Remembered] = {}

    def observe(self, entry: Entry) -> None:
        """Request an update if the changed `entry` is a backup that has ended."""
        if entry.copy is not None:
            self._changed.set()

    async def run(self) -> None:
        """Show the volumes until canceled; then none, since another agent shows them."""
        try:
            while True:
                plans = await self._plans.read()
                due_at = self._clock.monotonic() + _READ_SECONDS + len(plans.claims or ()) / _CLAIMS_PER_SECOND
                while (left := due_at - self._clock.monotonic()) > 0:
                    await self._show_changes(plans, left)
        finally:
            self._metrics.volumes(())

    async def _show_changes(self, plans: Plans, seconds: float) -> None:
        """Show the volumes, then wait for a change or until `seconds` have passed."""
        self._changed.clear()
        entries = self._entries()
        self._metrics.volumes(build_states(entries, plans, self._memory))
        if await wait_for_event(self._changed, seconds):
            await self._clock.sleep(_SHOW_SECONDS + len(entries) / _ENTRIES_PER_SECOND)
