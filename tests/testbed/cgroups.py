"""A group for the pods of each kubelet, in every cgroup hierarchy of the machine.

Two kubelets that share a group end each other's pods as orphans, so each gets its own.
Works on cgroup v1 and v2.
"""

from contextlib import suppress
from pathlib import Path

SLOW_DAY = "slow-day"
"""What the name of a group with a quota begins with: test beds that are started in it have their groups below it."""

_OWN = "own"
"""Below such a group, the group of what is started in it: on v2, one with groups below it has no processes."""

_PERIOD_US = 100_000

_CPUSET_FILES = ("cpuset.cpus", "cpuset.mems")

_PROCESSES_WORTH = 16
_SHARES = {"cpu.shares": 1024 * _PROCESSES_WORTH, "cpu.weight": 100 * _PROCESSES_WORTH}
"""On a busy machine a whole group gets no more time than one process outside of any: that is for all pods together."""


def bed_name(pid: int) -> str:
    """Return the group of a test bed: below the slow day that this process is in, if it is in one."""
    own = {line.rpartition(":")[2].lstrip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()}
    slow = next((name.partition("/")[0] for name in own if name.startswith(SLOW_DAY)), None)
    return "/".join(filter(None, (slow, f"node-agent-bed-{pid}")))


def limit_group(name: str, processors: float) -> None:
    """Create a group of that name, whose processes and groups use no more processors than that together."""
    make_groups(name, 0)
    quota_us = int(processors * _PERIOD_US)
    for top in _tops(name):
        if (top / "cpu.max").exists():
            (top / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        elif (top / "cpu.cfs_quota_us").exists():
            (top / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (top / "cpu.cfs_quota_us").write_text(str(quota_us))
    make_groups(f"{name}/{_OWN}", 0)


def attach(name: str) -> None:
    """Move this process into a group of `limit_group`."""
    for top in _tops(f"{name}/{_OWN}"):
        (top / "cgroup.procs").write_text("0")


def read_used_seconds(name: str) -> float:
    """Return the processor time that a group has used, with all groups below it."""
    for top in _tops(name):
        if (top / "cpuacct.usage").exists():
            return int((top / "cpuacct.usage").read_text()) / 1e9
        for line in _read(top / "cpu.stat").splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
    return 0.0


def group_name(bed: str, node: int) -> str:
    """The group of one node's pods, relative to the root of every hierarchy."""
    return f"{bed}/node-{node}"


def make_groups(bed: str, nodes: int) -> None:
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
