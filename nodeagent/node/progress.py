"""The progress of running transfers: from the Events of their movers into status and metrics."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from core.clock import Clock
from core.contract import DataPathReason, ProgressMessage
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import KubeError
from core.kube.event_files import EventFiles
from core.kube.resources import EVENTS
from core.kube.types import Event, Pod
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import ATTEMPTS_ANNOTATION, NODE_LABEL
from core.models.phases import RUNNING_PHASES, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Progress, Transfer
from exposer.workload import find_mover_events
from nodeagent import metrics as metric
from nodeagent.metrics import Metrics
from nodeagent.node.lifecycle import Site
from nodeagent.node.mover_events import MoverPending, Reported, read_progress
from nodeagent.runtime.workqueue import Faults, Requeue, WorkQueue
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import is_own
from nodeagent.transfers.status import Change, StatusWriter

_log = logging.getLogger(__name__)

_RETRY_PAUSE_SECONDS: Final = 5.0
"""Before a watch that the API server rejected is retried."""

_PENDING_REASONS: Final = frozenset({DataPathReason.WAITING, DataPathReason.READY})

_READ_REASONS: Final = _PENDING_REASONS | {DataPathReason.PROGRESS, DataPathReason.COMPLETED}

_LOOK_SECONDS: Final = (0.1, 1.0)
"""The least and the most between two looks at the files of a mover: the last one brings the transfer's end."""

_LOOK_FRACTION: Final = 0.02
"""Of the time that a mover was followed: a transfer ends at most so much later, and a long one costs few looks."""

_SILENT_SECONDS: Final = 60.0
"""A mover that has written no file by then is heard by a watch; it reports within seconds what it waits for."""

_WRITERS: Final = 8
"""Transfers whose status is written at the same time: a slow write delays no other transfer."""

_ATTEMPTS: Final = 5

_ATTEMPT_PAUSE_SECONDS: Final = 1.0
"""After a conflict with another writer, or with an outdated cache; after the last attempt the next Event retries."""


@dataclass(frozen=True)
class Followed:
    """A transfer that runs here: its kind, how it is read from the cache, and what is called when its mover is done."""

    kind: Kind[Any]
    read_transfer: Callable[[], Transfer | None]
    on_completed: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Counted:
    """The part of a transfer's progress that is in the metrics.

    Attributes:
        done_bytes: of all attempts; an earlier agent process counted what it wrote into the status.
        message: the last counted message of this attempt, or None while it is unknown what an earlier process counted.
        moved: done and sent bytes that were shown last as a sign of life, or None to show them in any case.
    """

    done_bytes: int = 0
    message: ProgressMessage | None = field(default_factory=ProgressMessage)
    moved: tuple[int, int] | None = None

    def begin(self) -> "_Counted":
        """Return what is counted of the next attempt, whose mover counts from 0."""
        return replace(self, message=None if self.message is None else ProgressMessage())


@dataclass
class _Reading:
    """A transfer, as the Events of its movers show it.

    Attributes:
        reported: the progress that its movers reported.
        pending: what its mover is pending for.
        counted: what of that is in the metrics.
        heard: number of Events.
        source: where its Events come from, or None before it is known to run here.
        unwritten: directory of a mover that writes no files there.
        followed: how it is followed while it runs here.
        again: it has run here, and may do so again.
        writing: held while its progress is written; `failures` of that since the last Event; no write follows once they
            have `ended`.
    """

    uid: str
    reported: Reported = field(default_factory=Reported)
    pending: MoverPending = field(default_factory=MoverPending)
    counted: _Counted = field(default_factory=_Counted)
    heard: int = 0
    source: EventFiles | Selection[Event] | None = None
    unwritten: Path | None = None
    followed: Followed | None = None
    again: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0
    ended: bool = False

    @property
    def unknown(self) -> bool:
        """Whether nothing but Events has said that this transfer exists: it has not run here."""
        return self.followed is None and not self.again

    def begin(self, attempt: int) -> None:
        """Begin another attempt."""
        self.reported = self.reported.begin(attempt)
        self.counted = self.counted.begin()
        self.pending = MoverPending()


