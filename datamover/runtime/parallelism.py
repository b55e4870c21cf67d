"""How many files a restore writes in parallel, by how long a request takes: as many as keep the CPUs busy.

Pure: the storage, the memory limit and the CPUs are given. Where requests are fast, it is the number by CPUs and memory
alone (`datamover.runtime.resources`).
"""

import math
from typing import Final

from datamover.runtime.resources import ResourceLimits

__all__ = ["restore_workers"]

_MIB: Final = 1024 * 1024

_FAST_SECONDS: Final = 0.005
"""A request to a storage in the same data center takes 1 to 4 ms, also on a busy node. More workers gain nothing."""

_FILE_SECONDS: Final = 0.0008
_BYTE_SECONDS: Final = 4.6e-9
"""Of a CPU: 20,000 files of 10 kB take kopia 15 s, and 1 GB in large files 4.4 s."""

_REQUEST_BYTES: Final = 4 * _MIB
"""kopia reads a large file in pieces of this size, on average, one after the other."""

_MOST_RESTORE_WORKERS: Final = 64
"""With 20 ms to the storage, 128 take as long, and 48 half as long again; 256 take longer."""

_MORE_PER_FITTING: Final = 2
"""More workers do not raise the soft limit, so kopia collects earlier what they no longer use: with large files each
needs 10 to 12 MiB then, not 25."""


def restore_workers(limits: ResourceLimits, request_seconds: float, file_bytes: int) -> int:
    """Return how many files of `file_bytes` on average a restore writes in parallel."""
    usual = limits.restore_workers
    if request_seconds < _FAST_SECONDS:
        return usual
    cpu_seconds = _FILE_SECONDS + min(file_bytes, _REQUEST_BYTES) * _BYTE_SECONDS
    wanted = min(math.ceil(limits.cpus * (1 + request_seconds / cpu_seconds)), _MOST_RESTORE_WORKERS)
    room = _MORE_PER_FITTING * (limits.fitting_restore_workers - usual)
    return usual + max(0, min(wanted - usual, room))
