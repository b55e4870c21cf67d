"""What a load tells while it runs: Events on its custom resource.

Knows the Events' forms and times. Does not know where progress comes from, and never fails a
load: an Event that cannot be written is logged.
Source: tests/recordings/velero-1.18.2/events-on-custom-resources.json.

How a mover ends: its termination message and its exit code.

Knows the message's form and how an error becomes one. Does not know what was run.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Final

from core.clock import Clock
from core.contract import DataPathReason, ProgressMessage, shorten_message
from core.errors import AgentError, CanceledError
from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from datamover.kopia.progress import Meter
from datamover.runtime.redact import Redactor

__all__ = ["Ending", "Reporter", "build_ending", "build_failure", "leave_message", "report_times"]


_logger = logging.getLogger(__name__)


_FIRST_SECONDS: Final = (0.8, 2.0, 4.0, 8.0)
"""The first one arrives within a second, the way to the API server included."""


_EVERY_SECONDS: Final = 10.0


def report_times() -> Iterator[float]:
    """Yield when progress is told, in seconds after the start: 0.8, 2, 4, 8, 18, 28 and so on."""
    last = _FIRST_SECONDS[-1]
    return chain(_FIRST_SECONDS, (last + _EVERY_SECONDS * n for n in count(1)))


class Reporter:
    """Writes the Events of one load, which begins now."""

    def __init__(self, recorder: EventRecorder, about: ObjectRef, clock: Clock) -> None:
        self._recorder = recorder
        self._about = about
        self._clock = clock
        self._began = clock.monotonic()

    async def follow(self, meter: Meter) -> None:
        """Tell that the data path begins, and then its progress, forever."""
        await self._say(DataPathReason.STARTED, f"Data path for {self._about.name} started")
        for at in report_times():
            await self._clock.sleep(max(0.0, self._began + at - self._clock.monotonic()))
            await self.progress(await meter.read())

    async def progress(self, reading: ProgressMessage) -> None:
        """Tell one reading."""
        await self._say(DataPathReason.PROGRESS, reading.to_json())

    async def warn(self, message: str) -> None:
        """Something about the data that whoever restores it should know."""
        _logger.warning("%s", message)
        await self._say(DataPathReason.WARNING, message, warning=True)

    async def waits(self, message: str) -> None:
        """Something has to be there before any data moves."""
        _logger.info("%s", message)
        await self._say(DataPathReason.WAITING, message)

    async def goes_on(self, message: str) -> None:
        """What was waited for is there."""
        _logger.info("%s", message)
        await self._say(DataPathReason.READY, message)

    async def ended(self, reason: DataPathReason, message: str) -> None:
        """The data path is over: completed with a result (JSON), failed or canceled with a text."""
        await self._say(reason, message, warning=reason is DataPathReason.FAILED)
        await self._say(DataPathReason.STOPPED, f"Data path for {self._about.name} stopped")

    async def _say(self, reason: DataPathReason, message: str, *, warning: bool = False) -> None:
        try:
            await self._recorder.record(self._about, str(reason), message, warning=warning)
        except KubeError as e:
            _logger.warning("an Event was not written: %s", e, extra={"reason": str(reason)})


@dataclass(frozen=True)
class Ending:
    """What is said at the end: JSON after a success, else a plain text without secrets."""

    reason: DataPathReason
    message: str
    exit_code: int = 0


def build_ending(result: str) -> Ending:
    """Return the ending of a success; `result` is its JSON."""
    return Ending(DataPathReason.COMPLETED, result)


def build_failure(error: Exception, redactor: Redactor) -> Ending:
    """Return the ending that `error` makes."""
    text = redactor.redact(str(error))
    if isinstance(error, CanceledError):
        return Ending(DataPathReason.CANCELED, text, error.exit_code)
    if isinstance(error, AgentError):
        return Ending(DataPathReason.FAILED, text, error.exit_code)
    return Ending(DataPathReason.FAILED, f"unexpected {type(error).__name__}: {text}", AgentError.exit_code)


def leave_message(ending: Ending, file: Path) -> None:
    """Write the termination message; where it cannot be written it stays in the log."""
    level = logging.ERROR if ending.reason is DataPathReason.FAILED else logging.INFO
    _logger.log(level, "%s", ending.message, extra={"reason": str(ending.reason)})
    try:
        file.write_text(shorten_message(ending.message))
    except OSError as e:
        _logger.warning("termination message %s was not written: %s", file, e.strerror)
