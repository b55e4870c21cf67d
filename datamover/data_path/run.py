"""One run of kopia that moves data, reported and ended when it stalls, and other long work of a transfer."""

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

from core.aio import run_shielded
from core.clock import Deadline
from core.errors import DataPathError
from core.models.units import format_duration
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles, Listener
from datamover.kopia.progress import Meter
from datamover.kopia.stalls import StallDetector, Watchdog
from datamover.runtime.cancellation import Canceler, ShouldStop, run_beside, run_in_background, run_unless_canceled

_T = TypeVar("_T")

_KEPT_LINES: Final = 5


class DataPath(Listener):
    """One data path, measured by `meter` and guarded by `watchdog`."""

    def __init__(self, meter: Meter, watchdog: Watchdog) -> None:
        self.meter = meter
        self.watchdog = watchdog
        self.clock = watchdog.clock
        self.warn = watchdog.warn
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_line: Callable[[str], None] = lambda _: None

    async def run(
        self,
        kopia: Kopia,
        attempted: str,
        *arguments: str,
        files: KopiaFiles | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> KopiaAnswer:
        """Run kopia and return its answer, however long it takes, unless it stalls.

        Cancellation kills kopia, which then saves nothing; `files.terminate` lets it save a checkpoint. `on_line` gets
        each line of its output that is no progress.

        Raises:
            RepositoryError: the data path stalled, and the repository does not answer.
            DataPathError: the data path stalled, although the repository answers.
        """
        self._on_line = on_line or (lambda _: None)
        return await self.guard(
            attempted,
            lambda: kopia.move_data(
                attempted, *self.meter.arguments, *arguments, files=files or KopiaFiles(), listener=self
            ),
        )

    async def guard(self, attempted: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `work` returns, which waits for a kopia that moves data, unless that stalls, as `run`."""
        return await self.watchdog.guard(attempted, self.meter, work, self._last_lines)

    async def wait_for(self, work: Awaitable[_T], doing: str) -> _T:
        """Return what `work` returns; warn that the mover is still `doing` it if that takes long."""

        async def warn_while_waiting() -> None:
            waited, next_warning = 0.0, self.watchdog.limits.warn_seconds
            while True:
                await self.clock.sleep(next_warning - waited)
                waited, next_warning = next_warning, 2 * next_warning
                await self.warn(f"still {doing} after {format_duration(timedelta(seconds=round(waited)))}")

        return await run_beside(warn_while_waiting, work, name="wait-warnings")

    async def run_in_thread(
        self, work: Callable[[ShouldStop], _T], doing: str, progress: Callable[[], Hashable] = lambda: None
    ) -> _T:
        """Return what `work` returns in a thread, which is abandoned if the volume hangs, as `wait_for_progress`."""
        async with run_in_background(work, name=doing) as working:
            return await self.wait_for_progress(working, doing, progress)

    async def clean_up(self, step: Callable[[], Awaitable[object]], name: str, within: timedelta) -> None:
        """Complete `step` within that time, even if this task is canceled meanwhile; its failure changes nothing."""
        with suppress(DataPathError, TimeoutError):
            await run_shielded(step, name=name, deadline=Deadline.after(self.clock, within))

    async def wait_for_progress(self, work: Awaitable[_T], doing: str, progress: Callable[[], Hashable]) -> _T:
        """Return what `work` returns, however long it takes, unless `progress` stays as it is; warn if it takes long.

        Raises:
            DataPathError: there was no progress for the stall timeout.
        """
        canceler, limits = Canceler(), self.watchdog.limits

        async def watch() -> None:
            detector, last = StallDetector(limits), self.clock.monotonic()
            while not detector.timed_out(reachable=False):
                await self.clock.sleep(limits.check_seconds)
                now = self.clock.monotonic()
                detector.observe(progress(), now - last)
                last = now
            canceler.fail(DataPathError(f"{doing}: no progress for {format_duration(detector.idle)}"))

        async def wait() -> _T:
            return await run_beside(watch, self.wait_for(work, doing), name="wait-watchdog")

        return await run_unless_canceled(wait, canceler)

    def take_progress(self, line: str) -> str:
        """Parse the progress in a line of kopia's output; return the rest of the line."""
        return self.meter.take(line)

    def keep(self, line: str) -> None:
        """Keep a line of kopia's output for the report of a stall, and pass it on."""
        self._last_lines.append(line)
        self._on_line(line)
