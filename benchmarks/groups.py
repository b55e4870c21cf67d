"""A control group with a memory limit.

Knows cgroup v1 and v2. Does not know what runs in it.
Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["memory_group"]

_MIB: Final = 1 << 20


@contextmanager
def memory_group(limit_mib: int) -> Iterator[Path | None]:
    """Make a group whose processes get no more than that, without swap; None without the permission to make one.

    It is removed at the end, when all processes in it have ended.
    """
    group = _make_group(limit_mib * _MIB)
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


def _make_group(limit_bytes: int) -> Path | None:
    for top, settings in _hierarchies(limit_bytes):
        # Process ids repeat: each run has a PID namespace of its own.
        group = top / f"node-agent-benchmark-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        limit, swap = settings
        try:
            (group / limit).write_text(str(settings[limit]))
        except OSError:
            group.rmdir()
            continue
        # Absent where the kernel does not account swap.
        with suppress(OSError):
            (group / swap).write_text(str(settings[swap]))
        return group
    return None


def _hierarchies(limit_bytes: int) -> Iterator[tuple[Path, dict[str, int]]]:
    """Yield where groups of memory are made, with the files to write: the limit first, then swap's."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mountpoint, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "memory" in options.split(","):
            yield (
                Path(mountpoint),
                {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes},
            )
        elif kind == "cgroup2":
            yield Path(mountpoint), {"memory.max": limit_bytes, "memory.swap.max": 0}
