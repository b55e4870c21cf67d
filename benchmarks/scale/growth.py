"""One agent for long: its memory before its first transfer and after its last.

Knows its steps. Does not know targets.
"""

import asyncio
from typing import Final

from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import LEADER_NODE, SETTLE_SECONDS, Effort, Log, prepare
from benchmarks.scale.manifests import node_name
from benchmarks.scale.report import Result
from benchmarks.scale.scene import open_scene

_SLOTS: Final = 10
_REST_SECONDS: Final = 30.0
"""After this a client has closed the connections that it no longer needs."""


async def measure_growth(doors: Doors, name: str, effort: Effort, *, log: Log) -> Result:
    """Have one agent, which never is the leader, carry out many transfers."""
    async with open_scene(doors, name, nodes=1) as scene:
        await scene.stage.set_up(queue_length=effort.queue_length, slots=_SLOTS)
        volumes = await prepare(scene, effort)
        await scene.serve(LEADER_NODE)
        await scene.wait_for_leader()
        worker = await scene.serve(node_name(0))
        await scene.wait_ready(worker)
        await asyncio.sleep(SETTLE_SECONDS)
        idle_mib, cpu_seconds = worker.child.memory_mib, worker.child.cpu_seconds
        await scene.stage.create_transfers(volumes)
        await scene.wait_until(lambda seen: seen.done >= effort.transfers, seconds=effort.limit_seconds)
        cpu_seconds = worker.child.cpu_seconds - cpu_seconds
        peak_mib = worker.child.memory_mib
        await asyncio.sleep(_REST_SECONDS)
        after_mib = worker.child.memory_mib
        log(f"{name}: {idle_mib:.1f} MiB before, {after_mib:.1f} MiB after {effort.transfers} transfers")
        rows = [
            ("memory before the first transfer", f"{idle_mib:.1f} MiB"),
            ("memory after the last transfer", f"{after_mib:.1f} MiB"),
            ("peak memory", f"{max(peak_mib, after_mib):.1f} MiB"),
            ("CPU per transfer", f"{cpu_seconds / effort.transfers * 1000:.0f} ms"),
        ]
        figures = {"agent_idle_mib": round(idle_mib, 1), "agent_growth_mib": round(after_mib - idle_mib, 1)}
        return Result(f"one agent, {effort.transfers} transfers", rows, figures, scene.judge())
