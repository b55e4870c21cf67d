"""How a mover ends: its termination message and its exit code.

Knows the message's form and how an error becomes one. Does not know what was run.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from core.contract import DataPathReason, shorten_message
from core.errors import AgentError, CanceledError
from datamover.scrub import Scrubber

__all__ = ["Ending", "build_ending", "build_failure", "leave_message"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """What is said at the end: JSON after a success, else a plain text without secrets."""

    reason: DataPathReason
    message: str
    exit_code: int = 0


def build_ending(result: str) -> Ending:
    """Return the ending of a success; `result` is its JSON."""
    return Ending(DataPathReason.COMPLETED, result)


def build_failure(error: Exception, scrubber: Scrubber) -> Ending:
    """Return the ending that `error` makes."""
    text = scrubber.scrub(str(error))
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
