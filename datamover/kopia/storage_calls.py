"""Calls of kopia before and after the data path, which wait for a storage that is slow or does not answer.

kopia itself retries a storage that refuses connections or is busy for four seconds while it opens a repository. A
storage that restarts needs longer. kopia's metrics say how long a request takes.
Source: kopia 0.23.1, repo/blob/s3/s3_storage.go (newStorageWithCredentials), cli/observability_flags.go,
repo/blob/storagemetrics/storage_metrics.go; minio-go 7.2.0, retry.go.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol, TypeVar

from core.clock import Backoff, Clock, SystemClock
from core.errors import RepositoryError, StorageOutageError
from core.models.units import format_duration
from datamover.kopia.causes import ACCESS_DENIED, count_index_blobs, find_cause, find_outage
from datamover.kopia.process import Kopia, KopiaAnswer, counter_flags, read_counters
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.stalls import Probe, StallLimits, Watchdog
from datamover.runtime.cancellation import run_beside

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_BACKOFF: Final = Backoff(1.0, 15.0)
"""Each attempt retries for seconds itself."""

_LONG_SECONDS: Final = 10.0
"""Opening a repository takes a third of a second. What takes longer than this is reported."""

_PROBE_SECONDS: Final = 30.0
"""A probe takes a third of a second. The limit is for an address that drops packets."""

_LEAST_PROBE_SECONDS: Final = 10.0
"""A busy node needs seconds to start kopia."""

_CHECKED_FAILURES: Final = 4
"""A location is read again after so many failures, which take 20 seconds or more."""

DENIALS_OF_IDENTITIES: Final = 2
"""How many are doubted: kopia waits a second for the keys of a node, and then opens the repository without any.
Source: minio-go 7.2.0, pkg/credentials/chain.go, iam_aws.go (fetchIMDSToken)."""

_INDEXES: Final = "indexes"
"""Source: kopia 0.23.1, newCommittedContentIndex in repo/content/committed_content_index.go."""


class KopiaCaller(Protocol):
    """Runs kopia for a call that moves no data of a volume."""

    async def call(self, attempted: str, *arguments: str) -> KopiaAnswer:
        """Return kopia's answer; `attempted` is the operation and its object, for errors."""
        ...


class WaitReporter:
    """Reports what the mover waits for; this one, to the log only."""

    async def waiting(self, message: str) -> None:
        """Report what the mover waits for."""
        _logger.warning("%s", message)

    async def ready(self, message: str) -> None:
        """Report that the wait is over."""
        _logger.warning("%s", message)

    async def warn(self, message: str) -> None:
        """Report a problem that does not fail the transfer."""
        _logger.warning("%s", message)


async def _find_no_change() -> None:
    """Return that the address of a storage is still the same."""


@dataclass(frozen=True)
class Waits:
    """How long to wait for a storage, and who reports it.

    `find_change` returns what has changed of where the storage is, None: nothing. Then no wait for it would help.
    """

    clock: Clock = field(default_factory=SystemClock)
    limits: StallLimits = field(default_factory=StallLimits)
    reporter: WaitReporter = field(default_factory=WaitReporter)
    find_change: Callable[[], Awaitable[str | None]] = _find_no_change

    @property
    def probe_seconds(self) -> float:
        """How long a probe may take: hardly longer than a stall, so that a short timeout is kept."""
        timeout = self.limits.timeout.total_seconds() or _PROBE_SECONDS
        return min(_PROBE_SECONDS, max(timeout, _LEAST_PROBE_SECONDS))


class NoAnswerError(RepositoryError):
    """The storage does not answer, or is busy; `cause` is without what differs between attempts."""

    def __init__(self, cause: str, line: str) -> None:
        super().__init__(f"{cause}: {line}")
        self.cause = cause


