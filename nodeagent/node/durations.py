"""The durations that have a timeout: how long this agent has observed a preparation or a cancel request.

Does not know what follows from a duration that is too long (`nodeagent.node.lifecycle`).
"""

from dataclasses import dataclass

from core.clock import Clock
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.node.mover_loss import read_loss
from nodeagent.runtime.timers import Timers

__all__ = ["Durations", "Measured"]


@dataclass(frozen=True)
class Measured:
    """How long one transfer has been observed in preparation, and with a cancel request; None while it is not."""

    preparing_seconds: float | None = None
    canceling_seconds: float | None = None


class Durations:
    """The durations of this node's transfers, by uid."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._preparing = Timers(clock)
        self._canceling = Timers(clock)

    def measure(self, cr: Transfer) -> Measured:
        """Return the durations of `cr`, as it was observed just now."""
        preparing_seconds = canceling_seconds = None
        if subject := _preparation(cr):
            preparing_seconds = self._preparing.seconds(cr.uid, subject)
        else:
            self._preparing.forget(cr.uid)
        if cr.cancel_requested:
            canceling_seconds = self._canceling.seconds(cr.uid)
        return Measured(preparing_seconds, canceling_seconds)

    def forget(self, uid: str) -> None:
        """Drop the durations of a transfer."""
        self._preparing.forget(uid)
        self._canceling.forget(uid)


def _preparation(cr: Transfer) -> str:
    """Return what the prepare timeout applies to: the first mover pod, or a replacement; empty for nothing.

    A transfer may be pending for a slot or for a copy without limit; a lost mover pod must be replaced
    in the same time as the first one had.
    """
    if cr.phase is Phase.ACCEPTED:
        # The transfer that has the copy may take hours; the leader mostly keeps others New until then.
        return "" if cr.pending_reason == PendingReason.COPY_IN_USE else "first mover pod"
    loss = read_loss(cr) if cr.phase is Phase.PREPARED else None
    return f"replacement since {loss.since}" if loss is not None and not loss.replaced else ""