class ProgressFollower:
    """Follows the Events of the node's running transfers: in the files of their movers, without any request.

    A mover without these files, created by an agent without `host-pods` or by an earlier version, labels its Events
    with the owning agent's node, and one watch has the transfers of all. Velero's have no label: such a transfer,
    adopted while it ran, gets a watch of its own. No watch is kept that no running transfer needs, since watches of
    Events are expensive (docs/scaling.md).
    """

    def __init__(self, client: KubeClient, clock: Clock, site: Site, *, status: StatusWriter, metrics: Metrics) -> None:
        self._client = client
        self._clock = clock
        self._site = site
        self._status = status
        self._metrics = metrics
        self._queue: WorkQueue[str] = WorkQueue(clock, name="progress", workers=_WRITERS)
        self._readings: dict[str, _Reading] = {}
        self._labeled = Selection(EVENTS, site.namespace, label_selector=select_labels({NODE_LABEL: site.label}))
        self._changed = asyncio.Event()
        self._faults = Faults(_log)

    async def run(self) -> None:
        """Read and watch the Events and write what changes, until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._queue.run(self._report), name="progress reports")
            await self._keep_sources(group)

    def follow(self, cr: Transfer, followed: Followed, pod: Pod | None) -> None:
        """Start to follow `cr`, which is read by `followed`; may be called again.

        `pod` is the trimmed v1 Pod of its mover, None before there is one, and after it has ended.
        """
        kind, reading = followed.kind, self._readings.setdefault(cr.uid, _Reading(cr.uid))
        if pod is not None:
            self._choose_source(reading, pod)
        if reading.followed is None:
            reading.followed, reading.ended = followed, False
            if reading.reported.attempt < cr.attempts.number:
                reading.begin(cr.attempts.number)
            self._resume(kind.spec.name, reading, cr.status.progress)
            reading.counted = replace(reading.counted, moved=None)
            self._show_life(kind.spec.name, reading)
            self._queue.add(cr.uid)

    def heard(self, uid: str) -> int:
        """Return how many Events of that transfer's movers have arrived: another number is a sign of life."""
        reading = self._readings.get(uid)
        return 0 if reading is None else reading.heard

    def completed(self, uid: str) -> bool:
        """Return whether a mover of that transfer recorded that it has moved all data: its result may be there."""
        reading = self._readings.get(uid)
        return reading is not None and reading.reported.completed

    def leave(self, kind_name: str, uid: str, *, again: bool, pod: Pod | None = None) -> None:
        """Stop following that transfer; if it may run `again`, its mover is still heard, and its progress is kept.

        `pod` is the mover's that may still run although the transfer was interrupted, maybe before this process began.
        """
        reading = self._readings.get(uid)
        if reading is None and again and pod is not None:
            reading = self._readings[uid] = _Reading(uid)
            self._choose_source(reading, pod)
        if reading is None:
            return
        if reading.followed is not None:
            reading.followed = None
            self._metrics.forget(metric.RATE, metric.LAST_PROGRESS, kind=kind_name, uid=uid)
        reading.again = again
        if not again:
            del self._readings[uid]
            self._changed.set()

    async def end_writing(self, uid: str) -> None:
        """Return once no progress of that transfer is being written, and none will be.

        Its mover has ended: the next write is its outcome, and would conflict with its last progress.
        """
        reading = self._readings.get(uid)
        if reading is not None:
            if isinstance(reading.source, EventFiles):
                # Written since the last look: it is counted, and the outcome has it.
                self._take_written(uid, reading.source)
            reading.ended = True
            async with reading.writing:
                pass

    def finish(self, kind_name: str, uid: str, total_bytes: int) -> None:
        """Count what a completed transfer moved since its last Event."""
        reading = self._readings.get(uid)
        if reading is not None:
            self._metrics.inc(metric.MOVED_BYTES, kind_name, by=total_bytes - reading.counted.done_bytes)
            reading.counted = replace(reading.counted, done_bytes=max(total_bytes, reading.counted.done_bytes))

    def _choose_source(self, reading: _Reading, pod: Pod) -> None:
        source: EventFiles | Selection[Event] = self._labeled
        uid = pod["metadata"]["uid"]
        if not is_own(pod):
            source = Selection(EVENTS, self._site.namespace, field_selector=f"involvedObject.uid={reading.uid}")
        elif isinstance(reading.source, EventFiles) and uid in reading.source.directory.parts:
            # Also once the kubelet has removed them: the mover has ended, as the watch is about to show.
            return
        else:
            directory = find_mover_events(self._site.host_pods, uid)
            if directory is not None and directory != reading.unwritten:
                source = EventFiles(directory)
        if reading.source != source:
            reading.source = source
            self._changed.set()

    async def _keep_sources(self, group: asyncio.TaskGroup) -> None:
        tasks: dict[EventFiles | Selection[Event], asyncio.Task[None]] = {}
        while True:
            self._changed.clear()
            wanted = {reading.source: uid for uid, reading in self._readings.items() if reading.source is not None}
            for source in tasks.keys() - wanted.keys():
                tasks.pop(source).cancel()
                if source == self._labeled:
                    # No Event follows that would say that they expired.
                    self._forget_unknown()
            for source in wanted.keys() - tasks.keys():
                follow = self._watch(source) if isinstance(source, Selection) else self._read(source, wanted[source])
                tasks[source] = group.create_task(follow, name="progress")
            await self._changed.wait()

    async def _read(self, files: EventFiles, uid: str) -> None:
        least, most = _LOOK_SECONDS
        start = self._clock.monotonic()
        while (reading := self._readings.get(uid)) is not None:
            self._take_written(uid, files)
            followed_seconds = self._clock.monotonic() - start
            silent = followed_seconds >= _SILENT_SECONDS and not files.has_any(DataPathReason)
            if silent and reading.source == files:
                # An image of an earlier version, or a full disk.
                reading.source, reading.unwritten = self._labeled, files.directory
                self._changed.set()
            await self._clock.sleep(min(max(least, _LOOK_FRACTION * followed_seconds), most))

    def _take_written(self, uid: str, files: EventFiles) -> None:
        for event in files.read_new(_READ_REASONS):
            if self._take(uid, event):
                self._enqueue({uid})

    async def _watch(self, selection: Selection[Event]) -> None:
        """Take in the selected Events until canceled; only the last Event of a list is current."""
        while True:
            try:
                async with aclosing(watch_objects(self._client, selection, clock=self._clock)) as changes:
                    listed: set[str] | None = None
                    named: set[str] = set()
                    async for change in changes:
                        if change.kind is ChangeKind.LISTING:
                            listed, named = set(), set()
                        elif change.kind is ChangeKind.LISTED:
                            self._count_listed(listed or set())
                            self._enqueue(listed or set())
                            listed = None
                            if selection.label_selector:
                                self._forget_unknown(but=named)
                        elif change.kind is not ChangeKind.MALFORMED:
                            uid = (change.obj.get("involvedObject") or {}).get("uid")
                            if not uid:
                                continue
                            named |= set() if listed is None else {uid}
                            if self._take_change(uid, change, listing=listed is not None):
                                self._enqueue({uid}) if listed is None else listed.add(uid)
            except KubeError as e:
                self._faults.report(selection, "cannot watch progress, will retry", e, level=logging.WARNING)
            await self._clock.sleep(_RETRY_PAUSE_SECONDS)

    def _enqueue(self, uids: Iterable[str]) -> None:
        for uid in uids:
            if (reading := self._readings.get(uid)) is not None:
                reading.failures = 0
                self._queue.add(uid)

    def _forget_unknown(self, *, but: AbstractSet[str] = frozenset()) -> None:
        """Drop what Events said of transfers that have not run here, but for those that a list has just named."""
        for uid in [uid for uid, reading in self._readings.items() if reading.unknown and uid not in but]:
            del self._readings[uid]

    def _take_change(self, uid: str, change: WatchChange[Event], *, listing: bool) -> bool:
        """Take in what a watch delivers; return whether the status of its transfer may have to change."""
        if change.kind is not ChangeKind.DELETED:
            return self._take(uid, change.obj, listing=listing)
        reading = self._readings.get(uid)
        # Events expire in order: Events of a transfer that does not run here are not needed any more.
        if reading is not None and reading.unknown:
            del self._readings[uid]
        return False

    def _take(self, uid: str, event: Event, *, listing: bool = False) -> bool:
        """Take in an Event about a transfer; return whether the status of that may have to change."""
        if event.get("reason") not in _READ_REASONS:
            return False
        reading = self._readings.get(uid)
        if reading is None:
            # Its mover was faster than the watch of the transfers.
            reading = self._readings[uid] = _Reading(uid)
        reading.heard += 1
        if event["reason"] == DataPathReason.COMPLETED:
            reading.reported = replace(reading.reported, completed=True)
            if reading.followed is not None:
                reading.followed.on_completed()
            return False
        if event["reason"] in _PENDING_REASONS:
            reading.pending.observe_event(event)
            return reading.followed is not None
        message = read_progress(event)
        if message is not None and message.attempt > reading.reported.attempt:
            reading.begin(message.attempt)
        if message is None or reading.reported.is_newer_than(message):
            # A list has no order; an older Event changes nothing.
            return False
        reading.pending.observe_progress(message)
        reading.reported = reading.reported.take(message)
        if reading.followed is None:
            return False
        if not listing or reading.counted.message is not None:
            self._count(reading.followed.kind.spec.name, reading)
        return True

    def _count_listed(self, uids: Iterable[str]) -> None:
        """Count from the last Event of a list on, where it is unknown what an earlier process counted of it."""
        for uid in uids:
            reading = self._readings.get(uid)
            if reading is None or reading.followed is None or reading.counted.message is not None:
                continue
            if reading.reported.attempt_bytes:
                self._count(reading.followed.kind.spec.name, reading)

    def _resume(self, kind_name: str, reading: _Reading, shown: Progress) -> None:
        """Continue from what the status shows: what an earlier agent process wrote there, it has counted as well."""
        if shown.bytes_done > reading.counted.done_bytes:
            reading.counted = replace(reading.counted, done_bytes=shown.bytes_done, message=None)
        before, reading.reported = reading.reported, reading.reported.resume(shown)
        if reading.reported.message is before.message and before.message != ProgressMessage():
            self._count(kind_name, reading)

    async def _report(self, uid: str) -> Requeue | None:
        """Update the status; retry a message about a pending mover, since no other Event may follow."""
        reading = self._readings.get(uid)
        if reading is None or reading.followed is None:
            return None
        async with reading.writing:
            if reading.ended or await self._write(reading.followed.kind, reading, reading.followed.read_transfer()):
                return None
        reading.failures += 1
        return Requeue(_ATTEMPT_PAUSE_SECONDS) if reading.failures < _ATTEMPTS else None

    def _count(self, kind_name: str, reading: _Reading) -> None:
        reported, message = reading.reported, reading.reported.message
        counted, counted_bytes = reading.counted.message or message, reading.counted.done_bytes
        self._metrics.inc(metric.MOVED_BYTES, kind_name, by=message.done_bytes - counted_bytes)
        sent_bytes = message.sent_bytes - counted.sent_bytes
        self._metrics.inc(metric.SENT_BYTES, kind_name, by=sent_bytes)
        self._metrics.inc(metric.HASHED_BYTES, kind_name, by=message.hashed_bytes - counted.hashed_bytes)
        self._metrics.inc(metric.DEDUPLICATED_BYTES, kind_name, by=message.deduped_bytes - counted.deduped_bytes)
        self._metrics.inc(metric.STORED_BYTES, kind_name, by=message.stored_bytes - counted.stored_bytes)
        if reported.attempt > 1 and reported.attempt_bytes < reported.earlier_bytes:
            self._metrics.inc(metric.RETRY_RESENT_BYTES, kind_name, by=sent_bytes)
        self._metrics.set(metric.RATE, message.bytes_per_second, kind_name, reading.uid)
        self._show_life(kind_name, reading)
        # An older Event was dropped: kopia's counters never decrease within an attempt.
        done_bytes = max(message.done_bytes, counted_bytes)
        reading.counted = replace(reading.counted, done_bytes=done_bytes, message=message)

    def _show_life(self, kind_name: str, reading: _Reading) -> None:
        """Show when the transfer last moved or sent bytes, if that is now."""
        moved = (reading.reported.message.done_bytes, reading.reported.message.sent_bytes)
        if moved != reading.counted.moved:
            reading.counted = replace(reading.counted, moved=moved)
            self._metrics.set(metric.LAST_PROGRESS, self._clock.now().timestamp(), kind_name, reading.uid)

    async def _write(self, kind: Kind[Any], reading: _Reading, cr: Transfer | None) -> bool:
        """Write what has changed; return False if a message about a pending mover could not be written."""
        if cr is None or cr.phase not in RUNNING_PHASES:
            return not reading.pending.text
        latest = reading.reported.message
        progress: Progress | None = Progress(total_bytes=latest.total_bytes, bytes_done=latest.done_bytes)
        if progress == cr.status.progress:
            progress = None
        # A mover that stops is not pending any more; the move to Canceling removed the message.
        message = reading.pending.correct(cr.status.message) if cr.phase is Phase.IN_PROGRESS else None
        marks = _start_marks(cr, latest)
        if progress is None and message is None and not marks:
            return True
        status: JsonDict = {} if progress is None else {"progress": progress.to_wire()}
        if message is not None:
            status["message"] = message or None
        reason = PendingReason.DATA_MOVER_WAITING if message else None
        try:
            await self._status.annotate(kind, cr, Change(status, annotations=marks, reason=reason))
        except KubeError as e:
            # The next Event updates it; the final status has the final numbers.
            identity = fields(kind=kind.spec.name, namespace=cr.metadata.namespace, name=cr.name)
            _log.debug("progress not written: %s", e, extra=identity)
            return message is None
        return True


def _start_marks(cr: Transfer, message: ProgressMessage) -> dict[str, str | None]:
    """Return the annotation with the start of the attempt's snapshot, if it is new: its checkpoints are found by it."""
    if message.snapshot_started is None or message.snapshot_started in cr.attempts.starts:
        return {}
    return {ATTEMPTS_ANNOTATION: cr.attempts.with_start(message.snapshot_started).to_json()}
