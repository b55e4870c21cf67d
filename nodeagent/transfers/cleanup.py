"""The cleanup of finished transfers: the expose objects first, then this agent's own marks.

Knows how often cleanup is retried, and when a blocked one is reported. Does not know which objects
there are (the kinds do), nor which agent is responsible for a transfer.
"""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from core.logs import fields
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from exposer.model import Pending
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import Adapter
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import StatusWriter

__all__ = ["CleanUp"]

_log = logging.getLogger(__name__)

_BLOCKED_PAUSE_SECONDS: Final = 60.0
"""Between two attempts at a blocked cleanup."""


@dataclass(frozen=True)
class CleanUp:
    """Cleans up finished transfers, one step per call; `timeout` is how long that may take before it is reported."""

    status: StatusWriter
    events: EventLog
    records: PendingRecords
    timeout: timedelta

    async def step(self, kind: Adapter[Any], cr: Transfer) -> Requeue | None:
        """Take the next step for `cr`; None means that its expose objects and this agent's marks are removed.

        A blocked cleanup is reported as an Event, once for each cause, and retried without limit:
        the status of the transfer is final and does not change.

        Raises:
            KubeError: the API server rejected a request.
        """
        identity = fields(kind=kind.spec.name, namespace=cr.metadata.namespace, name=cr.name, uid=cr.uid)
        pending = await kind.clean_up(cr)
        if pending is None:
            await self.status.release(kind, cr)
            self.records.forget(cr.uid)
            _log.info("cleaned up", extra=identity)
            return None
        _log.debug("cleanup pending: %s", pending.message, extra=identity)
        self.records.observe(cr.uid, pending)
        if self.records.operation_seconds(cr.uid, "cleanup") < self.timeout.total_seconds():
            return Requeue(self.records.count_check(cr.uid))
        if self.records.reported_message(cr.uid) != pending.message:
            message = f"not cleaned up within {format_duration(self.timeout)}, will retry: {pending.message}"
            await self.events.record(cr, PendingReason.CLEANUP_BLOCKED, message, warning=True)
            self.records.mark_reported(cr.uid, Pending(PendingReason.CLEANUP_BLOCKED, pending.message))
        return Requeue(_BLOCKED_PAUSE_SECONDS)
