"""A data mover that is killed in the middle, and the next attempt as the node agent would start it.

Knows how all of its processes are found and killed, and what the custom resource says about earlier attempts. Does not
know what is moved, or what is measured.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.bed import Bed
from benchmarks.processes import BenchmarkError
from benchmarks.programs import MoverRun
from core.contract import DataPathReason, MoverArgs, MoverVerb, parse_progress
from core.models.phases import Attempts, AttemptStage, Interruption, InterruptionCause
from tests.datamover.support.pods import TRANSFER

_POLL_SECONDS: Final = 0.05
_LIMIT_SECONDS: Final = 1200.0
"""Far more than any attempt takes."""

_COMMANDS: Final = {
    "DataUpload": (MoverVerb.BACKUP, "data-upload"),
    "DataDownload": (MoverVerb.RESTORE, "data-download"),
}


@dataclass
class ResumedMover:
    """Runs the attempts of one transfer after another; `settings` are variables of the mover's environment."""

    bed: Bed
    settings: Mapping[str, str]
    _attempts: Attempts = field(default_factory=Attempts)
    _kind: str = ""
    _spec: Mapping[str, str] = field(default_factory=dict)
    _events_before: int = 0

    def begin(self, kind: str, **spec: str) -> None:
        """Begin another transfer of this kind: InProgress, in its first attempt."""
        self._kind, self._spec = kind, spec
        self._events_before = len(self.bed.cluster.objects.events())
        self._write(Attempts())

    async def run(self, volume: Path) -> tuple[float, str]:
        """Run the present attempt to its end; return its seconds and its termination message.

        Raises:
            BenchmarkError: it failed.
        """
        async with self._started(volume) as (run, process):
            began = time.monotonic()
            async with asyncio.timeout(_LIMIT_SECONDS):
                code = await process.wait()
            seconds = time.monotonic() - began
        message = run.read_message()
        if code:
            raise BenchmarkError(f"attempt {self._attempts.number} ended with {code}: {message}")
        return seconds, message

    async def interrupt(self, volume: Path, when: Callable[[], bool]) -> float:
        """Run the present attempt, kill it once `when` says so, and announce the next one; return its seconds.

        Raises:
            BenchmarkError: it ended before.
        """
        began = time.time()
        async with self._started(volume) as (run, process):
            while not when():
                if process.returncode is not None:
                    raise BenchmarkError(f"the mover ended before it was killed: {run.message_file.read_text()}")
                await asyncio.sleep(_POLL_SECONDS)
            seconds = time.time() - began
        self._announce_next(datetime.fromtimestamp(began, UTC))
        return seconds

    def reported_bytes(self) -> int:
        """Return how many bytes the transfers since the last `begin` have reported as done."""
        return max((one.done_bytes for one in map(parse_progress, self._progress())), default=0)

    def _progress(self) -> list[str]:
        events = self.bed.cluster.objects.events()[self._events_before :]
        return [message for reason, message in events if reason == DataPathReason.PROGRESS]

    def _announce_next(self, began: datetime) -> None:
        """Write what the agent does before it starts another mover: the starts that the Events have, and the number."""
        attempts = self._attempts
        for message in self._progress():
            started = parse_progress(message).snapshot_started
            if started is not None and started >= began:
                attempts = attempts.with_start(started)
        interruption = Interruption(at=datetime.now(UTC), cause=InterruptionCause.KILLED, terminated=True)
        self._write(attempts.interrupt(interruption).move(AttemptStage.RUNNING))

    def _write(self, attempts: Attempts) -> None:
        self._attempts = self.bed.cluster.objects.attempts = attempts
        self.bed.cluster.objects.put_transfer(self._kind, **self._spec)

    @asynccontextmanager
    async def _started(self, volume: Path) -> AsyncIterator[tuple[MoverRun, asyncio.subprocess.Process]]:
        """Start the present attempt; kill whatever is left of it at the end, as the kubelet does with a container."""
        verb, flag = _COMMANDS[self._kind]
        args = MoverArgs(verb, flag, TRANSFER, str(volume), attempt=self._attempts.number)
        with self.bed.disks.cache() as scratch:
            run = self.bed.mover.prepare(args, scratch, settings=self.settings)
            with run.command.log.open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *run.command.whole, env=dict(run.command.environment), stdout=log, stderr=log
                )
            try:
                yield run, process
            finally:
                await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    # Found before the first one is killed: its children would then be another process's.
    left = [process.pid, *_descendants(process.pid)] if process.returncode is None else []
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await process.wait()
    while any(map(_is_alive, left)):  # noqa: ASYNC110 - only /proc says when a last thread has ended
        await asyncio.sleep(_POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    """Return whether a process may still have open files; of one whose exit code is not taken, a last thread may."""
    with suppress(OSError):
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended or sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()) > 1
    return False


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)
