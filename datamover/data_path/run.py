"""One run of kopia that moves data, and the watchdog that reports and ends a stall.

Knows when a data path is stalled and what is reported about it. Does not know what is moved,
or how the repository is probed.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from core.clock import Clock
from core.errors import AgentError, ConfigError, DataPathError, RepositoryError
from core.models.units import format_duration, parse_duration
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Reachability
from datamover.runtime.cancellation import Canceler, run_beside, run_unless_canceled

__all__ = ["DataPath", "StallDetector", "StallLimits", "Warn", "Watchdog", "read_stall_limits"]

_VARIABLE: Final = "DATA_MOVER_STALL_TIMEOUT"
"""Inherited by mover pods from the node agent's DaemonSet."""

_WARN_SECONDS: Final = 120.0
"""kopia retries one file of the repository for about this long if an endpoint refuses connections."""

_CHECK_SECONDS: Final = 5.0
_CHECKS_PER_WARNING: Final = 4

_MAX_STEP_SECONDS: Final = 60.0
"""A container that was frozen for hours could not move anything: its pause counts as this much."""

_REACHABLE_FACTOR: Final = 6
_KEPT_LINES: Final = 5

Warn = Callable[[str], Awaitable[None]]
"""Reports a problem that does not fail the transfer."""


@dataclass(frozen=True)
class StallLimits:
    """How long a data path may be stalled; a `timeout` of 0 means forever.

    The default exceeds kopia's own retries for one file of the repository, the restart or move
    of an endpoint, and the throttling of a bucket. A hole of any size is no stall: its zeros
    count as read. A stall without a fault is an upload of a few parts of 20 MiB over a very slow
    line, or a file that is fetched from tape: so the timeout is six times longer if the
    repository is reachable.
    """

    timeout: timedelta = timedelta(minutes=10)

    @property
    def warn_seconds(self) -> float:
        """The idle time of the first warning; the next ones follow after each doubling."""
        return min(_WARN_SECONDS, self.timeout.total_seconds() / 2 or _WARN_SECONDS)

    @property
    def check_seconds(self) -> float:
        """The interval between two checks."""
        return min(_CHECK_SECONDS, self.warn_seconds / _CHECKS_PER_WARNING)

    def timeout_seconds(self, *, reachable: bool) -> float:
        """Return the idle time after which the data path fails; `reachable`: its repository answers."""
        return (self.timeout.total_seconds() or float("inf")) * (_REACHABLE_FACTOR if reachable else 1)


def read_stall_limits(environment: Mapping[str, str]) -> StallLimits:
    """Return the limits from `DATA_MOVER_STALL_TIMEOUT`, such as 30m; 0 means forever.

    Raises:
        ConfigError: its value is not a duration, or negative.
    """
    text = environment.get(_VARIABLE, "")
    if not text:
        return StallLimits()
    try:
        timeout = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"{_VARIABLE}: {e}") from e
    if timeout < timedelta(0):
        raise ConfigError(f'{_VARIABLE}: must not be negative: "{text}"')
    return StallLimits(timeout)


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
        """Take one observation, so long after the previous one; return whether a warning or the timeout is due.

        `activity` has another value whenever something has moved.
        """
        if activity != self._activity:
            self._activity = activity
            self.idle_seconds = self._reported_seconds = 0.0
            return False
        self.idle_seconds += min(elapsed_seconds, _MAX_STEP_SECONDS)
        if self.idle_seconds < self._next_report_seconds():
            return False
        self._reported_seconds = self.idle_seconds
        return True

    def timed_out(self, *, reachable: bool) -> bool:
        """Return whether the data path is to fail; `reachable`: its repository answers."""
        return self.idle_seconds >= self._limits.timeout_seconds(reachable=reachable)

    def _next_report_seconds(self) -> float:
        """Return the idle time at which the next warning or timeout is due."""
        reported, limits = self._reported_seconds, self._limits
        if not reported:
            return limits.warn_seconds
        timeouts = (limits.timeout_seconds(reachable=reachable) for reachable in (False, True))
        return min([2 * reported, *(timeout for timeout in timeouts if timeout > reported)])


