"""The Events of a data mover: its progress, and what it is pending for."""

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from core.contract import DataPathReason, ProgressMessage, parse_progress
from core.errors import ContractError
from core.models.base import JsonDict

__all__ = ["MoverPending", "read_progress"]

_log = logging.getLogger(__name__)

_MOST_TEXTS: Final = 100
"""A mover may be hostile."""


@dataclass
class MoverPending:
    """What the mover of one transfer is pending for; `text` is empty while it is not.

    `reported` has the last texts: only they are removed from a status, never another message.
    """

    text: str = ""
    reported: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TEXTS))
    at: str = ""

    def observe_event(self, event: JsonDict) -> None:
        """Take in a core/v1 Event of the mover; other reasons change nothing.

        A list is in the order of names, which end in the time for the Events of one component; only
        one that was written late may follow a newer one.
        """
        reason, at = event.get("reason", ""), event.get("lastTimestamp") or ""
        if reason not in {DataPathReason.WAITING, DataPathReason.READY} or at < self.at:
            return
        self.at = at
        self.text = str(event.get("message", "")) if reason == DataPathReason.WAITING else ""
        if self.text and self.text not in self.reported:
            self.reported.append(self.text)

    def observe_progress(self, message: ProgressMessage) -> None:
        """Take in the progress of the mover: while data moves, it is not pending."""
        if message.done_bytes or message.total_bytes:
            self.text = ""

    def correct(self, shown: str) -> str | None:
        """Return the message that has to replace `shown` in the status; None if nothing is to be written."""
        if self.text:
            return self.text if shown != self.text else None
        return "" if shown in self.reported else None


def read_progress(event: JsonDict) -> ProgressMessage | None:
    """Return the progress that a `Data-Path-Progress` Event reports; None, and a warning, if it is invalid."""
    try:
        return parse_progress(event.get("message", ""))
    except ContractError as e:
        _log.warning("%s", e)
        return None
