"""Which data movers can write to which target volume, on all nodes of the test bed, and whether there were ever two.

Reads `/proc` only: the mover of a container that no API server knows any more is seen as well. A writer is a data mover
that restores and has its volume read-write, whether it writes at the moment or not. Its time begins when the kernel
started its process, and ends when it was seen last; so an overlap is missed only if it is shorter than the pause
between two looks.
"""

import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from tests.cluster.processes import Process, is_mover

_PAUSE_SECONDS = 0.05
_LOOKS = 200
"""A process that is no data mover after so many looks will be none: a container's process starts as runc's."""

_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_PATH = "--volume-path="
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Writer:
    """A pod that could write to a volume, for some time, in seconds since the machine was started.

    Attributes:
        volume: The folder's file system and path in it, or the device's number.
        pod: The pod's UID.
        began: When its process was started.
        seen: When it was seen last.
    """

    volume: str
    pod: str
    began: float
    seen: float
    command: str


class Observer:
    """Looks for writers again and again, in a thread of its own."""

    def __init__(self, space: str) -> None:
        """Look for movers of transfers that carry the name of a test's namespace: other tests run at the same time."""
        self._space = space
        self._writers: dict[int, Writer] = {}
        self._ended: list[Writer] = []
        self._others: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def writers(self) -> list[Writer]:
        """All that were seen, in the order in which they began."""
        with self._lock:
            return sorted([*self._ended, *self._writers.values()], key=lambda each: each.began)

    @property
    def double_writers(self) -> list[str]:
        """One line for each two pods that could write to a volume at the same time."""
        pairs = combinations(self.writers, 2)
        return [
            f"{one.volume}: {one.command} and {other.command} for {min(one.seen, other.seen) - other.began:.2f} s"
            for one, other in pairs
            if one.volume == other.volume and one.pod != other.pod and other.began <= one.seen
        ]

    def look(self) -> None:
        pids = {int(folder.name) for folder in Path("/proc").glob("[0-9]*")}
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        for pid in [pid for pid in self._others if pid not in pids]:
            del self._others[pid]
        found = {}
        for pid in pids:
            if self._others.get(pid, 0) >= _LOOKS:
                continue
            writer = self._writers.get(pid)
            fresh = _read_writer(pid, now)
            if fresh is None or self._space not in fresh.command:
                self._others[pid] = self._others.get(pid, 0) + 1
            elif writer is not None and writer.began == fresh.began:
                found[pid] = replace(writer, seen=now)
            else:
                found[pid] = fresh
        with self._lock:
            self._ended += [each for pid, each in self._writers.items() if not _goes_on(each, found.get(pid))]
            self._writers = found

    def watch(self, over: threading.Event) -> None:
        while not over.wait(_PAUSE_SECONDS):
            self.look()


@contextmanager
def observed(space: str) -> Iterator[Observer]:
    """An observer of a namespace's transfers that looks as long as the context lasts."""
    observer, over = Observer(space), threading.Event()
    thread = threading.Thread(target=observer.watch, args=(over,), name="observer of writers")
    thread.start()
    try:
        yield observer
    finally:
        over.set()
        thread.join()


def _goes_on(before: Writer, after: Writer | None) -> bool:
    return after is not None and after.began == before.began


def _read_writer(pid: int, now: float) -> Writer | None:
    """The writer that a process is; None if it is none, or has ended."""
    root = Path(f"/proc/{pid}")
    try:
        argv = tuple((root / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
        if not is_mover(Process(pid, argv)) or "restore" not in argv:
            return None
        path = next((word.removeprefix(_PATH) for word in argv if word.startswith(_PATH)), "")
        state, began = _read_stat((root / "stat").read_text())
        pod = _POD.search((root / "cgroup").read_text())
        volume = _read_volume(root, path) if path else ""
    except OSError:
        return None
    if not volume or pod is None or state in "ZX":
        return None
    return Writer(volume, pod[1].replace("_", "-"), began, now, " ".join(argv[argv.index("restore") :][:3]))


def _read_stat(text: str) -> tuple[str, float]:
    """The state and the time of the start. Source: proc_pid_stat(5); the second field may hold anything."""
    words = text.rpartition(")")[2].split()
    return words[0], int(words[19]) / _TICKS_PER_SECOND


def _read_volume(root: Path, path: str) -> str:
    """What a process has at a path, if it may write there; otherwise nothing."""
    status = Path(f"{root}/root{path}").stat()
    if stat.S_ISBLK(status.st_mode):
        return f"device {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    best, found = "", ""
    for line in (root / "mountinfo").read_text().splitlines():
        # Source: proc_pid_mountinfo(5): device, root, mount point, options.
        _, _, device, mounted, point, options, *_ = line.split(" ")
        below = path == point or path.startswith(f"{point.rstrip('/')}/")
        if below and len(point) >= len(best):
            writable = "rw" in options.split(",")
            best, found = point, f"{device} {mounted}{path[len(point) :]}" if writable else ""
    return found
