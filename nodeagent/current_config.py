"""The configuration in force: who needs it asks here each time, and whoever must act hears of a change.

Knows which of two documents counts: an edit with a mistake is refused as a whole, and the last
good one stays. Does not know where documents come from (`nodeagent.config_watch`) or what
follows from a setting.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nodeagent.config import AgentConfig, ParsedConfig

__all__ = ["CurrentConfig", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What became of an edit: in force, or refused and why, in one line each.

    `changed` says whether anything is different from before the edit.
    """

    changed: bool
    reasons: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the last good configuration stays."""
        return bool(self.reasons)


class CurrentConfig:
    """Holds the good configuration in force and what is wrong with the document that is not."""

    def __init__(self, parsed: ParsedConfig | None = None) -> None:
        """Start with `parsed`, mistakes and all: at start a bad value alone takes its default."""
        self._parsed = parsed or ParsedConfig()
        self._refused: tuple[str, ...] = ()
        self._subscribers: list[Callable[[], None]] = []

    @property
    def config(self) -> AgentConfig:
        """The configuration in force; frozen, so a load that holds it keeps what it began with."""
        return self._parsed.config

    @property
    def digest(self) -> str:
        """The fingerprint of the document in force; empty where there is none."""
        return self._parsed.digest

    @property
    def warnings(self) -> list[str]:
        """What an operator should read about the document in force."""
        return self._parsed.warnings

    @property
    def refused(self) -> tuple[str, ...]:
        """Why the document as it is now is not in force; empty where it is."""
        return self._refused

    @property
    def valid(self) -> bool:
        """Whether the document is in force exactly as it is written."""
        return not self._refused and not self._parsed.mistakes

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change of what is in force; it must not block."""
        self._subscribers.append(on_change)

    def take(self, edited: ParsedConfig) -> Verdict:
        """Put an edited document in force, unless it holds a mistake."""
        if edited.mistakes:
            # The document that the agent started with may hold mistakes: seen again, it is no edit.
            if edited.digest == self.digest and not self._refused:
                return Verdict(changed=False)
            return self.refuse(tuple(map(str, edited.mistakes)))
        came_back = bool(self._refused)
        self._refused = ()
        if edited.digest == self.digest:
            return Verdict(changed=came_back)
        self._parsed = edited
        for on_change in self._subscribers:
            on_change()
        return Verdict(changed=True)

    def refuse(self, reasons: tuple[str, ...]) -> Verdict:
        """Keep what is in force, and remember why the document is not."""
        changed = reasons != self._refused
        self._refused = reasons
        return Verdict(changed=changed, reasons=reasons)
