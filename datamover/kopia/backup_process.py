"""kopia's process of a backup: `mover-backup` opens the repository once, and a stop leaves time to save a checkpoint.

`mover-backup` and `block-write` offer what the repository has of a source, wait, and back it up. `block-read` writes a
snapshot to a device. A cancel request needs no time for a checkpoint: it cancels the transfer at once.
Source: tools/kopia/program (backup.go, block_write.go, block_read.go).
"""

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from core.aio import end_task, wait_for_answer
from core.contract import CANCELED_ENDING, MOVER_GRACE
from core.errors import CanceledError, ConfigError, FencedError, KopiaError
from core.models.base import JsonDict
from core.models.units import format_duration
from datamover.kopia.private_run import write_all
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles, Listener
from datamover.kopia.progress import Meter
from datamover.kopia.snapshots import unpin_snapshot
from datamover.kopia.stalls import read_duration
from datamover.runtime.cancellation import Canceler, run_in_background
from datamover.runtime.signals import StopSignal

_KEPT_LINES: Final = 40


@dataclass(frozen=True)
class Offer:
    """What a repository has of a source: the effective policy, the source's own, None without one, and all snapshots.

    Snapshots are as kopia lists them, the oldest first. `checkpoints` are of devices, with a source of their own.
    """

    unique_id: str
    policy: JsonDict
    defined: JsonDict | None
    snapshots: Sequence[JsonDict] = ()
    checkpoints: Sequence[JsonDict] = ()


@dataclass
class MoverBackup(Listener):
    """One run of `mover-backup`, or of `block-write` with flags for the device, for a source `user@host:path`.

    `files` are without input and output. It must be ended. `offer` is what the repository has, once it is open.
    `result` is what kopia says about the backup besides its snapshot; empty before its end.
    """

    kopia: Kopia
    target: str
    attempted: str
    files: KopiaFiles
    listener: Listener
    meter: Meter
    command: Sequence[str] = ("mover-backup",)
    offer: Offer = field(init=False, repr=False)
    result: JsonDict = field(default_factory=dict, init=False)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES), init=False)
    _child: asyncio.Task[KopiaAnswer] | None = field(default=None, init=False)
    _decision_fd: int = field(default=-1, init=False)
    _offered: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def open(self) -> KopiaAnswer:
        """Start kopia; return its answer so far once the repository is open, or its only one. Raises DataPathError."""
        await self.end()
        self._offered.clear()
        decided_fd, self._decision_fd = os.pipe()
        files = replace(self.files, stdin_fd=decided_fd, on_output=self._take_output)
        arguments = (*self.command, f"--source={self.target}")
        call = self.kopia.move_data(self.attempted, *arguments, files=files, listener=self)
        child = self._child = asyncio.create_task(call, name="mover-backup")
        # A decision that kopia does not read fails then.
        child.add_done_callback(lambda _: os.close(decided_fd))
        await wait_for_answer(self._offered, child)
        return child.result() if child.done() else KopiaAnswer(self.attempted, 0, b"", list(self._lines))

    async def carry_out(self, decision: JsonDict) -> KopiaAnswer:
        """Have kopia back up as is decided, and return its answer, whose output is the snapshot's manifest.

        Cancellation kills kopia, which then saves nothing.
        """
        if self._child is None:
            raise RuntimeError("kopia was not started")
        document, fd = json.dumps(decision).encode(), self._decision_fd
        async with run_in_background(lambda _: write_all(fd, document), name="decision"):
            answer = await self._child
        output = json.dumps(self.result["snapshot"]).encode() if self.result else b""
        return replace(answer, output=output)

    async def end(self) -> None:
        """Kill kopia if it still runs."""
        child, self._child = self._child, None
        if child is None:
            return
        await end_task(child)
        os.close(self._decision_fd)

    def take_progress(self, line: str) -> str:
        """Parse when kopia begins the snapshot; return the line."""
        return self.listener.take_progress(line)

    def keep(self, line: str) -> None:
        """Keep a line of its errors, and pass it on."""
        self._lines.append(line)
        self.listener.keep(line)

    def _take_output(self, line: str) -> None:
        key, value = parse_line(line)
        match key:
            case "offer":
                self.offer = Offer(**value)
                self._offered.set()
            case "progress":
                self.meter.take_report(value)
            case "result":
                faults = {name: self.kopia.redact(text) for name, text in value.items() if isinstance(text, str)}
                self.result = value | faults


async def read_blocks(
    kopia: Kopia, attempted: str, *arguments: str, device_fd: int, listener: Listener, meter: Meter
) -> KopiaAnswer:
    """Return the answer of `block-read` with these arguments, whose output is what it did to the device.

    Cancellation kills kopia, which leaves the device as it is then. Raises DataPathError if it cannot be started.
    """
    results: list[JsonDict] = []

    def take(line: str) -> None:
        match parse_line(line):
            case "progress", value:
                meter.take_report(value)
            case "result", value:
                results.append(value)

    files = KopiaFiles(inherited_fd=device_fd, on_output=take)
    answer = await kopia.move_data(attempted, "block-read", *arguments, files=files, listener=listener)
    return replace(answer, output=json.dumps(results[-1]).encode() if results else b"")