class StorageCalls:
    """Runs kopia on one repository, however long its storage takes, up to the stall timeout without progress."""

    def __init__(self, kopia: Kopia, description: str, cache: Path, *, waits: Waits, probe: Probe) -> None:
        """Call the repository `description`."""
        self._kopia = kopia
        self._description = description
        self._indexes = cache / _INDEXES
        self._waits = waits
        limits = replace(waits.limits, first_warning_seconds=2 * _LONG_SECONDS)
        self.watchdog = Watchdog(waits.clock, self._report_wait, probe, limits)
        self.doubted_denials = 0
        """How often another attempt follows if access is denied."""
        self._reported = ""
        self._warned = False

    async def call(self, attempted: str, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        """Return the answer of a call as `Kopia.call` does, but raise what `open_once` and `repeat` do."""

        async def call_once() -> KopiaAnswer:
            meter = Meter(self._waits.clock, Direction.RESTORE)
            flagged = (meter.counter_argument, *arguments)
            call = partial(self._kopia.call, attempted, *flagged, seconds=None, output_fd=output_fd)
            return await self.open_once(meter, call)

        return await self.repeat(call_once)

    async def open_once(self, meter: Meter, work: Callable[[], Coroutine[Any, Any, KopiaAnswer]]) -> KopiaAnswer:
        """Return the answer of `work`, which opens the repository with `meter`; raises as `check_outage`."""
        answer = await run_beside(
            lambda: self._report_duration(meter),
            self.watchdog.guard(f"open {self._description}", meter, work),
            name="open-reports",
        )
        self.check_outage(answer)
        await self._check_indexes(answer)
        return answer

    async def repeat(self, step: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `step` returns; repeat it while the storage does not answer, and its address is the same.

        A step that reads a part of the repository before it fails has made progress only if that is still in the cache:
        so it happens once for each part. Raises StorageOutageError after the stall timeout without progress.
        """
        clock, timeout = self._waits.clock, self._waits.limits.timeout
        failures, since_seconds, cached = 0, clock.monotonic(), self._count_cached()
        while True:
            try:
                result = await step()
            except NoAnswerError as e:
                failures += 1
                if (count := self._count_cached()) > cached:
                    cached, since_seconds = count, clock.monotonic()
                lasted_seconds = clock.monotonic() - since_seconds
                change = None if failures % _CHECKED_FAILURES else await self._waits.find_change()
                if change or (timeout and lasted_seconds >= timeout.total_seconds()):
                    lasted = format_duration(timedelta(seconds=round(lasted_seconds)))
                    silent = f"{self._description} did not answer for {lasted}"
                    raise StorageOutageError(": ".join(filter(None, [silent, change, str(e)]))) from e
                await self._report_wait(f"{self._description} does not answer, will retry: {e.cause}")
                await clock.sleep(_BACKOFF.seconds_after(failures))
            else:
                if self._reported:
                    self._reported = ""
                    await self._waits.reporter.ready(f"{self._description} answers")
                return result

    def _count_cached(self) -> int:
        """Return how many indexes are in the cache."""
        with suppress(OSError):
            return sum(1 for _ in self._indexes.iterdir())
        return 0

    def check_outage(self, answer: KopiaAnswer) -> None:
        """Check that the storage did not fail; raises a RepositoryError for which `repeat` repeats its step."""
        if answer.succeeded:
            return
        cause = find_outage(answer.lines, answer.volume)
        if self.doubted_denials and find_cause(answer.lines, answer.volume) == ACCESS_DENIED:
            self.doubted_denials -= 1
            cause = f"{ACCESS_DENIED}, or the service that grants it does not answer"
        if cause:
            raise NoAnswerError(cause, answer.lines[-1])

    async def _report_wait(self, message: str) -> None:
        if message != self._reported:
            self._reported = message
            await self._waits.reporter.waiting(message)

    async def _report_duration(self, meter: Meter) -> None:
        """Report that a call takes long, again after each doubling in which it made progress."""
        clock, waited, due, known = self._waits.clock, 0.0, _LONG_SECONDS, meter.activity
        await clock.sleep(due)
        while True:
            if not waited or meter.activity != known:
                known = meter.activity
                await self._report_wait(f"still opening {self._description} after {due:.0f} s")
            waited, due = due, 2 * due
            await clock.sleep(due - waited)

    async def _check_indexes(self, answer: KopiaAnswer) -> None:
        """Report once that the repository needs maintenance."""
        if not self._warned and (count := count_index_blobs(answer.lines)):
            self._warned = True
            await self._waits.reporter.warn(
                f"{self._description} has {count} index blobs, and reads each one before any data moves: "
                "run `kopia maintenance run --full`"
            )


_LATENCY: Final = re.compile(
    r'^kopia_blob_storage_latency_ms_(sum|count)\{method="(GetBlob-full|ListBlobs)"\} (\S+)$', re.MULTILINE
)


def parse_request_seconds(counters: str) -> float | None:
    """Return how long a request took, by kopia's metrics in Prometheus text format; None: there was none.

    It is the lower mean of listings, which take longer with many blobs, and downloads, which do with large ones.
    """
    found = {(method, what): float(value) for what, method, value in _LATENCY.findall(counters)}
    means = [
        total / number / 1000
        for (method, what), total in found.items()
        if what == "sum" and (number := found.get((method, "count"), 0.0)) > 0
    ]
    return min(means, default=None)


class RequestTime:
    """Measured by the first calls with the flags of `measuring`; their files are in `folder` meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: float | None = None

    @property
    def seconds(self) -> float:
        """How long a request takes, opening a connection included, since kopia keeps few open; 0: it is not known."""
        return self._seconds or 0.0

    @contextmanager
    def measuring(self) -> Iterator[list[str]]:
        """Yield kopia's flags for one call within the block; none once the time is known, or without room for files."""
        directory = None
        if self._seconds is None:
            with suppress(OSError):
                directory = TemporaryDirectory(prefix="requests-", dir=self._folder, ignore_cleanup_errors=True)
        if directory is None:
            yield []
            return
        with directory as name:
            yield counter_flags(Path(name))
            measured = parse_request_seconds(read_counters(Path(name)))
        if measured is not None:
            self._seconds = min(measured, self._seconds or measured)

    def take(self, counters: str) -> None:
        """Take kopia's metrics of a call, unless the time is known."""
        if self._seconds is None:
            self._seconds = parse_request_seconds(counters)
