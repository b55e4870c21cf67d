"""CPU and memory limits of the cgroup (v1 and v2), and the settings of kopia that follow from them."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MIB: Final = 1024 * 1024

_NO_LIMIT_BYTES: Final = 1 << 60
"""cgroup v1 expresses "no limit" as a number close to 2^63."""

_SOFT_LIMIT: Final = "GOMEMLIMIT"
_SOFT_LIMIT_MIB: Final = 200
"""With GOGC=50 a backup of 1.2 GB in 20,000 files then peaks at 225-230 MiB and takes 4 % more CPU time. Without any
setting it peaks at 320-390 MiB. At 120 MiB it takes up to 80 % more CPU time and peaks as high."""

_RESERVED_MIB: Final = 136
"""The use of this process, and of the part of kopia that the soft limit does not bound."""

_MIN_SOFT_LIMIT_MIB: Final = 48
_WORKER_LIMIT: Final = 8
_WORKERS_PER_CPU: Final = 2
"""Half of them wait for the disk: on four CPUs and a real disk, 8 workers take three quarters of the time of 4."""

_RESTORE_BASE_MIB: Final = 180
_RESTORE_WORKER_MIB: Final = 25
"""A restore takes about 110 MiB in addition to this process, and 22 MiB per worker."""

_FAST_SECONDS: Final = 0.005
"""A request to a storage in the same data center takes 1 to 4 ms, also on a busy node. More workers gain nothing."""

_FILE_SECONDS: Final = 0.0008
_BYTE_SECONDS: Final = 4.6e-9
"""Share of a CPU: 20,000 files of 10 kB take kopia 15 s, and 1 GB in large files 4.4 s."""

_REQUEST_BYTES: Final = 4 * _MIB
"""kopia reads a large file in pieces of this size, on average, one after the other."""

_MOST_RESTORE_WORKERS: Final = 64
"""With 20 ms to the storage, 128 take as long, and 48 half as long again; 256 take longer."""

_MORE_PER_FITTING: Final = 2
"""More workers do not raise the soft limit, so kopia collects earlier what they no longer use: with large files each
needs 10 to 12 MiB then, not 25."""

_MOST_PACKS: Final = 4
_WORKERS_PER_PACK: Final = 2
"""A pack of 21 MB that is fetched as a whole is in memory twice."""

_MORE_BACKUP_MIB: Final = 305
"""With so much memory, a backup reads one more file than there are CPUs: one of them waits until the storage has a pack
of 20 MB, near or far. On two CPUs this saves up to a sixth of the time for 11 MiB; another one for as much again saves
nothing where the storage is on the node, and a tenth or more where it is not."""

_LEAST_RESTORE_MIB: Final = 130
_RESTORED_ENTRY_BYTES: Final = 450
"""kopia keeps all entries of what it restores: 200,000 took 176 MiB within 256, 2 million 762 MiB without a limit."""

_UNLIMITED_ENTRY_BYTES: Final = 1000
"""Without it, a million entries are above the soft limit, and the garbage collection takes half of the CPUs."""

_LEAST_ENTRIES: Final = 50_000
"""A restore of so many has to fit: one that is split into parts for no reason takes far longer."""

_RESTORE_SOFT_BASE_MIB: Final = 100
"""With 25 MiB per worker, 8 of them peak at 330 MiB and lose no time; without a limit at 400-490 MiB."""

_BACKUP_MIB: Final = 290
"""What a backup takes without its index: this process, what the soft limit bounds, and packs that are being sent."""

_INDEX_PERCENT: Final = 25
"""The part of the memory limit that is there for the index at least: a small limit lowers the soft limit too."""

_CONTENT_BYTES: Final = 800
"""What kopia takes for each new content until its index is written: 450, and almost as much while it writes it."""

_CONTENTS_A_SECOND: Final = 18_000
"""The most that one CPU was seen to make, of files of 16 bytes."""

_MAINTENANCE_PERCENT: Final = 70
"""A part of the memory limit: a full run over 500,000 contents then peaks at 198 instead of 363 MiB."""


@dataclass(frozen=True)
class ResourceLimits:
    """The number of CPUs, and the memory limit in bytes (None: no limit)."""

    cpus: int
    memory_bytes: int | None = None

    @property
    def backup_workers(self) -> int:
        """The default number of files that a backup reads in parallel."""
        return self.cpus + (self.memory_bytes is None or self.memory_bytes >= _MORE_BACKUP_MIB * _MIB)

    @property
    def restore_workers(self) -> int:
        """The default number of files that a restore writes in parallel."""
        return max(1, min(_WORKERS_PER_CPU * self.cpus, _WORKER_LIMIT, self.fitting_restore_workers))

    def adapted_restore_workers(self, request_seconds: float, file_bytes: int, packs: int = 0) -> int:
        """Return how many files of `file_bytes` on average a restore writes in parallel: as keep the CPUs busy.

        Where requests to the storage are fast, it is the default number. `packs` are fetched as a whole meanwhile.
        """
        usual = self.restore_workers
        if request_seconds < _FAST_SECONDS:
            return usual
        cpu_seconds = _FILE_SECONDS + min(file_bytes, _REQUEST_BYTES) * _BYTE_SECONDS
        wanted = min(math.ceil(self.cpus * (1 + request_seconds / cpu_seconds)), _MOST_RESTORE_WORKERS)
        room = _MORE_PER_FITTING * (self.fitting_restore_workers - usual - _WORKERS_PER_PACK * packs)
        return usual + max(0, min(wanted - usual, room))

    @property
    def restore_packs(self) -> int:
        """How many packs of small files a restore fetches as a whole at a time; 0: the memory suffices for none."""
        workers = self.restore_workers
        fitting = max(0, self.fitting_restore_workers - workers)
        return min(_MOST_PACKS, min(workers, fitting) // _WORKERS_PER_PACK)

    @property
    def fitting_restore_workers(self) -> int:
        """The number of restore workers that the memory limit suffices for."""
        if self.memory_bytes is None:
            return 1 << 30
        return max(0, (self.memory_bytes // _MIB - _RESTORE_BASE_MIB) // _RESTORE_WORKER_MIB)

    @property
    def fitting_entries(self) -> int | None:
        """The number of entries that the memory limit suffices for in a restore, about; None: no limit."""
        if self.memory_bytes is None:
            return None
        return max(_LEAST_ENTRIES, (self.memory_bytes - _LEAST_RESTORE_MIB * _MIB) // _RESTORED_ENTRY_BYTES)

    def entry_bytes(self, environment: Mapping[str, str]) -> int:
        """Return what each entry of a restore adds to the soft limit, unless `environment` has set one."""
        return _UNLIMITED_ENTRY_BYTES if self.memory_bytes is None and _SOFT_LIMIT not in environment else 0

    def index_seconds(self, files: float) -> float:
        """Return how long a backup of so many files can be without writing its index within the memory limit.

        Infinite if the limit suffices for all of them; otherwise what tiny files take at most.
        """
        if self.memory_bytes is None:
            return math.inf
        room_bytes = max(self.memory_bytes - _BACKUP_MIB * _MIB, self.memory_bytes * _INDEX_PERCENT // 100)
        fitting = room_bytes / _CONTENT_BYTES
        return math.inf if files <= fitting else fitting / (_CONTENTS_A_SECOND * self.cpus)

    def go_settings(self, environment: Mapping[str, str], *, restore_workers: int = 0) -> dict[str, str]:
        """Return settings of Go's garbage collector that `environment` lacks, for a restore's workers or a backup."""
        soft = _RESTORE_SOFT_BASE_MIB + restore_workers * _RESTORE_WORKER_MIB if restore_workers else _SOFT_LIMIT_MIB
        if self.memory_bytes is not None:
            limit = self.memory_bytes // _MIB
            soft = max(_MIN_SOFT_LIMIT_MIB, min(limit - _RESERVED_MIB, max(soft, limit // 4)))
        wanted = {_SOFT_LIMIT: f"{soft}MiB", **({} if restore_workers else {"GOGC": "50"})}
        return {name: value for name, value in wanted.items() if name not in environment}

    def maintenance_settings(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the settings of Go's garbage collector for maintenance that `environment` does not contain."""
        wanted = {"GOGC": "50"}
        if self.memory_bytes is not None:
            wanted[_SOFT_LIMIT] = f"{self.memory_bytes * _MAINTENANCE_PERCENT // 100 // _MIB}MiB"
        return {name: value for name, value in wanted.items() if name not in environment}


