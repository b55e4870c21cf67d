"""What `kubectl describe` tells about a load: one Event for each change, none twice.

Knows reasons and words. Does not know when something changes. A story that cannot be told
never holds up the work.

What is said and counted about a load that comes to its end.

Knows the words and the counts that all endings share. Does not know why a load ends, nor writes
anything on it (`nodeagent.transfers.status`).
"""

import logging

from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.logs import fields
from core.models.base import CustomResource, JsonDict
from core.models.phases import Phase
from core.models.transfers import Transfer
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.kinds.base import Kind

__all__ = ["EventLog", "cancel_cause", "record_end"]


_log = logging.getLogger(__name__)


class EventLog:
    """Tells what the agent does with a load, on the load."""

    def __init__(self, recorder: EventRecorder) -> None:
        """Tell through `recorder`."""
        self._recorder = recorder

    async def record(self, cr: CustomResource, reason: str, message: str, *, warning: bool = False) -> None:
        """Record one Event about `cr`."""
        told = fields(
            kind=cr.kind_name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            reason=reason,
        )
        _log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra=told)
        await self._send(ObjectRef.of(cr), reason, message, warning=warning)

    async def record_warning(self, raw: JsonDict, reason: str, message: str) -> None:
        """Record on `raw`, which may be an object that cannot be parsed, why nothing goes on with it."""
        await self._send(ObjectRef.of(raw), reason, message, warning=True)

    async def _send(self, about: ObjectRef, reason: str, message: str, *, warning: bool) -> None:
        try:
            await self._recorder.record(about, reason, message, warning=warning)
        except KubeError as e:
            _log.warning("an Event could not be recorded: %s", e, extra={"uid": about.uid})


def cancel_cause(cr: Transfer) -> str:
    """Return in words who wants the load to end."""
    return "cancel was asked for by spec.cancel" if cr.spec.cancel else "the custom resource is being deleted"


async def record_end(kind: Kind, stored: Transfer, *, metrics: Metrics, events: EventLog) -> None:
    """Count and tell the end of a load, `stored` as its final status left it."""
    phase = stored.phase
    metrics.transfer_finished(kind.name, phase)
    kind.count(stored, metrics)
    words = stored.status.message or "the data is where it belongs"
    await events.record(stored, str(phase), words, warning=phase is Phase.FAILED)
