"""The Events of a data mover: its progress, and what it is pending for."""

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from core.contract import DataPathReason, ProgressMessage, parse_progress
from core.errors import ContractError
from core.kube.types import Event
from core.models.transfers import Progress

_log = logging.getLogger(__name__)

_MOST_TEXTS: Final = 100
"""A mover may be hostile."""


@dataclass
class MoverPending:
    """What the mover of one transfer is pending for; `text` is None while it is not.

    `reported` has the last texts: only they are removed from a status, never another message.
    """

    text: str | None = None
    reported: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TEXTS))
    at: str = ""

    def observe_event(self, event: Event) -> None:
        """Take in a core/v1 Event of the mover; other reasons change nothing.

        A list is in the order of names, which end in the time for the Events of one component; only
        one that was written late may follow a newer one.
        """
        reason, at = event.get("reason", ""), event.get("lastTimestamp") or ""
        if reason not in {DataPathReason.WAITING, DataPathReason.READY} or at < self.at:
            return
        self.at = at
        self.text = str(event.get("message", "")) if reason == DataPathReason.WAITING else None
        if self.text and self.text not in self.reported:
            self.reported.append(self.text)

    def observe_progress(self, message: ProgressMessage) -> None:
        """Take in the progress of the mover: while data moves, it is not pending."""
        if message.done_bytes or message.total_bytes:
            self.text = None

    def correct(self, shown: str | None) -> str | None:
        """Return the message that has to replace `shown` in the status; None if nothing is to be written."""
        if self.text:
            return self.text if shown != self.text else None
        return "" if shown in self.reported else None


@dataclass(frozen=True)
class Reported:
    """The progress that the movers of one transfer reported.

    Attributes:
        attempt: number of the last attempt.
        message: the progress to show; its bytes never decrease, also where an attempt starts from 0.
        attempt_bytes: what this attempt has done.
        earlier_bytes: what the attempts before it had done.
        completed: a mover recorded that it has moved all data; after a restart of the agent, maybe the mover of an
            earlier attempt.
    """

    attempt: int = 1
    message: ProgressMessage = field(default_factory=ProgressMessage)
    attempt_bytes: int = 0
    earlier_bytes: int = 0
    completed: bool = False

    def begin(self, attempt: int) -> "Reported":
        """Return the progress when another attempt begins, whose mover counts from 0."""
        shown = ProgressMessage(done_bytes=self.message.done_bytes, total_bytes=self.message.total_bytes)
        return Reported(attempt, shown, earlier_bytes=shown.done_bytes)

    def resume(self, shown: Progress) -> "Reported":
        """Return the progress once the status is known, which an earlier process of the agent may have written."""
        message = self.message
        if shown.bytes_done > message.done_bytes:
            message = ProgressMessage(done_bytes=shown.bytes_done, total_bytes=shown.total_bytes)
        return replace(self, message=message, earlier_bytes=max(self.earlier_bytes, shown.bytes_done))

    def is_newer_than(self, message: ProgressMessage) -> bool:
        """Return whether `message` is of an earlier attempt, or older than the last message of this one."""
        return message.attempt < self.attempt or message.done_bytes < self.attempt_bytes

    def take(self, message: ProgressMessage) -> "Reported":
        """Return the progress after a message of this attempt."""
        started = message.snapshot_started or self.message.snapshot_started
        done_bytes = max(message.done_bytes, self.earlier_bytes)
        total_bytes = max(message.total_bytes, done_bytes)
        shown = structs.replace(message, done_bytes=done_bytes, total_bytes=total_bytes, snapshot_started=started)
        return replace(self, message=shown, attempt_bytes=message.done_bytes)


def read_progress(event: Event) -> ProgressMessage | None:
    """Return the progress that a `Data-Path-Progress` Event reports; None, and a warning, if it is invalid."""
    try:
        return parse_progress(event.get("message", ""))
    except ContractError as e:
        _log.warning("%s", e)
        return None
