"""The deadlines of cancel requests: how long each data mover may take to stop.

Knows when a request was made, or else when this agent first observed it. Does not know what
follows from an overdue one (`nodeagent.node.lifecycle`).
"""

from datetime import timedelta

from core.clock import Clock
from core.models.transfers import Transfer

__all__ = ["CancelRequests"]


class CancelRequests:
    """The cancel requests of this node's transfers."""

    def __init__(self, clock: Clock, limit: timedelta) -> None:
        """Give each data mover `limit` to stop."""
        self._clock = clock
        self._limit_seconds = limit.total_seconds()
        self._observed_at_seconds: dict[str, float] = {}

    def observe(self, cr: Transfer) -> None:
        """Remember when a cancel request of `cr` was first observed."""
        if cr.cancel_requested:
            self._observed_at_seconds.setdefault(cr.uid, self._clock.monotonic())

    def is_overdue(self, cr: Transfer) -> bool:
        """Return whether the mover of `cr` did not stop in time after a cancel request."""
        return cr.cancel_requested and self.seconds_until_overdue(cr) <= 0

    def seconds_until_overdue(self, cr: Transfer) -> float:
        """Return how long the mover of `cr` may still take to stop."""
        requested_at = cr.cancel_requested_at
        if requested_at is not None:
            return max(0.0, self._limit_seconds - (self._clock.now() - requested_at).total_seconds())
        # The request of `spec.cancel` has a time once Canceling is written; until then only this process knows it.
        now_seconds = self._clock.monotonic()
        return max(0.0, self._observed_at_seconds.get(cr.uid, now_seconds) + self._limit_seconds - now_seconds)

    def forget(self, uid: str) -> None:
        """Drop the request of a transfer."""
        self._observed_at_seconds.pop(uid, None)
