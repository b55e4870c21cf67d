"""What `kubectl describe` tells about a load: one Event for each change, none twice.

Knows reasons and words. Does not know when something changes. A story that cannot be told
never holds up the work.
"""

import logging

from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.logs import fields
from core.models.base import CustomResource, JsonDict

__all__ = ["Story"]

_log = logging.getLogger(__name__)


class Story:
    """Tells what the agent does with a load, on the load."""

    def __init__(self, recorder: EventRecorder) -> None:
        """Tell through `recorder`."""
        self._recorder = recorder

    async def tell(self, cr: CustomResource, reason: str, message: str, *, warning: bool = False) -> None:
        """Record one Event about `cr`."""
        told = fields(
            kind=cr.kind_name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            reason=reason,
        )
        _log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra=told)
        await self._record(ObjectRef.of(cr), reason, message, warning=warning)

    async def tell_trouble(self, raw: JsonDict, reason: str, message: str) -> None:
        """Record on `raw`, which may be an object that cannot be parsed, why nothing goes on with it."""
        await self._record(ObjectRef.of(raw), reason, message, warning=True)

    async def _record(self, about: ObjectRef, reason: str, message: str, *, warning: bool) -> None:
        try:
            await self._recorder.record(about, reason, message, warning=warning)
        except KubeError as e:
            _log.warning("an Event could not be recorded: %s", e, extra={"uid": about.uid})
