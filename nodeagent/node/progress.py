"""The progress of running transfers: from the Events of their movers into status and metrics.

Knows the Events of a running mover, what of them was counted, and what the mover is pending for. Does
not know when a transfer runs (`nodeagent.node.reconciler` passes that in), nor how it ends.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from core.clock import Clock
from core.contract import DataPathReason, ProgressMessage, parse_progress
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import EVENTS
from core.kube.watch import ChangeKind, watch_objects
from core.logs import fields
from core.models.base import JsonDict
from core.models.phases import RUNNING_PHASES, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Progress, Transfer
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.kinds.base import NodeKind
from nodeagent.transfers.status import StatusWriter

__all__ = ["MoverPending", "ProgressFollower"]


_log = logging.getLogger(__name__)


@dataclass
class MoverPending:
    """What the mover of one transfer is pending for; `text` is empty while it is not.

    `reported` has all earlier texts: only they are removed from a status, never another message.
    """

    text: str = ""
    reported: set[str] = field(default_factory=set)
    at: str = ""

    def observe_event(self, event: JsonDict) -> None:
        """Take in a core/v1 Event of the mover; other reasons change nothing.

        A list is in the order of names, which end in the time for the Events of one component; only
        one that was written late may follow a newer one.
        """
        reason, at = event.get("reason", ""), event.get("lastTimestamp") or ""
        if reason not in {DataPathReason.WAITING, DataPathReason.READY} or at < self.at:
            return
        self.at = at
        self.text = str(event.get("message", "")) if reason == DataPathReason.WAITING else ""
        if self.text:
            self.reported.add(self.text)

    def observe_progress(self, message: ProgressMessage) -> None:
        """Take in the progress of the mover: while data moves, it is not pending."""
        if message.done_bytes or message.total_bytes:
            self.text = ""

    def correct(self, shown: str) -> str | None:
        """Return the message that has to replace `shown` in the status; None if nothing is to be written."""
        if self.text:
            return self.text if shown != self.text else None
        return "" if shown in self.reported else None


_CHANGED: Final = frozenset({ChangeKind.ADDED, ChangeKind.MODIFIED})


_RETRY_PAUSE_SECONDS: Final = 5.0
"""Before a watch that the API server rejected is retried."""


_PENDING_REASONS: Final = frozenset({DataPathReason.WAITING, DataPathReason.READY})


_ATTEMPTS: Final = 5


_ATTEMPT_PAUSE_SECONDS: Final = 1.0
"""After a conflict with another writer, or with an outdated cache; after the last attempt the next Event retries."""


ReadTransfer = Callable[[], Transfer | None]


@dataclass
class _Reading:
    """The last progress of a transfer, and the part of it that is counted.

    `writing` is held while progress is written; `ended`: none is written any more.
    """

    uid: str
    message: ProgressMessage
    counted_done_bytes: int
    resumed: bool
    pending: MoverPending = field(default_factory=MoverPending)
    counted_sent_bytes: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


class ProgressFollower:
    """Follows the Events of the node's running transfers, with one watch each."""

    def __init__(self, client: KubeClient, clock: Clock, *, status: StatusWriter, metrics: Metrics) -> None:
        """Watch through `client`, write through `status`, count in `metrics`."""
        self._client = client
        self._clock = clock
        self._status = status
        self._metrics = metrics
        self._wanted: dict[str, tuple[NodeKind[Any], Transfer, ReadTransfer]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._readings: dict[str, _Reading] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep one watch for each followed transfer, until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for uid in [uid for uid in self._tasks if uid not in self._wanted]:
                    self._tasks.pop(uid).cancel()
                for uid, (kind, cr, read_transfer) in self._wanted.items():
                    if uid not in self._tasks:
                        self._tasks[uid] = group.create_task(
                            self._follow(kind, cr, read_transfer), name=f"progress of {uid}"
                        )
                await self._changed.wait()

    def follow(self, kind: NodeKind[Any], cr: Transfer, read_transfer: ReadTransfer) -> None:
        """Start to follow `cr`; `read_transfer` returns it as cached."""
        if cr.uid not in self._wanted:
            self._wanted[cr.uid] = (kind, cr, read_transfer)
            self._changed.set()

    def leave(self, kind_name: str, uid: str) -> None:
        """Stop following that transfer."""
        if self._wanted.pop(uid, None) is not None:
            self._readings.pop(uid, None)
            self._metrics.remove_rate(kind_name, uid)
            self._changed.set()

    async def end_writing(self, uid: str) -> None:
        """Return once no progress of that transfer is being written, and none will be.

        Its mover has ended: the next write is its outcome, and would conflict with its last progress.
        """
        reading = self._readings.get(uid)
        if reading is not None:
            reading.ended = True
            async with reading.writing:
                pass

    def finish(self, kind_name: str, uid: str, total_bytes: int) -> None:
        """Count what a completed transfer moved since its last Event."""
        reading = self._readings.get(uid)
        if reading is not None:
            self._metrics.bytes_moved(kind_name, total_bytes - reading.counted_done_bytes)
            reading.counted_done_bytes = max(total_bytes, reading.counted_done_bytes)

    async def _follow(self, kind: NodeKind[Any], cr: Transfer, read_transfer: ReadTransfer) -> None:
        # What an earlier agent process wrote into the status, it has counted as well.
        done_bytes = cr.status.progress.bytes_done
        first = ProgressMessage(done_bytes=done_bytes, total_bytes=cr.status.progress.total_bytes)
        reading = _Reading(cr.uid, first, counted_done_bytes=done_bytes, resumed=done_bytes > 0)
        self._readings[cr.uid] = reading
        # A field selector cannot select two reasons; the agent's own Events are few.
        selection = Selection(EVENTS, cr.metadata.namespace, field_selector=f"involvedObject.uid={cr.uid}")
        while True:
            try:
                await self._watch(kind, selection, reading, read_transfer)
            except KubeError as e:
                _log.warning("cannot watch progress, will retry: %s", e, extra=fields(kind=kind.spec.name, uid=cr.uid))
            await self._clock.sleep(_RETRY_PAUSE_SECONDS)

    async def _watch(
        self, kind: NodeKind[Any], selection: Selection, reading: _Reading, read_transfer: ReadTransfer
    ) -> None:
        async with aclosing(watch_objects(self._client, selection, clock=self._clock)) as changes:
            listing = False
            async for change in changes:
                if change.kind in _CHANGED:
                    changed = self._take(kind.spec.name, reading, change.obj)
                    if changed and not listing:
                        await self._report(kind, reading, read_transfer)
                    continue
                # Only the last Event of a list is current.
                listing = change.kind is ChangeKind.LISTING
                if change.kind is ChangeKind.LISTED:
                    await self._report(kind, reading, read_transfer)

    def _take(self, kind_name: str, reading: _Reading, event: JsonDict) -> bool:
        """Take in an Event; return whether the status may have to change."""
        if event.get("reason") != DataPathReason.PROGRESS:
            reading.pending.observe_event(event)
            return event.get("reason") in _PENDING_REASONS
        message = _parse_message(event)
        if message is None or message.done_bytes < reading.message.done_bytes:
            # A list has no order; an older Event changes nothing.
            return False
        reading.pending.observe_progress(message)
        self._count(kind_name, reading, message)
        return True

    async def _report(self, kind: NodeKind[Any], reading: _Reading, read_transfer: ReadTransfer) -> None:
        """Update the status; retry a message about a pending mover, since no other Event may follow."""
        for _ in range(_ATTEMPTS):
            async with reading.writing:
                if reading.ended or await self._write(kind, reading, read_transfer()):
                    return
            await self._clock.sleep(_ATTEMPT_PAUSE_SECONDS)

    def _count(self, kind_name: str, reading: _Reading, message: ProgressMessage) -> None:
        reading.message = message
        if reading.resumed:
            # It is unknown how much of it an earlier process counted.
            reading.counted_sent_bytes, reading.resumed = message.sent_bytes, False
        self._metrics.bytes_moved(kind_name, message.done_bytes - reading.counted_done_bytes)
        self._metrics.bytes_sent(kind_name, message.sent_bytes - reading.counted_sent_bytes)
        self._metrics.rate(kind_name, reading.uid, float(message.bytes_per_second))
        reading.counted_done_bytes = max(message.done_bytes, reading.counted_done_bytes)
        reading.counted_sent_bytes = max(message.sent_bytes, reading.counted_sent_bytes)

    async def _write(self, kind: NodeKind[Any], reading: _Reading, cr: Transfer | None) -> bool:
        """Write what has changed; return False if a message about a pending mover could not be written."""
        if cr is None or cr.phase not in RUNNING_PHASES:
            return not reading.pending.text
        latest = reading.message
        progress: Progress | None = Progress(total_bytes=latest.total_bytes, bytes_done=latest.done_bytes)
        if progress == cr.status.progress:
            progress = None
        # A mover that stops is not pending any more; the move to Canceling removed the message.
        message = reading.pending.correct(cr.status.message) if cr.phase is Phase.IN_PROGRESS else None
        if progress is None and message is None:
            return True
        try:
            reason = PendingReason.DATA_MOVER_WAITING if message else ""
            await self._status.report(kind, cr, message=message, reason=reason, progress=progress)
        except KubeError as e:
            # The next Event updates it; the final status has the final numbers.
            identity = fields(kind=kind.spec.name, namespace=cr.metadata.namespace, name=cr.name)
            _log.debug("progress not written: %s", e, extra=identity)
            return message is None
        return True


def _parse_message(event: JsonDict) -> ProgressMessage | None:
    try:
        return parse_progress(event.get("message", ""))
    except ContractError as e:
        _log.warning("%s", e)
        return None
