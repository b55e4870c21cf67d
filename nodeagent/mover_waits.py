"""What a running mover says it waits for, and what of that belongs into the load's status.

Knows the mover's Events about waits, and that data that moves ends every wait. Does not know
how Events come in, nor who writes (`nodeagent.progress`).
"""

from dataclasses import dataclass, field

from core.contract import DataPathReason, ProgressMessage
from core.models.base import JsonDict

__all__ = ["MoverWait"]


@dataclass
class MoverWait:
    """The wait of one load's mover; `text` is empty while it waits for nothing.

    `told` is all that it ever waited for: only that is taken back, nobody else's message.
    """

    text: str = ""
    told: set[str] = field(default_factory=set)
    at: str = ""

    def take(self, event: JsonDict) -> None:
        """Note a core/v1 Event of the mover; one about no wait changes nothing.

        A list is in the order of names, which end in the time for one component's Events; only
        one that was written late may come after a newer one.
        """
        reason, at = event.get("reason", ""), event.get("lastTimestamp") or ""
        if reason not in {DataPathReason.WAITING, DataPathReason.READY} or at < self.at:
            return
        self.at = at
        self.text = str(event.get("message", "")) if reason == DataPathReason.WAITING else ""
        if self.text:
            self.told.add(self.text)

    def take_progress(self, message: ProgressMessage) -> None:
        """Note how far the mover is: where data moves, nothing is waited for."""
        if message.done_bytes or message.total_bytes:
            self.text = ""

    def correct(self, shown: str) -> str | None:
        """Return the message that has to stand in place of `shown`, None where nothing is to be written."""
        if self.text:
            return self.text if shown != self.text else None
        return "" if shown in self.told else None
