"""What was done and what became of it, kept by all who take part; and the verdict.

Knows no cluster: transfers and faults are reported to it.
"""

import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ending:
    """How a transfer may end: its phases, and the pattern of its message where it is Failed.

    The phase `deleted` is that of a transfer that was deleted.
    """

    phases: frozenset[str]
    pattern: str = ""

    def explains(self, phase: str, message: str) -> bool:
        """Whether an end is one of these, and its message names the cause."""
        if phase not in self.phases:
            return False
        return phase != "Failed" or bool(self.pattern and re.search(self.pattern, message, re.IGNORECASE | re.DOTALL))


@dataclass
class Entry:
    """One transfer: what happened to it, how it may end, how it did."""

    kind: str
    name: str
    fault: str
    ending: Ending
    phase: str = ""
    message: str = ""

    @property
    def final(self) -> bool:
        """Whether it is final, or was deleted."""
        return self.phase in {"Completed", "Failed", "Canceled", "deleted"}

    @property
    def explained(self) -> bool:
        """Whether it ended as it may, and its message names the fault."""
        return self.final and self.ending.explains(self.phase, self.message)


@dataclass
class Journal:
    entries: list[Entry] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, entry: Entry) -> None:
        with self._lock:
            self.entries.append(entry)

    def injected(self, fault: str) -> None:
        with self._lock:
            self.faults[fault] += 1
        self.say(f"fault: {fault}")

    def report(self, entry: Entry) -> None:
        remark = "" if entry.explained else " NOT EXPLAINED"
        cause = f": {entry.message}" if entry.phase in {"", "Failed"} else ""
        self.say(f"{entry.kind} {entry.name} ({entry.fault}): {entry.phase or 'not final'}{remark}{cause}")

    def count(self, *kinds: str, completed: bool = False) -> int:
        """How many there are of some kinds, or are Completed."""
        found = [entry for entry in self.entries if entry.kind in kinds]
        return sum(entry.phase == "Completed" for entry in found) if completed else len(found)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    @property
    def not_final(self) -> list[Entry]:
        """Transfers without a final phase."""
        return [entry for entry in self.entries if not entry.final]

    @property
    def unexplained(self) -> list[Entry]:
        """Transfers with a final phase that their fault does not allow, or whose message does not name the fault."""
        return [entry for entry in self.entries if entry.final and not entry.explained]
