"""Stalls: how long kopia may make no progress, and the watchdog that reports and ends one, or an endless read.

kopia reads a file until its end, however long that takes, and does not say how far it is. The kernel does.
Source: kopia 0.23.1, snapshot/upload/upload.go (copyWithProgress); Linux, proc_pid_fdinfo(5).
"""

import logging
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from core.clock import Clock
from core.errors import AgentError, ConfigError, DataPathError, RepositoryError, StorageOutageError, Translated
from core.models.units import format_duration, parse_duration
from datamover.kopia.progress import Meter
from datamover.runtime.cancellation import Canceler, ShouldStop, run_beside, run_in_background, run_unless_canceled
from datamover.runtime.child import running_children
from datamover.runtime.work_dir import escape_controls

_BEYOND_BYTES: Final = 1 << 30
"""How much of a file may be read beyond its size, which some file systems do not know."""

_GROWTH: Final = 4
_GROWN_BYTES: Final = 64 << 30
"""How far a file that grows may be read: so many times the size that it had at first, or so far."""


class Reading(NamedTuple):
    """A file that a process reads: the descriptor's link in `/proc`, and its path for that process."""

    link: Path
    path: str


class EndlessFile(NamedTuple):
    """A file that is read beyond its end; `certain`: beyond all limits."""

    path: str
    text: str
    certain: bool


class EndlessFiles:
    """Finds such files among those that the children of this process read."""

    def __init__(self, processes: Callable[[], Iterable[int]] = running_children) -> None:
        self._processes = processes
        self._read_bytes: dict[Reading, int] = {}
        self._size_bytes: dict[Reading, int] = {}
        self._first_bytes: dict[Reading, int] = {}
        self._first_beyond_bytes: dict[Reading, int] = {}

    def observe(self) -> list[Reading]:
        """Look how far each file is read, and return those to measure: more of them was read since the last call."""
        before, self._read_bytes = self._read_bytes, dict(self._readings())
        return [one for one, count in self._read_bytes.items() if count > before.get(one, 0)]

    def measure(self, files: Iterable[Reading], _: ShouldStop) -> None:
        """Read the sizes of files; may hang, as their file system may."""
        for one in files:
            # It may be closed by now.
            with suppress(OSError):
                found = one.link.stat()
                if stat.S_ISREG(found.st_mode):
                    self._size_bytes[one] = found.st_size

    def find(self) -> EndlessFile | None:
        """Return a file that is read beyond its end; None: there is none."""
        for known in (self._size_bytes, self._first_bytes, self._first_beyond_bytes):
            for one in known.keys() - self._read_bytes.keys():
                del known[one]
        for one, size_bytes in self._size_bytes.items():
            count, first_bytes = self._read_bytes[one], self._first_bytes.setdefault(one, size_bytes)
            grown_bytes = max(_GROWN_BYTES, _GROWTH * first_bytes)
            # The next read of one that was cut meanwhile is at its end.
            if count > min(size_bytes, grown_bytes) and count > self._first_beyond_bytes.setdefault(one, count):
                path = escape_controls(one.path)
                text = (
                    f"no end of {path}: {count} bytes of it were read, and its size is {size_bytes}: leave it out by "
                    "an ignore rule in kopia's policy"
                )
                return EndlessFile(path, text, certain=count > min(size_bytes + _BEYOND_BYTES, grown_bytes))
        return None

    def _readings(self) -> Iterator[tuple[Reading, int]]:
        for process in (Path(f"/proc/{pid}") for pid in self._processes()):
            # It may have exited.
            with suppress(OSError):
                root = str((process / "root").readlink()).rstrip("/")
                for info in (process / "fdinfo").iterdir():
                    with suppress(OSError):
                        if count := _position(info.read_text()):
                            link = process / "fd" / info.name
                            yield Reading(link, str(link.readlink()).removeprefix(root)), count


def _position(text: str) -> int:
    """Return the position that `fdinfo` has, if the descriptor can only read; otherwise 0."""
    found = dict(line.split(":\t", 1) for line in text.splitlines()[:2])
    return int(found["pos"]) if int(found["flags"], 8) & os.O_ACCMODE == os.O_RDONLY else 0


_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE: Final = "DATA_MOVER_STALL_TIMEOUT"
"""Inherited by mover pods from the node agent's DaemonSet."""

