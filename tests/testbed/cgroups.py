"""A group for the pods of each kubelet, in every cgroup hierarchy of the machine.

Two kubelets that share a group end each other's pods as orphans, so each gets its own.
Works on cgroup v1 and v2.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["group_name", "make_groups", "processes_in", "remove_below", "remove_groups"]

_CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")

_PROCESSES_WORTH = 16
_SHARES = {"cpu.shares": 1024 * _PROCESSES_WORTH, "cpu.weight": 100 * _PROCESSES_WORTH}
"""On a busy machine a whole group gets no more time than one process outside of any: that is for all pods together."""


def group_name(bed: str, node: int) -> str:
    """The group of one node's pods, relative to the root of every hierarchy."""
    return f"{bed}/node-{node}"


def make_groups(bed: str, nodes: int) -> None:
    """Create the groups of a test bed's nodes."""
    for hierarchy in _hierarchies():
        for path in (hierarchy / bed, *(hierarchy / group_name(bed, n + 1) for n in range(nodes))):
            path.mkdir(exist_ok=True)
            # On v1 a new group has no processors at all until they are set, and accepts no process before.
            for file in _CPUSET_FILES:
                if (path / file).exists() and (path.parent / file).exists():
                    (path / file).write_text((path.parent / file).read_text())
            for file, value in _SHARES.items():
                if (path / file).exists():
                    (path / file).write_text(str(value))
            _delegate(path)


def processes_in(bed: str) -> set[int]:
    """Processes that are still in one of the test bed's groups."""
    files = (file for top in _tops(bed) for file in top.rglob("cgroup.procs"))
    return {int(pid) for file in files for pid in _read(file).split()}


def remove_groups(bed: str) -> bool:
    """Remove the test bed's groups, the deepest first; False while one is still in use."""
    remove_below(bed)
    for top in _tops(bed):
        with suppress(OSError):
            top.rmdir()
    return not _tops(bed)


def remove_below(group: str) -> None:
    """Remove the groups below one that have no process, the deepest first."""
    for top in _tops(group):
        for path in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
            with suppress(OSError):
                path.rmdir()


def _tops(bed: str) -> list[Path]:
    return [path for path in (h / bed for h in _hierarchies()) if path.is_dir()]


def _hierarchies() -> list[Path]:
    """Mount points of all hierarchies: one on v2, one a controller on v1."""
    found: list[Path] = []
    unified: list[Path] = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mountpoint, kind, *_ = line.split(" ")
        if kind == "cgroup":
            found.append(Path(mountpoint))
        elif kind == "cgroup2":
            unified.append(Path(mountpoint))
    # On a mixed machine the v2 hierarchy has no controllers, but runc may still use it.
    return found + unified


def _delegate(path: Path) -> None:
    """On v2, let groups below `path` have every controller that `path` has."""
    control = path / "cgroup.subtree_control"
    if control.exists():
        wanted = " ".join(f"+{name}" for name in _read(path / "cgroup.controllers").split())
        with suppress(OSError):
            control.write_text(wanted)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the group was removed meanwhile
