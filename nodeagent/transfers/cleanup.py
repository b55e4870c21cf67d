"""Removes what was made for loads that are over, and then our marks on them.

Knows how often that is tried, and who is told when it does not come about. Does not know what
there is to remove (the kinds do), nor who is responsible for a load.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.logs import fields
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from exposer.model import Pending
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import StatusWriter

__all__ = ["CleanUp"]

_log = logging.getLogger(__name__)

_STUCK_PAUSE_SECONDS: Final = 60.0
"""Between two looks at what did not go for a long time."""


@dataclass(frozen=True)
class CleanUp:
    """Cleans up behind final loads, one step a call; `patience` is how long that may last untold."""

    clock: Clock
    status: StatusWriter
    events: EventLog
    waits: PendingRecords
    patience: timedelta

    async def step(self, kind: Kind, cr: Transfer) -> Requeue | None:
        """Take the next step for `cr`; None says that nothing is left and its marks are gone.

        What does not go is told by an Event, once for each thing, and tried again without end:
        the load's own status is final and stays as it is.

        Raises:
            KubeError: the API server refused.
        """
        told = fields(kind=kind.name, namespace=cr.metadata.namespace, name=cr.name, uid=cr.uid)
        waiting = await kind.clean_up(cr)
        if waiting is None:
            await self.status.release(kind, cr)
            self.waits.forget(cr.uid)
            _log.info("everything that was made for the load is gone", extra=told)
            return None
        _log.debug("clean-up waits: %s", waiting.message, extra=told)
        self.waits.observe(cr.uid, waiting)
        if not self._is_stuck(cr):
            return Requeue(self.waits.count_check(cr.uid))
        if self.waits.reported_message(cr.uid) != waiting.message:
            span = format_duration(self.patience)
            message = f"not cleaned up for {span}: {waiting.message}; it is tried again"
            await self.events.record(cr, PendingReason.CLEANUP_BLOCKED, message, warning=True)
            self.waits.mark_reported(cr.uid, Pending(PendingReason.CLEANUP_BLOCKED, waiting.message))
        return Requeue(_STUCK_PAUSE_SECONDS)

    def _is_stuck(self, cr: Transfer) -> bool:
        ended = cr.status.completion_timestamp
        return ended is not None and self.clock.now() - ended >= self.patience