def read_limits(root: Path = Path("/")) -> ResourceLimits:
    """Return the limits of this process's cgroup; `root` contains `/proc` and `/sys`."""
    cpus = float(len(os.sched_getaffinity(0)))
    memory: list[int] = []
    for directory in _directories(root, "memory"):
        memory += _numbers(directory / "memory.max") + _numbers(directory / "memory.limit_in_bytes")
    for directory in _directories(root, "cpu"):
        quota = _numbers(directory / "cpu.max") or [
            *_numbers(directory / "cpu.cfs_quota_us"),
            *_numbers(directory / "cpu.cfs_period_us"),
        ]
        if len(quota) == len(("quota", "period")) and quota[0] > 0:
            cpus = min(cpus, quota[0] / quota[1])
    known = [limit for limit in memory if 0 < limit < _NO_LIMIT_BYTES]
    return ResourceLimits(max(1, math.ceil(cpus)), min(known, default=None))


def ran_out_of_memory(root: Path = Path("/")) -> bool:
    """Return whether the kernel has killed a process of this cgroup for lack of memory.

    Source: Linux, cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst (memory.oom_control), key oom_kill.
    """
    for directory in _directories(root, "memory"):
        for file in (directory / "memory.events", directory / "memory.oom_control"):
            if any(line.startswith("oom_kill ") and not line.endswith(" 0") for line in _lines(file)):
                return True
    return False


def _directories(root: Path, controller: str) -> list[Path]:
    """Return the possible directories of the controller's files: the cgroup, and the root that a container sees."""
    mounted = root / "sys/fs/cgroup"
    found = [mounted, mounted / controller]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        # In cgroup v2, all controllers have one directory.
        if not controllers or controller in controllers.split(","):
            found.append(mounted / (controller if controllers else "") / path.lstrip("/"))
    return found


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file; none if it does not exist or contains `max`."""
    try:
        return [int(word) for line in _lines(file) for word in line.split()]
    except ValueError:
        return []


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
