"""Restores whose node is lost and comes back: how long both attempts take, and whether the old one still writes.

The node is cut off from the API server, while it reaches its storage and its volume; or all processes of the mover stop
and go on. Either way it is back at the worst moment: when the next attempt has begun to write. The times of the fence
are a part of the defaults, as those of checkpoints and lists are.
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from shutil import disk_usage
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.resume.bed import ResumeBed
from benchmarks.resume.movers import Attempt, is_alive
from benchmarks.resume.relay import run_relay
from benchmarks.resume.restore import back_up
from benchmarks.resume.writers import Writers, watch_writers
from core.contract import FENCE_TIMEOUT
from core.models.attempts import InterruptionCause
from nodeagent.transfers.retries import FENCE_SECONDS

__all__ = ["LostFigures", "LostNode", "measure_lost_nodes"]

_LOOK_SECONDS: Final = 0.01
_WAYS: Final = ("cut off", "hangs")
_STOPS: Final = _WAYS[1]


@dataclass(frozen=True)
class LostNode:
    """Seconds of both attempts and of the wait between them, and what the old one did beside the next one.

    `late_seconds` is for how long a process of it ran then, `late_writes` how often they changed something in the
    target, and `late_bytes` what they wrote to any disk: the target, kopia's cache, and logs.
    """

    way: str
    lost_seconds: float
    wait_seconds: float
    resumed_seconds: float
    late_seconds: float
    late_writes: int
    late_bytes: int

    @property
    def seconds(self) -> float:
        """How long the restore took, with the wait."""
        return self.lost_seconds + self.wait_seconds + self.resumed_seconds


@dataclass(frozen=True)
class LostFigures:
    """The seconds of an uninterrupted restore, and restores whose node was lost."""

    seconds: float
    nodes: tuple[LostNode, ...]

    @property
    def time_ratio(self) -> float:
        """The longest of them, with the wait, compared with the uninterrupted restore."""
        return max(node.seconds for node in self.nodes) / self.seconds

    @property
    def double_writers(self) -> int:
        """How many old attempts changed something in the target after the next one had begun."""
        return sum(1 for node in self.nodes if node.late_writes)


async def measure_lost_nodes(bed: ResumeBed) -> LostFigures:
    """Restore without an interruption, and once for each way to lose a node."""
    plan = bed.plan
    fence = f"{FENCE_TIMEOUT // plan.fence_part / timedelta(seconds=1):.0f}s"
    bed = replace(bed, mover=replace(bed.mover, settings={**plan.settings, "DATA_MOVER_FENCE_TIMEOUT": fence}))
    with bed.tree(plan.kill_tree) as tree:
        snapshot_id = await back_up(bed, tree)
        async with run_relay(bed.s3.url, plan.lost_bytes_per_second) as url:
            bed.mover.cluster.put_location(replace(bed.s3, url=url))
            bed.stages.say("restore without a lost node")
            with bed.disks.volume() as target, bed.stages.stage("restores"):
                bed.mover.begin("DataDownload", snapshotID=snapshot_id)
                seconds, _ = await bed.mover.run(target)
            nodes = []
            for way in _WAYS:
                bed.stages.say(f"restore whose node {'is ' if way != _STOPS else ''}{way} at half of the data")
                with bed.disks.volume() as target:
                    with bed.stages.stage("restores of lost nodes"):
                        bed.mover.begin("DataDownload", snapshotID=snapshot_id)
                        nodes.append(await _lose(bed, way, target))
                    if not bed.is_same(tree, target):
                        raise BenchmarkError(f"the restore whose node {way} has other content")
    return LostFigures(seconds, tuple(nodes))


async def _lose(bed: ResumeBed, way: str, target: Path) -> LostNode:
    reached = asyncio.Event()
    reached.set()
    wait_seconds = FENCE_SECONDS / bed.plan.fence_part
    server = f"https://127.0.0.1:{bed.mover.cluster.environment['KUBERNETES_SERVICE_PORT']}"
    async with run_relay(server, passes=reached) as url:
        half_at = disk_usage(target).used + bed.plan.kill_tree.total_bytes // 2
        line = {"KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
        async with bed.mover.run_until(target, lambda: disk_usage(target).used >= half_at, **line) as first:
            node = _Node(first, first.processes, reached, stops=way == _STOPS)
            node.lose()
            bed.mover.announce_next(first, InterruptionCause.NODE_LOST)
            await asyncio.sleep(wait_seconds)
            with watch_writers(target) as writers:
                async with asyncio.TaskGroup() as both:
                    resumed = both.create_task(bed.mover.run(target), name="next attempt")
                    late_seconds, late_writes, late_bytes = await node.observe(writers, resumed)
    if first.process.returncode == 0:
        raise BenchmarkError("the restore ended before its node was back: it is too short to show anything")
    seconds, _ = resumed.result()
    return LostNode(way, first.seconds, wait_seconds, seconds, late_seconds, late_writes, late_bytes)


@dataclass
class _Node:
    """The node of the old attempt: its processes, and whether the API server is reached."""

    first: Attempt
    processes: set[int]
    reached: asyncio.Event
    stops: bool

    def lose(self) -> None:
        if self.stops:
            self._signal(signal.SIGSTOP)
        self.reached.clear()

    def come_back(self) -> None:
        self.reached.set()
        if self.stops:
            self._signal(signal.SIGCONT)

    async def observe(self, writers: Writers, resumed: asyncio.Task[tuple[float, str]]) -> tuple[float, int, int]:
        """Let the node be back once the next attempt writes; return for how long, how often and how much it wrote.

        Raises:
            BenchmarkError: no process was seen to write.
        """
        self.processes |= self.first.processes
        before = most = self._written_bytes()
        began = None if self.stops else time.monotonic()
        back, late_seconds, writes = False, 0.0, 0
        while not resumed.done():
            changes = writers.take()
            writes += sum(changes[pid] for pid in self.processes)
            if not back and changes.keys() - self.processes:
                back, began = True, began or time.monotonic()
                self.come_back()
            if began is not None and any(map(is_alive, self.processes)):
                late_seconds = time.monotonic() - began
            most = max(most, self._written_bytes())
            await asyncio.sleep(_LOOK_SECONDS)
        if not back:
            raise BenchmarkError("the next attempt was not seen to write, so the old one would not have been either")
        return late_seconds, writes, most - before

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _written_bytes(self) -> int:
        """Return what they have written to disks; those of a child that has ended are its parent's.

        Source: proc_pid_io(5); Linux, kernel/exit.c, `wait_task_zombie`.
        """
        total = 0
        # Parents first: nothing is counted twice when one of their children ends meanwhile.
        for pid in sorted(self.processes):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
        return total
