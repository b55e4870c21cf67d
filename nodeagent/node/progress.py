"""What running loads' movers tell: from their Events into `status.progress`, `status.message` and metrics.

Knows the Events of a running load and what of them was counted. Does not know when a load
runs (`nodeagent.node.reconciler` tells), nor how it ends; what a mover's words about a wait mean,
`nodeagent.node.progress` knows.

What a running mover says it waits for, and what of that belongs into the load's status.

Knows the mover's Events about waits, and that data that moves ends every wait. Does not know
how Events come in, nor who writes (`nodeagent.node.progress`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from core.clock import Clock
from core.contract import DataPathReason, ProgressMessage, parse_progress
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import EVENTS
from core.kube.watch import ChangeKind, watch_objects
from core.logs import fields
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Progress, Transfer
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.status import StatusWriter

__all__ = ["MoverWait", "ProgressFollower"]


_log = logging.getLogger(__name__)


@dataclass
class MoverWait:
    """The wait of one load's mover; `text` is empty while it waits for nothing.

    `told` is all that it ever waited for: only that is taken back, nobody else's message.
    """

    text: str = ""
    told: set[str] = field(default_factory=set)
    at: str = ""

    def take(self, event: JsonDict) -> None:
        """Note a core/v1 Event of the mover; one about no wait changes nothing.

        A list is in the order of names, which end in the time for one component's Events; only
        one that was written late may come after a newer one.
        """
        reason, at = event.get("reason", ""), event.get("lastTimestamp") or ""
        if reason not in {DataPathReason.WAITING, DataPathReason.READY} or at < self.at:
            return
        self.at = at
        self.text = str(event.get("message", "")) if reason == DataPathReason.WAITING else ""
        if self.text:
            self.told.add(self.text)

    def take_progress(self, message: ProgressMessage) -> None:
        """Note how far the mover is: where data moves, nothing is waited for."""
        if message.done_bytes or message.total_bytes:
            self.text = ""

    def correct(self, shown: str) -> str | None:
        """Return the message that has to stand in place of `shown`, None where nothing is to be written."""
        if self.text:
            return self.text if shown != self.text else None
        return "" if shown in self.told else None


_TELLING: Final = frozenset({ChangeKind.ADDED, ChangeKind.MODIFIED})


_REFUSED_PAUSE_SECONDS: Final = 5.0
"""Before a watch that the API server refused is asked for again."""


_RUNNING: Final = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})


_ABOUT_WAITS: Final = frozenset({DataPathReason.WAITING, DataPathReason.READY})


_TRIES: Final = 5


_TRY_PAUSE_SECONDS: Final = 1.0
"""Somebody else wrote at the same time, or the cache lags behind; after the last try the next Event brings another."""


ReadLoad = Callable[[], Transfer | None]


@dataclass
class _Reading:
    """What was last read of a load: bytes, and the part of them that is counted.

    `writing` is held while progress is written; `ended`: no more of it is.
    """

    uid: str
    message: ProgressMessage
    counted_done_bytes: int
    resumed: bool
    wait: MoverWait = field(default_factory=MoverWait)
    counted_sent_bytes: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False


class ProgressFollower:
    """Follows the Events of the node's running loads, one watch a load."""

    def __init__(self, client: KubeClient, clock: Clock, *, status: StatusWriter, metrics: Metrics) -> None:
        """Watch through `client`, write through `status`, count in `metrics`."""
        self._client = client
        self._clock = clock
        self._status = status
        self._metrics = metrics
        self._wanted: dict[str, tuple[Kind, Transfer, ReadLoad]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._readings: dict[str, _Reading] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep one watch for each load that is followed, until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for uid in [uid for uid in self._tasks if uid not in self._wanted]:
                    self._tasks.pop(uid).cancel()
                for uid, (kind, cr, read_load) in self._wanted.items():
                    if uid not in self._tasks:
                        self._tasks[uid] = group.create_task(
                            self._follow(kind, cr, read_load), name=f"progress of {uid}"
                        )
                await self._changed.wait()

    def follow(self, kind: Kind, cr: Transfer, read_load: ReadLoad) -> None:
        """Follow `cr` from now on; `read_load` returns it as last seen."""
        if cr.uid not in self._wanted:
            self._wanted[cr.uid] = (kind, cr, read_load)
            self._changed.set()

    def leave(self, kind_name: str, uid: str) -> None:
        """Follow that load no longer."""
        if self._wanted.pop(uid, None) is not None:
            self._readings.pop(uid, None)
            self._metrics.remove_rate(kind_name, uid)
            self._changed.set()

    async def end_writing(self, uid: str) -> None:
        """Return once no progress of that load is being written, and none will be.

        Its mover has ended: what is written next says how, and would only conflict with its
        last progress.
        """
        reading = self._readings.get(uid)
        if reading is not None:
            reading.ended = True
            async with reading.writing:
                pass

    def finish(self, kind_name: str, uid: str, total_bytes: int) -> None:
        """Count what a load that ended well moved since its last Event."""
        reading = self._readings.get(uid)
        if reading is not None:
            self._metrics.bytes_moved(kind_name, total_bytes - reading.counted_done_bytes)
            reading.counted_done_bytes = max(total_bytes, reading.counted_done_bytes)

    async def _follow(self, kind: Kind, cr: Transfer, read_load: ReadLoad) -> None:
        # What an earlier agent process wrote down, it has counted too.
        done_bytes = cr.status.progress.bytes_done
        first = ProgressMessage(done_bytes=done_bytes, total_bytes=cr.status.progress.total_bytes)
        reading = _Reading(cr.uid, first, counted_done_bytes=done_bytes, resumed=done_bytes > 0)
        self._readings[cr.uid] = reading
        # No selector can ask for two reasons; the agent's own Events are few.
        selection = Selection(EVENTS, cr.metadata.namespace, field_selector=f"involvedObject.uid={cr.uid}")
        while True:
            try:
                await self._watch(kind, selection, reading, read_load)
            except KubeError as e:
                _log.warning("progress cannot be watched: %s", e, extra=fields(kind=kind.name, uid=cr.uid))
            await self._clock.sleep(_REFUSED_PAUSE_SECONDS)

    async def _watch(self, kind: Kind, selection: Selection, reading: _Reading, read_load: ReadLoad) -> None:
        async with aclosing(watch_objects(self._client, selection, clock=self._clock)) as changes:
            listing = False
            async for change in changes:
                if change.kind in _TELLING:
                    news = self._take(kind.name, reading, change.obj)
                    if news and not listing:
                        await self._tell(kind, reading, read_load)
                    continue
                # What a list tells first may be long over.
                listing = change.kind is ChangeKind.LISTING
                if change.kind is ChangeKind.LISTED:
                    await self._tell(kind, reading, read_load)

    def _take(self, kind_name: str, reading: _Reading, event: JsonDict) -> bool:
        """Note what an Event tells; return whether that may be news for the load's reader."""
        if event.get("reason") != DataPathReason.PROGRESS:
            reading.wait.take(event)
            return event.get("reason") in _ABOUT_WAITS
        message = _parse_message(event)
        if message is None or message.done_bytes < reading.message.done_bytes:
            # A list comes in no order; an older Event tells nothing new.
            return False
        reading.wait.take_progress(message)
        self._count(kind_name, reading, message)
        return True

    async def _tell(self, kind: Kind, reading: _Reading, read_load: ReadLoad) -> None:
        """Bring the load's status up to date; where that is about a wait, try again as nothing else may follow."""
        for _ in range(_TRIES):
            async with reading.writing:
                if reading.ended or await self._write(kind, reading, read_load()):
                    return
            await self._clock.sleep(_TRY_PAUSE_SECONDS)

    def _count(self, kind_name: str, reading: _Reading, message: ProgressMessage) -> None:
        reading.message = message
        if reading.resumed:
            # How much of it an earlier process counted, nobody knows.
            reading.counted_sent_bytes, reading.resumed = message.sent_bytes, False
        self._metrics.bytes_moved(kind_name, message.done_bytes - reading.counted_done_bytes)
        self._metrics.bytes_sent(kind_name, message.sent_bytes - reading.counted_sent_bytes)
        self._metrics.rate(kind_name, reading.uid, float(message.bytes_per_second))
        reading.counted_done_bytes = max(message.done_bytes, reading.counted_done_bytes)
        reading.counted_sent_bytes = max(message.sent_bytes, reading.counted_sent_bytes)

    async def _write(self, kind: Kind, reading: _Reading, cr: Transfer | None) -> bool:
        """Write what is news; return False where it is about a wait and could not be written."""
        if cr is None or cr.phase not in _RUNNING:
            return not reading.wait.text
        latest = reading.message
        progress: Progress | None = Progress(total_bytes=latest.total_bytes, bytes_done=latest.done_bytes)
        if progress == cr.status.progress:
            progress = None
        # What stops waits no longer; the move to Canceling took the message back.
        message = reading.wait.correct(cr.status.message) if cr.phase is Phase.IN_PROGRESS else None
        if progress is None and message is None:
            return True
        try:
            reason = PendingReason.DATA_MOVER_WAITING if message else ""
            await self._status.report(kind, cr, message=message, reason=reason, progress=progress)
        except KubeError as e:
            # The next Event brings it up to date; the end writes the final figures.
            told = fields(kind=kind.name, namespace=cr.metadata.namespace, name=cr.name)
            _log.debug("progress was not written: %s", e, extra=told)
            return message is None
        return True


def _parse_message(event: JsonDict) -> ProgressMessage | None:
    try:
        return parse_progress(event.get("message", ""))
    except ContractError as e:
        _log.warning("%s", e)
        return None
