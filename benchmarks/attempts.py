"""A data mover that is killed in the middle, and the next attempt as the node agent would start it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.bed import Bed
from benchmarks.groups import MemoryGroup, memory_group
from benchmarks.processes import BenchmarkError
from benchmarks.programs import MoverRun
from core.contract import DataPathReason, MoverArgs, MoverVerb, parse_progress
from core.models.phases import Attempts, AttemptStage, Interruption, InterruptionCause
from tests.datamover.support.pods import TRANSFER

_POLL_SECONDS: Final = 0.05
_LIMIT_SECONDS: Final = 1200.0

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
        """Run the present attempt to its end; return its seconds and its message; raises BenchmarkError."""
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
        with self.bed.disks.cache() as scratch, memory_group() as group:
            run = self.bed.mover.prepare(args, scratch, settings=self.settings)
            with run.command.log.open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *replace(run.command, group=group).whole, env=dict(run.command.environment), stdout=log, stderr=log
                )
            try:
                yield run, process
            finally:
                await _kill(process, group)


async def _kill(process: asyncio.subprocess.Process, group: MemoryGroup) -> None:
    while pids := group.pids:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_POLL_SECONDS)
    await process.wait()
