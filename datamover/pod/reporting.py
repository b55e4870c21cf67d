"""What a data mover reports: Events while it runs, a termination message and an exit code at the end.

It never fails a transfer: an Event that cannot be recorded is logged.
Source: tests/recordings/velero-1.18.2/events-on-custom-resources.json.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from core.clock import Clock
from core.contract import DataPathReason, ProgressMessage, shorten_message
from core.errors import AgentError, CanceledError
from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.redact import Redactor
from datamover.kopia.progress import Meter
from datamover.kopia.storage_calls import WaitReporter
from datamover.runtime.cancellation import run_beside

_logger = logging.getLogger(__name__)

_FIRST_SECONDS: Final = (0.8, 2.0, 4.0, 8.0)
"""The first Event arrives within a second, including the way to the API server."""

_INTERVAL_SECONDS: Final = 10.0


def report_times() -> Iterator[float]:
    """Yield when progress is reported, in seconds after the start: 0.8, 2, 4, 8, 18, 28 and so on."""
    last = _FIRST_SECONDS[-1]
    return chain(_FIRST_SECONDS, (last + _INTERVAL_SECONDS * n for n in count(1)))


@dataclass(frozen=True)
class Termination:
    """The end of a data mover: its message is JSON after a success, else a text without secrets."""

    reason: DataPathReason
    message: str
    exit_code: int = 0


class Reporter(WaitReporter):
    """Records the Events of one transfer, whose data path starts now in its `attempt`."""

    def __init__(self, recorder: EventRecorder, about: ObjectRef, clock: Clock, *, attempt: int = 1) -> None:
        self._attempt = attempt
        self._recorder = recorder
        self._about = about
        self._clock = clock
        self._started = clock.monotonic()

    async def follow(self, meter: Meter) -> None:
        """Report the start of the data path, and then its progress, forever."""
        await self._record(DataPathReason.STARTED, f"Data path for {self._about.name} started")
        await run_beside(lambda: self._follow_start(meter), self._follow_times(meter), name="snapshot-start")

    async def _follow_start(self, meter: Meter) -> None:
        """Report at once when kopia began its snapshot: by this time the checkpoints of the attempt are known."""
        while True:
            await meter.wait_snapshot_started()
            await self.progress(await meter.read())

    async def _follow_times(self, meter: Meter) -> None:
        for at in report_times():
            await self._clock.sleep(max(0.0, self._started + at - self._clock.monotonic()))
            await self.progress(await meter.read())

    async def progress(self, reading: ProgressMessage) -> None:
        """Report one reading."""
        await self._record(DataPathReason.PROGRESS, replace(reading, attempt=self._attempt).to_json())

    async def warn(self, message: str) -> None:
        """Report a problem that does not fail the transfer."""
        _logger.warning("%s", message)
        await self._record(DataPathReason.WARNING, message, warning=True)

    async def waiting(self, message: str) -> None:
        """Report what must exist before any data moves."""
        _logger.info("%s", message)
        await self._record(DataPathReason.WAITING, message)

    async def ready(self, message: str) -> None:
        """Report that what the mover waited for exists."""
        _logger.info("%s", message)
        await self._record(DataPathReason.READY, message)

    async def finished(self, termination: Termination) -> None:
        """Report the end of the data path."""
        reason = termination.reason
        await self._record(reason, termination.message, warning=reason is DataPathReason.FAILED)
        await self._record(DataPathReason.STOPPED, f"Data path for {self._about.name} stopped")

    async def _record(self, reason: DataPathReason, message: str, *, warning: bool = False) -> None:
        try:
            await self._recorder.record(self._about, str(reason), message, warning=warning)
        except KubeError as e:
            _logger.warning("could not record an Event: %s", e, extra={"reason": str(reason)})


def build_success(result: str) -> Termination:
    """Return the termination after a success; `result` is its JSON."""
    return Termination(DataPathReason.COMPLETED, result)


def build_failure(error: Exception, redactor: Redactor) -> Termination:
    """Return the termination that `error` causes."""
    # A name of the system's may be no UTF-8, as a message must be.
    text = redactor.redact(str(error)).encode(errors="backslashreplace").decode()
    if isinstance(error, CanceledError):
        return Termination(DataPathReason.CANCELED, text, error.exit_code)
    if isinstance(error, AgentError):
        return Termination(DataPathReason.FAILED, text, error.exit_code)
    return Termination(DataPathReason.FAILED, f"unexpected {type(error).__name__}: {text}", AgentError.exit_code)


def write_termination_message(termination: Termination, file: Path) -> None:
    """Log the termination message and write it to `file`; if that fails, it is in the log only."""
    level = logging.ERROR if termination.reason is DataPathReason.FAILED else logging.INFO
    _logger.log(level, "%s", termination.message, extra={"reason": str(termination.reason)})
    store_termination_message(termination, file)


def store_termination_message(termination: Termination, file: Path) -> None:
    """Write the termination message to `file`, in place of an earlier one."""
    try:
        file.write_text(shorten_message(termination.message))
    except OSError as e:
        _logger.warning("could not write the termination message %s: %s", file, e.strerror)
