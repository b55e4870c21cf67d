"""Events, log lines and metrics of what the agents do with a transfer.

Knows how an Event is recorded, once for each change, and what every final phase records and counts.
Does not know when something changes, nor writes to a custom resource (`nodeagent.transfers.status`).
An Event that cannot be recorded never delays the work.
"""

import logging
from typing import Any

from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.kube.types import Object
from core.logs import fields
from core.models.backups import read_shrinkage
from core.models.base import CustomResource
from core.models.phases import Phase
from core.models.transfers import Transfer
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import TRANSFERS_FINISHED, VELERO_ENDS
from nodeagent.transfers.kinds.base import Adapter

__all__ = ["EventLog", "cancel_cause", "count_end", "record_end"]


_log = logging.getLogger(__name__)


class EventLog:
    """Records what the agent does with a transfer, as Events about it and in the log."""

    def __init__(self, recorder: EventRecorder) -> None:
        """Record through `recorder`."""
        self._recorder = recorder

    async def record(self, cr: CustomResource, reason: str, message: str, *, warning: bool = False) -> None:
        """Record one Event about `cr`."""
        identity = fields(
            kind=cr.kind_name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            reason=reason,
        )
        _log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra=identity)
        await self._send(ObjectRef.of(cr), reason, message, warning=warning)

    async def record_warning(self, raw: Object, reason: str, message: str) -> None:
        """Record a Warning about `raw`, which may be an invalid object."""
        await self._send(ObjectRef.of(raw), reason, message, warning=True)

    async def _send(self, about: ObjectRef, reason: str, message: str, *, warning: bool) -> None:
        try:
            await self._recorder.record(about, reason, message, warning=warning)
        except KubeError as e:
            _log.warning("cannot record Event: %s", e, extra={"uid": about.uid})


def cancel_cause(cr: Transfer) -> str:
    """Return why the transfer is to be canceled."""
    return "spec.cancel is set" if cr.spec.cancel else "the custom resource is being deleted"


def count_end(metrics: Metrics, kind_name: str, phase: Phase) -> None:
    """Count a transfer that reached a final phase."""
    metrics.inc(TRANSFERS_FINISHED, kind_name, str(phase))
    if counter := VELERO_ENDS.get((kind_name, phase)):
        metrics.inc(counter)


async def record_end(kind: Adapter[Any], stored: Transfer, *, metrics: Metrics, events: EventLog) -> None:
    """Count and record the final phase of a transfer; `stored` is what the final write returned."""
    phase = stored.phase
    count_end(metrics, kind.spec.name, phase)
    kind.count(stored, metrics)
    message = stored.status.message or "transfer completed"
    await events.record(stored, str(phase), message, warning=phase is Phase.FAILED)
    if (shrinkage := read_shrinkage(stored.metadata.annotations)) is not None:
        await events.record(stored, "Shrunk", shrinkage.text, warning=True)
