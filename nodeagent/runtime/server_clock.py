"""The clock of an API server, as the Date headers of its answers show it."""

from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime

from core.clock import Clock


class ServerClock:
    """The time of a server: one of its Dates, and what has passed since; this machine's before the first one.

    The machine's clock may be wrong, or be set meanwhile. A Date changes nothing if it differs by less than `least`.
    """

    def __init__(self, clock: Clock, *, least: timedelta = timedelta()) -> None:
        self._clock = clock
        self._least = least
        self._zero = clock.now() - timedelta(seconds=clock.monotonic())

    def now(self) -> datetime:
        """Return the server's time, give or take a second and `least`."""
        return self._zero + timedelta(seconds=self._clock.monotonic())

    def take(self, date: str) -> datetime | None:
        """Take the Date header of a response that has just arrived, and return it; None: it is invalid, and ignored.

        Source: RFC 9110, 6.6.1.
        """
        try:
            parsed = parsedate_to_datetime(date)
            zero = parsed - timedelta(seconds=self._clock.monotonic())
            if abs(zero - self._zero) >= self._least:
                self._zero = zero
        except (ValueError, TypeError, OverflowError):
            # Among them a date without a time zone, which HTTP does not allow.
            return None
        return parsed