@dataclass(frozen=True)
class Watchdog:
    """How a stalled data path is inspected, reported and ended.

    `probe` returns whether the repository answers; it may take half a minute.
    """

    clock: Clock
    warn: Warn
    probe: Callable[[], Awaitable[Reachability]]
    limits: StallLimits = field(default_factory=StallLimits)


class DataPath:
    """One data path, measured by `meter` and guarded by `watchdog`."""

    def __init__(self, meter: Meter, watchdog: Watchdog) -> None:
        self.meter = meter
        self._watchdog = watchdog
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def clock(self) -> Clock:
        """The clock that measures its time."""
        return self._watchdog.clock

    async def warn(self, message: str) -> None:
        """Report a problem that does not fail the transfer."""
        await self._watchdog.warn(message)

    async def run(self, kopia: Kopia, attempted: str, *arguments: str, files: KopiaFiles | None = None) -> KopiaAnswer:
        """Run kopia and return its answer, however long it takes, unless it stalls.

        Cancellation kills kopia, which then saves nothing.

        Raises:
            RepositoryError: the data path stalled, and the repository does not answer.
            DataPathError: the data path stalled, although the repository answers.
        """
        canceler = Canceler()

        async def run_watched() -> KopiaAnswer:
            moving = kopia.move_data(
                attempted,
                *self.meter.arguments,
                *arguments,
                files=files or KopiaFiles(),
                listener=self,
            )
            return await run_beside(lambda: self._watch(attempted, canceler), moving, name="watchdog")

        return await run_unless_canceled(run_watched, canceler)

    async def wait_for(self, work: Awaitable[None], doing: str) -> None:
        """Wait for `work`; warn that the mover is still `doing` it if that takes long."""

        async def warn_while_waiting() -> None:
            waited, next_warning = 0.0, self._watchdog.limits.warn_seconds
            while True:
                await self.clock.sleep(next_warning - waited)
                waited, next_warning = next_warning, 2 * next_warning
                await self.warn(f"still {doing} after {format_duration(timedelta(seconds=round(waited)))}")

        await run_beside(warn_while_waiting, work, name="wait-warnings")

    def take_progress(self, line: str) -> str:
        """Parse the progress in a line of kopia's output; return the rest of the line."""
        return self.meter.take(line)

    def keep(self, line: str) -> None:
        """Keep a line of kopia's output for the report of a stall."""
        self._last_lines.append(line)

    async def _watch(self, attempted: str, canceler: Canceler) -> None:
        """Check for activity until the data path has been stalled for too long."""
        clock, limits = self._watchdog.clock, self._watchdog.limits
        detector = StallDetector(limits)
        last = clock.monotonic()
        while True:
            await clock.sleep(limits.check_seconds)
            await self.meter.refresh()
            now = clock.monotonic()
            due, last = detector.observe(self.meter.activity, now - last), now
            if due and (error := await self._inspect(attempted, detector)):
                canceler.fail(error)
                return

    async def _inspect(self, attempted: str, detector: StallDetector) -> AgentError | None:
        """Report a stall; return the error of the data path if it has timed out."""
        before = self.meter.activity
        reachability = await self._watchdog.probe()
        await self.meter.refresh()
        if self.meter.activity != before:
            return None
        idle = format_duration(detector.idle)
        if detector.timed_out(reachable=reachability.reachable):
            text = "\n".join([f"{attempted}: no progress for {idle}: {reachability.message}", *self._last_lines])
            return DataPathError(text) if reachability.reachable else RepositoryError(text)
        output = f"; last output of kopia: {self._last_lines[-1]}" if self._last_lines else ""
        await self._watchdog.warn(f"no progress for {idle}: {reachability.message}{output}")
        return None
