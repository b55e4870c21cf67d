"""Probes of backup storage locations: does one answer again, for all transfers that wait for that.

A probe is a validation on demand, which `nodeagent.leader.repositories.locations` carries out. Its answer is kept in
memory alone: another leader probes again.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from nodeagent.leader.repositories.validation import Verdict

__all__ = ["LocationProbes"]

_log = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 30.0
"""How long an answer counts, and so the least time between two probes of one location."""

_LAST_SECONDS: Final = 120.0
"""How long a positive answer counts at most while the next probe is under way, which takes a minute if it fails."""


@dataclass
class _Probe:
    """The last answer about a location, when it came, and when it was last asked for; `wanted`: another one is due."""

    wanted: bool = False
    asked_at_seconds: float = -math.inf
    answered_at_seconds: float | None = None
    answers: bool = False


class LocationProbes:
    """The last answer about each location that transfers wait for."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._probes: dict[str, _Probe] = {}
        self._request: Callable[[str], None] = lambda _: None
        self._on_answer: list[Callable[[], None]] = []

    def subscribe(self, on_answer: Callable[[], None]) -> None:
        """Have `on_answer` called after each probe."""
        self._on_answer.append(on_answer)

    def serve(self, request: Callable[[str], None]) -> None:
        """Have `request` called with the name of each location to probe, also of those that are wanted already."""
        self._request = request
        for name, probe in self._probes.items():
            if probe.wanted:
                request(name)

    def answers(self, name: str) -> bool:
        """Return whether the location has just answered; without a recent probe, request one.

        Until that ends, the last answer counts: what transfers wait for must not change with each probe. One that was
        given in an earlier outage does not: nothing has waited for the location meanwhile.
        """
        probe = self._probes.setdefault(name, _Probe())
        now, at_seconds = self._clock.monotonic(), probe.answered_at_seconds
        age_seconds = math.inf if at_seconds is None else now - at_seconds
        if min(age_seconds, now - probe.asked_at_seconds) >= _FRESH_SECONDS:
            probe.answers = False
        probe.asked_at_seconds = now
        if age_seconds >= _FRESH_SECONDS and not probe.wanted:
            probe.wanted = True
            self._request(name)
        return probe.answers and age_seconds < _LAST_SECONDS

    def is_wanted(self, name: str) -> bool:
        """Return whether a probe of the location is asked for."""
        return name in self._probes and self._probes[name].wanted

    def end(self, name: str, verdict: Verdict) -> None:
        """Record what a probe found; one that could not be carried out delays no transfer."""
        if not self.is_wanted(name):
            return
        probe = self._probes[name]
        if not verdict.carried_out:
            _log.warning("BackupStorageLocation %s cannot be probed, transfers do not wait: %s", name, verdict.cause)
        elif verdict.cause:
            _log.info("BackupStorageLocation %s does not answer, transfers wait: %s", name, verdict.cause)
        probe.wanted = False
        probe.answered_at_seconds = self._clock.monotonic()
        probe.answers = not verdict.cause or not verdict.carried_out
        for notify in self._on_answer:
            notify()
