"""What this process and kopia may use: CPUs and memory, as the cgroup grants them.

Knows cgroup v1 and v2 and what follows for kopia: its garbage collector's settings and its
parallel workers. Does not run anything.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ResourceLimits", "ran_out_of_memory", "read_limits"]

_MIB: Final = 1024 * 1024

_NO_LIMIT_BYTES: Final = 1 << 60
"""cgroup v1 tells "no limit" as a number close to 2^63."""

_SOFT_LIMIT_MIB: Final = 200
"""With GOGC=50 an upload of 1.2 GB in 20,000 files then peaks at 225-230 MiB and takes 4 % more processor time.

Without any setting it peaks at 320-390 MiB. At 120 MiB it takes up to 80 % more processor time and peaks as high.
"""

_KEPT_BACK_MIB: Final = 136
"""What this process and the part of kopia that the soft limit does not bound take."""

_LEAST_SOFT_LIMIT_MIB: Final = 48
_WORKER_LIMIT: Final = 8
_WORKERS_A_CPU: Final = 2
"""Half of them wait for the disk: on four CPUs and a real disk 8 take three quarters of the time of 4."""

_TWO_KOPIAS_MIB: Final = 400
"""One that opens a repository takes up to 125 MiB, 64 of them for the key that it makes of the password."""

_RESTORE_BASE_MIB: Final = 180
_RESTORE_WORKER_MIB: Final = 25
"""A restore takes about 110 MiB beside this process, and 22 MiB for each worker."""

_RESTORE_SOFT_BASE_MIB: Final = 100
"""With 25 for each worker, 8 of them peak at 330 MiB and lose no time; without a bound at 400-490 MiB."""


@dataclass(frozen=True)
class ResourceLimits:
    """CPUs this process may use at a time, and its memory limit in bytes (None: no limit)."""

    cpus: int
    memory_bytes: int | None = None

    @property
    def frugal(self) -> bool:
        """Whether the memory holds one kopia at a time."""
        return self.memory_bytes is not None and self.memory_bytes < _TWO_KOPIAS_MIB * _MIB

    @property
    def restore_workers(self) -> int:
        """How many files a restore writes at a time unless somebody says otherwise."""
        return max(1, min(_WORKERS_A_CPU * self.cpus, _WORKER_LIMIT, self.fitting_restore_workers))

    @property
    def fitting_restore_workers(self) -> int:
        """How many restore workers the memory limit holds."""
        if self.memory_bytes is None:
            return 1 << 30
        return max(0, (self.memory_bytes // _MIB - _RESTORE_BASE_MIB) // _RESTORE_WORKER_MIB)

    def go_settings(self, environment: Mapping[str, str], *, restore_workers: int = 0) -> dict[str, str]:
        """Return the settings of kopia's garbage collector that `environment` does not make itself.

        They are for an upload, or for a restore by so many workers.
        """
        soft = _RESTORE_SOFT_BASE_MIB + restore_workers * _RESTORE_WORKER_MIB if restore_workers else _SOFT_LIMIT_MIB
        if self.memory_bytes is not None:
            limit = self.memory_bytes // _MIB
            soft = max(_LEAST_SOFT_LIMIT_MIB, min(limit - _KEPT_BACK_MIB, max(soft, limit // 4)))
        wanted = {"GOMEMLIMIT": f"{soft}MiB", **({} if restore_workers else {"GOGC": "50"})}
        return {name: value for name, value in wanted.items() if name not in environment}


def read_limits(root: Path = Path("/")) -> ResourceLimits:
    """Return the limits of the cgroup this process is in; `root` is where `/proc` and `/sys` are."""
    groups = _own_groups(root / "proc/self/cgroup")
    mounted = root / "sys/fs/cgroup"
    cpus = float(len(os.sched_getaffinity(0)))
    memory: list[int] = []
    for folder in _folders(mounted, groups, "memory"):
        memory += _numbers(folder / "memory.max") + _numbers(folder / "memory.limit_in_bytes")
    for folder in _folders(mounted, groups, "cpu"):
        quota = _numbers(folder / "cpu.max") or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == len(("quota", "period")) and quota[0] > 0:
            cpus = min(cpus, quota[0] / quota[1])
    known = [limit for limit in memory if 0 < limit < _NO_LIMIT_BYTES]
    return ResourceLimits(max(1, math.ceil(cpus)), min(known, default=None))


def ran_out_of_memory(root: Path = Path("/")) -> bool:
    """Whether the kernel has ended a process of this cgroup because its memory was used up.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control), key oom_kill.
    """
    groups = _own_groups(root / "proc/self/cgroup")
    for folder in _folders(root / "sys/fs/cgroup", groups, "memory"):
        for file in (folder / "memory.events", folder / "memory.oom_control"):
            if any(line.startswith("oom_kill ") and not line.endswith(" 0") for line in _lines(file)):
                return True
    return False


def _own_groups(listing: Path) -> dict[str, str]:
    """Return the path of this process's group for each controller; "" stands for cgroup v2."""
    groups: dict[str, str] = {}
    for line in _lines(listing):
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _folders(mounted: Path, groups: dict[str, str], controller: str) -> list[Path]:
    """Return where the controller's files may lie: the group, and the root a container sees instead."""
    found = [mounted, mounted / controller]
    if "" in groups:
        found.append(mounted / groups[""].lstrip("/"))
    if controller in groups:
        found.append(mounted / controller / groups[controller].lstrip("/"))
    return found


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file of one line; none where it is absent or says `max`."""
    try:
        words = file.read_text().split()
        return [int(word) for word in words]
    except (OSError, ValueError):
        return []


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
