"""Reports of transfers that cannot be reconciled: invalid ones, and those whose step failed.

Knows where and how often a fault is reported. Does not know which errors are faults, nor when the
step is retried (`nodeagent.node.reconciler`).
"""

import logging
from typing import Any

from core.errors import AgentError
from core.kube.client import KubeClient
from core.logs import fields
from core.models.reasons import UNREADABLE, PendingReason
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import TransferKey
from nodeagent.runtime.tasks import Faults
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import NodeKind
from nodeagent.transfers.status import StatusWriter

__all__ = ["TransferFaults"]

_log = logging.getLogger(__name__)


class TransferFaults:
    """Reports each fault of a transfer once: in the log, as an Event and in its status."""

    def __init__(self, client: KubeClient, status: StatusWriter, events: EventLog, *, cache: TransferCache) -> None:
        """Report through `status` and `events` on transfers of `cache`."""
        self._client = client
        self._status = status
        self._events = events
        self._cache = cache
        self._invalid: set[str] = set()
        self._faults = Faults(_log)

    async def report_invalid(self, key: TransferKey, message: str) -> None:
        """Report that a custom resource does not have the form of its kind, and `message` where it differs."""
        raw = self._cache.raw(key)
        if raw is None or raw["metadata"]["uid"] in self._invalid:
            return
        self._invalid.add(raw["metadata"]["uid"])
        _log.error("invalid custom resource, ignored until it changes: %s", message, extra=_identity(key))
        await self._events.record_warning(raw, UNREADABLE, message)

    async def report_failed(self, kind: NodeKind[Any], key: TransferKey, error: AgentError) -> None:
        """Report that a step failed with `error` and will be retried."""
        if not self._faults.report(key, "step failed, will retry", error, extra=_identity(key)):
            return
        raw = self._cache.raw(key)
        if raw is not None:
            await self._events.record_warning(raw, PendingReason.STEP_FAILED, str(error))
        await self._write_message(kind, key, str(error))

    def clear(self, key: TransferKey) -> None:
        """Forget the last error of a transfer: its step succeeded."""
        self._faults.forget(key)

    def forget(self, key: TransferKey, uid: str) -> None:
        """Drop what is remembered about a transfer."""
        self._invalid.discard(uid)
        self._faults.forget(key)

    async def _write_message(self, kind: NodeKind[Any], key: TransferKey, message: str) -> None:
        """Write into the status of a transfer why its step failed; the next step removes that."""
        try:
            cr = kind.parse(await self._client.get(kind.spec.resource, key[1], key[2]))
            if not cr.phase.final and cr.status.message != message:
                await self._status.report(kind, cr, message=message, reason=PendingReason.STEP_FAILED)
        except AgentError as e:
            # The permission for this write may be what is missing; the Event has the message.
            _log.debug("status message not written: %s", e, extra=_identity(key))


def _identity(key: TransferKey) -> dict[str, object]:
    return fields(kind=key[0], namespace=key[1], name=key[2])
