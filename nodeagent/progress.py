"""How far running loads are: from their movers' Events into `status.progress` and metrics.

Knows the Events of a running load and what of them was counted. Does not know when a load
runs (`nodeagent.reconciler` tells), nor how it ends.
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
from core.models.loads import Load, Progress
from core.models.phases import Phase
from nodeagent.kinds.base import Kind
from nodeagent.metrics import Metrics
from nodeagent.status import StatusWriter

__all__ = ["ProgressFollower"]

_log = logging.getLogger(__name__)

_TELLING: Final = frozenset({ChangeKind.ADDED, ChangeKind.MODIFIED})

_REFUSED_PAUSE_SECONDS: Final = 5.0
"""Before a watch that the API server refused is asked for again."""

_RUNNING: Final = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})
_NEWS: Final = frozenset({ChangeKind.ADDED, ChangeKind.MODIFIED})

ReadLoad = Callable[[], Load | None]


@dataclass
class _Reading:
    """What was last read of a load: bytes, and the part of them that is counted.

    `writing` is held while progress is written; `ended`: no more of it is.
    """

    uid: str
    message: ProgressMessage
    counted_done_bytes: int
    resumed: bool
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
        self._wanted: dict[str, tuple[Kind, Load, ReadLoad]] = {}
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

    def follow(self, kind: Kind, cr: Load, read_load: ReadLoad) -> None:
        """Follow `cr` from now on; `read_load` returns it as last seen."""
        if cr.uid not in self._wanted:
            self._wanted[cr.uid] = (kind, cr, read_load)
            self._changed.set()

    def leave(self, kind_name: str, uid: str) -> None:
        """Follow that load no longer."""
        if self._wanted.pop(uid, None) is not None:
            self._readings.pop(uid, None)
            self._metrics.rate_gone(kind_name, uid)
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

    async def _follow(self, kind: Kind, cr: Load, read_load: ReadLoad) -> None:
        # What an earlier agent process wrote down, it has counted too.
        done_bytes = cr.status.progress.bytes_done
        first = ProgressMessage(done_bytes=done_bytes)
        reading = _Reading(cr.uid, first, counted_done_bytes=done_bytes, resumed=done_bytes > 0)
        self._readings[cr.uid] = reading
        selection = Selection(
            EVENTS,
            cr.metadata.namespace,
            field_selector=f"involvedObject.uid={cr.uid},reason={DataPathReason.PROGRESS}",
        )
        while True:
            try:
                await self._watch(kind, selection, reading, read_load)
            except KubeError as e:
                _log.warning("progress cannot be watched: %s", e, extra=fields(kind=kind.name, uid=cr.uid))
            await self._clock.sleep(_REFUSED_PAUSE_SECONDS)

    async def _watch(self, kind: Kind, selection: Selection, reading: _Reading, read_load: ReadLoad) -> None:
        async with aclosing(watch_objects(self._client, selection, clock=self._clock)) as changes:
            async for change in changes:
                if change.kind not in _TELLING:
                    continue
                message = _parse_message(change.obj)
                if message is None or message.done_bytes < reading.message.done_bytes:
                    # A list comes in no order; an older Event tells nothing new.
                    continue
                self._count(kind.name, reading, message)
                async with reading.writing:
                    if not reading.ended:
                        await self._write(kind, read_load(), message)

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

    async def _write(self, kind: Kind, cr: Load | None, message: ProgressMessage) -> None:
        progress = Progress(total_bytes=message.total_bytes, bytes_done=message.done_bytes)
        if cr is None or cr.phase not in _RUNNING or cr.status.progress == progress:
            return
        try:
            await self._status.report(kind, cr, progress=progress)
        except KubeError as e:
            # The next Event brings it up to date; the end writes the final figures.
            told = fields(kind=kind.name, namespace=cr.metadata.namespace, name=cr.name)
            _log.debug("progress was not written: %s", e, extra=told)


def _parse_message(event: JsonDict) -> ProgressMessage | None:
    try:
        return parse_progress(event.get("message", ""))
    except ContractError as e:
        _log.warning("%s", e)
        return None