def device_flags(device_fd: int, size_bytes: int) -> list[str]:
    """Return the flags for an open device, which is inherited, of that size."""
    return [f"--device-fd={device_fd}", f"--device-size={size_bytes}"]


def parse_line(line: str) -> tuple[str, JsonDict]:
    """Return key and value of a line; a kopia that is killed may leave a part of one, which is ignored."""
    try:
        ((key, value),) = json.loads(line).items()
    except ValueError:
        return "", {}
    return key, value


_logger = logging.getLogger(__name__)

_VARIABLE: Final = "DATA_MOVER_CHECKPOINT_GRACE"
"""Inherited by mover pods from the node agent's DaemonSet."""

_DEFAULT: Final = timedelta(seconds=25)
"""kopia writes out what it holds: up to 21 MB for each file that it reads in parallel, and the index blobs. The rest of
the pod's grace period is for the end of the mover itself."""


def read_checkpoint_grace(environment: Mapping[str, str]) -> timedelta:
    """Return how long kopia may save a checkpoint, from `DATA_MOVER_CHECKPOINT_GRACE`, such as 10s; 0 means not at all.

    Raises:
        ConfigError: its value is not a duration, negative, or not less than the grace period of a mover pod.
    """
    grace = read_duration(environment, _VARIABLE, _DEFAULT)
    if grace >= MOVER_GRACE:
        limit = f"must be less than the grace period of the pod, {format_duration(MOVER_GRACE)}"
        raise ConfigError(f'{_VARIABLE}: {limit}: "{environment[_VARIABLE]}"')
    return grace


class GracefulStop:
    """What a signal does to a transfer: cancels it, after `grace` if a kopia runs that can save a checkpoint."""

    def __init__(self, canceler: Canceler, grace: timedelta, announce: Callable[[CanceledError], None]) -> None:
        """Cancel through `canceler` at once, or after `grace`; `announce` gets the error to end with before."""
        self._canceler = canceler
        self._grace = grace
        self._announce = announce
        self._running = False
        self.terminate = asyncio.Event()
        """Set when kopia is to save a checkpoint, within a block of `saving`."""
        self._ending: CanceledError | None = None
        self._stopped = ""

    @property
    def signaled(self) -> bool:
        """Whether a signal arrived while kopia could save a checkpoint."""
        return self.terminate.is_set()

    @property
    def interrupted(self) -> bool:
        """Whether the transfer ends without a cancel request or a failure, so that another attempt may follow."""
        error = self._canceler.error
        return isinstance(error, FencedError) or (self._ending is not None and error in {None, self._ending})

    def listen(self, stop: StopSignal) -> None:
        """Take the signals of this process; the first one counts."""
        loop = asyncio.get_running_loop()
        stop.listen(lambda: loop.call_soon_threadsafe(self._take, stop.reason))

    @contextmanager
    def saving(self) -> Iterator[asyncio.Event]:
        """Let a kopia that runs within the block save a checkpoint; yield `terminate`."""
        self._running = True
        try:
            yield self.terminate
        finally:
            self._running = False

    def error(self, detail: str) -> CanceledError:
        """Return the error that ends a transfer after a signal; `detail` is about the checkpoint."""
        return CanceledError(f"{self._stopped}; {detail}: {CANCELED_ENDING}")

    def _take(self, reason: str) -> None:
        if self.signaled or self._canceler.requested:
            return
        if not self._running or not self._grace:
            self._ending = CanceledError(f"{reason}: {CANCELED_ENDING}")
            self._canceler.fail(self._ending)
            return
        self._stopped = reason
        within = format_duration(self._grace)
        _logger.info("%s; kopia may save a checkpoint within %s", self._stopped, within)
        self.terminate.set()
        self._announce(self.error("it was killed before kopia had saved a checkpoint"))
        self._ending = self.error(f"kopia did not save a checkpoint within {within}")
        asyncio.get_running_loop().call_later(self._grace.total_seconds(), self._canceler.fail, self._ending)


async def keep_checkpoint(kopia: Kopia, answer: KopiaAnswer, stop: GracefulStop) -> None:
    """Unpin the incomplete snapshot that kopia left after a signal; nothing is done if it left a complete one.

    The incomplete one refers to the files that were read completely, so that maintenance keeps their data. kopia
    prints it before it writes the last indexes: exit code 0 says that it was saved, or that it is found afterwards.
    For kopia does not wait for a checkpoint that it is writing when it closes the repository, and crashes then.
    `kopia mover-backup` pins none that is incomplete, and prints it after that.
    Source: kopia 0.23.1, cli/app.go (repositoryWriterAction), snapshot/upload/upload.go (periodicallyCheckpoint).

    Raises:
        CanceledError: there is no complete snapshot; says whether a checkpoint was saved.
    """
    unsaved = stop.error(f"kopia saved no checkpoint: {answer.exit_status}")
    try:
        document = answer.document()
    except KopiaError as e:
        raise unsaved from e
    if not document.get("incomplete"):
        return
    try:
        if document.get("pins"):
            await unpin_snapshot(kopia, str(document["id"]))
    except KopiaError as e:
        _logger.warning("%s", e)
        if not answer.succeeded:
            raise unsaved from e
    raise stop.error("kopia saved a checkpoint, so the next backup of the volume does not send again what was sent")
