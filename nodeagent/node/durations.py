"""The durations that have a timeout: how long this agent has observed a preparation or a cancel request.

Does not know what follows from a duration that is too long (`nodeagent.node.lifecycle`).
"""

from dataclasses import dataclass

from core.clock import Clock
from core.models.attempts import AttemptStage
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.node.mover_loss import read_loss
from nodeagent.runtime.timers import Timers

__all__ = ["Durations", "Measured"]


@dataclass(frozen=True)
class Measured:
    """How long one transfer has been observed in a state; None while it is not in it.

    `preparing_seconds`: in preparation. `canceling_seconds`: with a cancel request. `waiting_seconds`: between two
    attempts. `silent_seconds`: so, and without an Event of its mover.
    """

    preparing_seconds: float | None = None
    canceling_seconds: float | None = None
    waiting_seconds: float | None = None
    silent_seconds: float | None = None


class Durations:
    """The durations of this node's transfers, by uid."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._preparing = Timers(clock)
        self._canceling = Timers(clock)
        self._waiting = Timers(clock)
        self._silent = Timers(clock)

    def measure(self, cr: Transfer, *, mover_events: int = 0) -> Measured:
        """Return the durations of `cr`, as it was observed just now; its mover has recorded `mover_events`."""
        preparing_seconds = canceling_seconds = waiting_seconds = silent_seconds = None
        if subject := _preparation(cr):
            preparing_seconds = self._preparing.seconds(cr.uid, subject)
        else:
            self._preparing.forget(cr.uid)
        if cr.cancel_requested:
            canceling_seconds = self._canceling.seconds(cr.uid)
        if cr.stage is AttemptStage.WAITING:
            number = cr.attempts.number
            waiting_seconds = self._waiting.seconds(cr.uid, str(number))
            silent_seconds = self._silent.seconds(cr.uid, f"{number} {mover_events}")
        return Measured(preparing_seconds, canceling_seconds, waiting_seconds, silent_seconds)

    def forget(self, uid: str) -> None:
        """Drop the durations of a transfer."""
        self._preparing.forget(uid)
        self._canceling.forget(uid)
        self._waiting.forget(uid)
        self._silent.forget(uid)


def _preparation(cr: Transfer) -> str:
    """Return what the prepare timeout applies to: the first mover pod, or a replacement; empty for nothing.

    A transfer may be pending for a slot or for a copy without limit; a lost mover pod must be replaced
    in the same time as the first one had.
    """
    if cr.phase is Phase.ACCEPTED:
        # The transfer that has the copy may take hours; the leader mostly keeps others New until then.
        return "" if cr.pending_reason == PendingReason.COPY_IN_USE else "first mover pod"
    if cr.stage is AttemptStage.EXPOSING:
        return "" if cr.pending_reason == PendingReason.WAITING_FOR_SLOT else f"attempt {cr.attempts.number}"
    loss = read_loss(cr) if cr.phase is Phase.PREPARED else None
    return f"replacement since {loss.since}" if loss is not None and not loss.replaced else ""