_WARN_SECONDS: Final = 120.0
"""kopia retries one file of the repository for about this long if an endpoint refuses connections."""

_CHECK_SECONDS: Final = 5.0
_CHECKS_PER_WARNING: Final = 4

_MAX_STEP_SECONDS: Final = 60.0
"""A container that was frozen for hours could not move anything: its pause counts as this much."""

_REACHABLE_FACTOR: Final = 6

Report = Callable[[str], Awaitable[None]]
"""Reports what does not fail the transfer: a problem, or a wait."""


@dataclass(frozen=True)
class Reachability:
    """Whether a repository's storage answers, with a message; `outage`: it does not, and may by itself.

    `moved`: the storage is at another address now.
    """

    reachable: bool
    message: str
    outage: bool = False
    moved: bool = False

    @property
    def error(self) -> type[DataPathError]:
        """The class of the error of a data path that stalls meanwhile."""
        if self.reachable:
            return DataPathError
        return StorageOutageError if self.outage else RepositoryError


Probe = Callable[[], Awaitable[Reachability]]
"""Returns whether the storage of a repository answers, within half a minute."""


@dataclass(frozen=True)
class StallLimits:
    """How long a data path may be stalled; a `timeout` of 0 means forever.

    The default exceeds kopia's own retries for one file of the repository, the restart or move of an endpoint, and the
    throttling of a bucket. The zeros of a hole count as read. A stall without a fault is an upload of a few parts of 20
    MiB over a very slow line, or a file that is fetched from tape: the timeout is six times longer if the repository
    answers.
    """

    timeout: timedelta = timedelta(minutes=10)
    first_warning_seconds: float = _WARN_SECONDS

    @property
    def warn_seconds(self) -> float:
        """The idle time of the first warning; the next ones follow after each doubling."""
        return min(self.first_warning_seconds, self.timeout.total_seconds() / 2 or self.first_warning_seconds)

    @property
    def check_seconds(self) -> float:
        """The interval between two checks."""
        return min(_CHECK_SECONDS, self.warn_seconds / _CHECKS_PER_WARNING)

    def timeout_seconds(self, *, reachable: bool) -> float:
        """Return the idle time after which the data path fails; `reachable`: its repository answers."""
        return (self.timeout.total_seconds() or float("inf")) * (_REACHABLE_FACTOR if reachable else 1)


def read_stall_limits(environment: Mapping[str, str]) -> StallLimits:
    """Return the limits from `DATA_MOVER_STALL_TIMEOUT`, such as 30m; 0 means forever. Raises ConfigError."""
    return StallLimits(read_duration(environment, _VARIABLE, StallLimits.timeout))


def read_duration(
    environment: Mapping[str, str], variable: str, default: timedelta, limits: tuple[timedelta, timedelta] | None = None
) -> timedelta:
    """Return the duration in a variable, such as 30m, or `default`. Raises ConfigError, also beyond the `limits`."""
    text = environment.get(variable, "")
    if not text:
        return default
    with Translated(ValueError, ConfigError, variable):
        duration = parse_duration(text)
    if duration < timedelta(0):
        raise ConfigError(f'{variable}: must not be negative: "{text}"')
    if limits and not limits[0] <= duration <= limits[1]:
        raise ConfigError(f'{variable}: must be from {" to ".join(map(format_duration, limits))}: "{text}"')
    return duration


class StallDetector:
    """Measures how long a data path has been idle, and when to warn about it or to end it."""

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._activity: Hashable = None
        self._reported_seconds = 0.0
        self.idle_seconds = 0.0

    @property
    def idle(self) -> timedelta:
        """The time since something moved."""
        return timedelta(seconds=round(self.idle_seconds))

    def observe(self, activity: Hashable, elapsed_seconds: float) -> bool:
        """Take one observation, so long after the last; return whether a warning or the timeout is due.

        `activity` has another value whenever something has moved.
        """
        if activity != self._activity:
            self._activity = activity
            self.idle_seconds = self._reported_seconds = 0.0
            return False
        self.idle_seconds += min(elapsed_seconds, _MAX_STEP_SECONDS)
        due_seconds, reported = self._limits.warn_seconds, self._reported_seconds
        if reported:
            timeouts = (self._limits.timeout_seconds(reachable=reachable) for reachable in (False, True))
            due_seconds = min([2 * reported, *(timeout for timeout in timeouts if timeout > reported)])
        if self.idle_seconds < due_seconds:
            return False
        self._reported_seconds = self.idle_seconds
        return True

    def timed_out(self, *, reachable: bool) -> bool:
        """Return whether the data path is to fail; `reachable`: its repository answers."""
        return self.idle_seconds >= self._limits.timeout_seconds(reachable=reachable)


