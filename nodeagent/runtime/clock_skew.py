"""The skew of this machine's wall clock, from the Date header of the API server's responses.

It is shown, and corrects the hours of repository maintenance; no outcome depends on a wall clock
(`nodeagent.runtime.timers`).
"""

import logging
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from core.clock import Clock
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import CLOCK_SKEW

__all__ = ["ClockSkew"]

_log = logging.getLogger(__name__)

_WARN_SECONDS: Final = 60.0
"""A Date has whole seconds, and a response may take half a minute: less than this may be no skew."""


class ClockSkew:
    """Knows the skew, shows it as a metric, and warns once while it is large."""

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        """Compare the wall clock of `clock`."""
        self._clock = clock
        self._metrics = metrics
        self._warned = False
        self._seconds = 0.0

    def now(self) -> datetime:
        """Return the API server's time, give or take some seconds, by this machine's clock and its last known skew."""
        return self._clock.now() - timedelta(seconds=self._seconds)

    def observe(self, date: str) -> None:
        """Compare with `date`, the Date header of a response that has just arrived; an invalid one is ignored.

        Source: RFC 9110, 6.6.1.
        """
        try:
            seconds = (self._clock.now() - parsedate_to_datetime(date)).total_seconds()
        except (ValueError, TypeError, OverflowError):
            # Among them a date without a time zone, which HTTP does not allow.
            return
        self._seconds = seconds
        self._metrics.set(CLOCK_SKEW, seconds)
        large = abs(seconds) >= _WARN_SECONDS
        if large and not self._warned:
            _log.warning(
                "wall clock of this node is %d s %s the API server's: timestamps are wrong, timeouts are not affected",
                abs(seconds),
                "ahead of" if seconds > 0 else "behind",
            )
        elif self._warned and not large:
            _log.info("wall clock of this node agrees with the API server's again")
        self._warned = large
