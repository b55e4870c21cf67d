"""A data mover that is interrupted in the middle, and the next attempt as the node agent would start it.

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

from benchmarks.cluster import Cluster
from benchmarks.disks import Disks
from benchmarks.processes import BenchmarkError
from benchmarks.programs import Mover, MoverRun
from core.contract import DataPathReason, MoverArgs, MoverVerb, parse_progress
from core.models.attempts import Attempts, AttemptStage, Interruption, InterruptionCause
from tests.datamover.support.pods import TRANSFER

__all__ = ["Attempt", "EndedError", "ResumedMover", "is_alive"]

_POLL_SECONDS: Final = 0.05
_LIMIT_SECONDS: Final = 1200.0
"""Far more than any attempt takes."""

_COMMANDS: Final = {
    "DataUpload": (MoverVerb.BACKUP, "data-upload"),
    "DataDownload": (MoverVerb.RESTORE, "data-download"),
}


class EndedError(BenchmarkError):
    """A mover ended before it was to be killed."""


@dataclass(frozen=True)
class Attempt:
    """An attempt that was interrupted: when it began (Unix time), for how many seconds it ran, and its mover."""

    began: float
    seconds: float
    process: asyncio.subprocess.Process

    @property
    def processes(self) -> set[int]:
        """The mover and all processes below it, as long as it lives."""
        return {self.process.pid, *_descendants(self.process.pid)}


@dataclass
class ResumedMover:
    """Runs the attempts of one transfer after another; `settings` are variables of the mover's environment."""

    cluster: Cluster
    mover: Mover
    disks: Disks
    settings: Mapping[str, str]
    _attempts: Attempts = field(default_factory=Attempts)
    _kind: str = ""
    _spec: Mapping[str, str] = field(default_factory=dict)

    def begin(self, kind: str, **spec: str) -> None:
        """Begin another transfer of this kind: InProgress, in its first attempt."""
        self._kind, self._spec = kind, spec
        self._write(Attempts())

    async def run(self, volume: Path) -> tuple[float, str]:
        """Run the present attempt to its end; return its seconds and its termination message.

        Raises:
            BenchmarkError: it failed.
        """
        with self.disks.cache() as scratch:
            run = self._prepare(volume, scratch)
            began = time.monotonic()
            async with _started(run) as process, asyncio.timeout(_LIMIT_SECONDS):
                code = await process.wait()
            seconds = time.monotonic() - began
        message = run.read_message()
        if code:
            raise BenchmarkError(f"attempt {self._attempts.number} ended with {code}: {message}")
        return seconds, message

    async def interrupt(self, volume: Path, when: Callable[[], bool]) -> Attempt:
        """Run the present attempt, kill all of its processes once `when` says so, and announce the next one.

        Raises:
            EndedError: it ended before.
        """
        async with self.run_until(volume, when) as attempt:
            pass
        self.announce_next(attempt, InterruptionCause.KILLED)
        return attempt

    @asynccontextmanager
    async def run_until(self, volume: Path, when: Callable[[], bool], **settings: str) -> AsyncIterator[Attempt]:
        """Run the present attempt until `when` says so, and yield it; kill what is left of it at the end of the block.

        Raises:
            EndedError: it ended before.
        """
        with self.disks.cache() as scratch:
            run = self._prepare(volume, scratch, settings)
            began = time.time()
            async with _started(run) as process:
                while not when():
                    if process.returncode is not None:
                        raise EndedError(f"the mover ended before it was killed: {run.message_file.read_text()}")
                    await asyncio.sleep(_POLL_SECONDS)
                yield Attempt(began, time.time() - began, process)

    def announce_next(self, attempt: Attempt, cause: InterruptionCause) -> None:
        """Write what the agent does before it starts another mover: the starts that the Events have, and the number."""
        attempts, began = self._attempts, datetime.fromtimestamp(attempt.began, UTC)
        for reason, message in self.cluster.objects.events():
            started = parse_progress(message).snapshot_started if reason == DataPathReason.PROGRESS else None
            if started is not None and started >= began:
                attempts = attempts.with_start(started)
        terminated = cause is InterruptionCause.KILLED
        interruption = Interruption(at=datetime.now(UTC), cause=cause, terminated=terminated)
        self._write(attempts.interrupt(interruption).move(AttemptStage.RUNNING))

    def _prepare(self, volume: Path, scratch: Path, settings: Mapping[str, str] | None = None) -> MoverRun:
        verb, flag = _COMMANDS[self._kind]
        args = MoverArgs(verb, flag, TRANSFER, str(volume), attempt=self._attempts.number)
        return self.mover.prepare(args, scratch, settings={**self.settings, **(settings or {})})

    def _write(self, attempts: Attempts) -> None:
        self._attempts = self.cluster.objects.attempts = attempts
        self.cluster.objects.put_transfer(self._kind, **self._spec)


@asynccontextmanager
async def _started(run: MoverRun) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the mover; kill whatever is left of it at the end, as the kubelet does with a container."""
    with run.command.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *run.command.whole, env=dict(run.command.environment), stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        # Found before the first one is killed: its children would then be another process's.
        left = [process.pid, *_descendants(process.pid)] if process.returncode is None else []
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()
        while any(map(is_alive, left)):  # noqa: ASYNC110 - only /proc says when a last thread has ended
            await asyncio.sleep(_POLL_SECONDS)


def is_alive(pid: int) -> bool:
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
