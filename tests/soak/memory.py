"""What the agents' processes take, over their lives."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.processes import Process, find_all

_SETTLED_SECONDS = 60
"""By then a new agent has read what there is."""


@dataclass
class Memory:
    """Samples of every agent's resident memory; an agent that is killed is followed by another."""

    _first: dict[int, tuple[float, int]] = field(default_factory=dict)
    _settled: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    def sample(self) -> None:
        now = time.monotonic()
        for process in find_all(_is_agent):
            resident_kib = _resident_kib(process.pid)
            if not resident_kib:
                continue
            began, _ = self._first.setdefault(process.pid, (now, resident_kib))
            if now - began >= _SETTLED_SECONDS:
                self._settled.setdefault(process.pid, resident_kib)
                self._last[process.pid] = resident_kib

    @property
    def growth_mib(self) -> float:
        """By how much the agent that grew most did so since it had settled."""
        grown = [self._last[pid] - settled for pid, settled in self._settled.items()]
        return round(max(grown, default=0) / 1024, 1)

    @property
    def peak_mib(self) -> float:
        """The most that a settled agent took at its last sample."""
        return round(max(self._last.values(), default=0) / 1024, 1)


def _is_agent(process: Process) -> bool:
    return "nodeagent" in process.argv and "serve" in process.argv


def _resident_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
