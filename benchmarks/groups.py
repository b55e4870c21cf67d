"""Control groups, v1 and v2: a limit for the memory of what runs in one, and what it uses as the kubelet counts it.

Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst; cAdvisor v0.52,
container/libcontainer/handler.go (setMemoryStats): the working set, which the kubelet compares with limits, is what is
used without file pages that were not used again.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MIB: Final = 1 << 20


@dataclass(frozen=True)
class _Files:
    """The names of a version's files, and the key of inactive file pages in `memory.stat`."""

    limit: str
    swap: str
    usage: str
    inactive: str


_V1: Final = _Files(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2: Final = _Files("memory.max", "memory.swap.max", "memory.current", "inactive_file")


@dataclass(frozen=True)
class MemoryGroup:
    """A group: its folder, whose file `cgroup.procs` takes processes in."""

    folder: Path
    files: _Files

    @property
    def pids(self) -> list[int]:
        """The processes in it that have not ended."""
        return list(map(int, (self.folder / "cgroup.procs").read_text().split()))

    @property
    def working_set_bytes(self) -> int:
        """What all processes in it use, and the kernel for them."""
        used = int((self.folder / self.files.usage).read_text())
        words = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return max(0, used - int(words[self.files.inactive]))


@contextmanager
def memory_group(limit_mib: int | None = None) -> Iterator[MemoryGroup]:
    """Make a group whose processes get no more than that, without swap.

    It is removed at the end, when all processes in it have ended.

    Raises:
        OSError: there is no hierarchy for memory, or no permission to make a group.
    """
    group = _make_group(limit_mib)
    try:
        yield group
    except BaseException:
        # What was killed may not have ended yet; its error counts.
        with suppress(OSError):
            group.folder.rmdir()
        raise
    group.folder.rmdir()


def _make_group(limit_mib: int | None) -> MemoryGroup:
    for top, files in _hierarchies():
        # Process ids repeat: each run has a PID namespace of its own.
        group = MemoryGroup(top / f"node-agent-benchmark-{uuid.uuid4().hex}", files)
        try:
            group.folder.mkdir()
        except OSError:
            continue
        try:
            if limit_mib is not None:
                _limit(group, limit_mib * _MIB)
            _ = group.working_set_bytes
        except OSError:
            group.folder.rmdir()
            continue
        return group
    raise PermissionError("no control group for memory can be made")


def _limit(group: MemoryGroup, limit_bytes: int) -> None:
    (group.folder / group.files.limit).write_text(str(limit_bytes))
    # Absent where the kernel does not account swap.
    with suppress(OSError):
        (group.folder / group.files.swap).write_text(str(limit_bytes if group.files is _V1 else 0))


def _hierarchies() -> Iterator[tuple[Path, _Files]]:
    """Yield where groups of memory are made."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mountpoint, kind, options, *_ = line.split(" ")
        if kind == "cgroup" and "memory" in options.split(","):
            yield Path(mountpoint), _V1
        elif kind == "cgroup2":
            yield Path(mountpoint), _V2