@dataclass(frozen=True)
class Watchdog:
    """How a stalled call of kopia is inspected, reported and ended; `probe`, for half a minute, asks the repository."""

    clock: Clock
    warn: Report
    probe: Probe
    limits: StallLimits = field(default_factory=StallLimits)

    async def guard(
        self, attempted: str, meter: Meter, work: Callable[[], Coroutine[Any, Any, _T]], output: Iterable[str] = ()
    ) -> _T:
        """Return what `work` returns, however long it takes, unless it stalls; cancellation cancels it.

        `attempted` is the operation and its object, for errors. `meter` measures the kopia that `work` runs. `output`
        has the last lines of its output so far.

        Raises:
            StorageOutageError: the work stalled, and the storage does not answer.
            RepositoryError: the work stalled, and the repository cannot be used, for example without its bucket.
            DataPathError: the work stalled, although the repository answers; or a file that it reads has no end.
        """
        canceler = Canceler()

        async def run_watched() -> _T:
            return await run_beside(lambda: self._watch(attempted, meter, output, canceler), work(), name="watchdog")

        return await run_unless_canceled(run_watched, canceler)

    async def _watch(self, attempted: str, meter: Meter, output: Iterable[str], canceler: Canceler) -> None:
        """Check for activity until the work has been stalled for too long, or a file that it reads has no end."""
        detector, endless, files = StallDetector(self.limits), StallDetector(self.limits), EndlessFiles()
        last = self.clock.monotonic()
        while True:
            await self.clock.sleep(self.limits.check_seconds)
            now = self.clock.monotonic()
            elapsed_seconds, last = now - last, now
            try:
                await meter.refresh()
                due = detector.observe(meter.activity, elapsed_seconds)
                error = await self._inspect(attempted, meter, output, detector) if due else None
                error = error or await self._check_files(attempted, files, endless, elapsed_seconds)
            except Exception:
                # Nothing else limits a stall.
                _logger.exception("%s: cannot check for a stall", attempted)
                continue
            if error:
                canceler.fail(error)
                return

    async def _inspect(
        self, attempted: str, meter: Meter, output: Iterable[str], detector: StallDetector
    ) -> AgentError | None:
        """Report a stall; return the error of the work if it has timed out."""
        before = meter.activity
        reachability = await self._probe()
        await meter.refresh()
        if meter.activity != before:
            return None
        idle, lines = format_duration(detector.idle), list(output)
        if reachability.moved or detector.timed_out(reachable=reachability.reachable):
            text = "\n".join([f"{attempted}: no progress for {idle}: {reachability.message}", *lines])
            return reachability.error(text)
        shown = f"; last output of kopia: {lines[-1]}" if lines else ""
        await self.warn(f"no progress for {idle}: {reachability.message}{shown}")
        return None

    async def _check_files(
        self, attempted: str, files: EndlessFiles, detector: StallDetector, elapsed_seconds: float
    ) -> AgentError | None:
        """Report a file that is read beyond its end; return the error of the work if it has none."""
        if advanced := files.observe():
            # The volume may hang: the end of the block waits for a second.
            async with run_in_background(partial(files.measure, advanced), name="file-sizes"):
                pass
        found = files.find()
        # Any other value begins again.
        due = detector.observe(found.path if found else self.clock.monotonic(), elapsed_seconds)
        if found and (found.certain or detector.timed_out(reachable=False)):
            return DataPathError(f"{attempted}: {found.text}")
        if found and due:
            await self.warn(found.text)
        return None

    async def _probe(self) -> Reachability:
        """Return whether the repository answers; if that cannot be found out, the longer timeout applies."""
        try:
            return await self.probe()
        except Exception as e:
            _logger.exception("cannot probe the repository")
            return Reachability(reachable=True, message=f"cannot probe the repository: {e!r}")
