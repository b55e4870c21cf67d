"""Transfers of all kinds, carried out by few or many agents; and many agents without any transfer.

Knows its steps, and what requests and bytes come to for each transfer. Does not know targets.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.counts import Counts, Store
from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import LEAST_SECONDS, SETTLE_SECONDS, SLOTS, Effort, Log, prepare
from benchmarks.scale.judge import Verdict
from benchmarks.scale.manifests import node_name
from benchmarks.scale.scene import Scene, Serving, open_scene

_WATCH_RENEWALS_SECONDS: Final = (300.0, 425.0)
"""In this time since its start every watch of an agent is renewed once."""


@dataclass(frozen=True)
class Idle:
    """Agents that have nothing to do."""

    agents: int
    counts: Counts
    cpu_percent: float

    @property
    def requests_per_s(self) -> float:
        """Requests of all agents together."""
        return self.counts.total / self.counts.at_seconds


@dataclass(frozen=True)
class Many:
    """Transfers of all kinds, carried out by agents; `store` is what all components wrote for them."""

    agents: int
    transfers: int
    seconds: float
    counts: Counts
    store: Store
    verdict: Verdict
    idle: Idle | None = None

    @property
    def requests_per_transfer(self) -> float:
        """API requests of the agents for each transfer."""
        return self.counts.total / self.transfers

    @property
    def writes_per_transfer(self) -> float:
        """Writes of the agents for each transfer."""
        return self.counts.writes / self.transfers

    @property
    def watch_bytes_per_transfer(self) -> float:
        """Bytes delivered to watches for each transfer."""
        return self.counts.watch_bytes / self.transfers


async def measure_many(doors: Doors, name: str, effort: Effort, *, log: Log, idle: bool = False) -> Many:
    """Have transfers of all kinds carried out; then, if `idle`, see what agents without any transfer ask."""
    async with open_scene(doors, name, nodes=effort.agents) as scene:
        await scene.stage.set_up(queue_length=effort.queue_length, slots=SLOTS)
        volumes = await prepare(scene, effort)
        began = time.monotonic()
        await scene.host_agents([node_name(n) for n in range(1, effort.agents)], processes=effort.processes)
        await scene.wait_for_leader()
        standby = await scene.serve(node_name(0))
        await scene.wait_ready(standby)
        log(f"{name}: {effort.agents} agents are ready")
        before, store, created_at = doors.count(), doors.read_store(), time.monotonic()
        await scene.stage.create_transfers(volumes)
        await scene.wait_until(lambda seen: seen.done >= effort.transfers, seconds=effort.limit_seconds)
        counts, seconds = doors.count(before), time.monotonic() - created_at
        store = doors.read_store().since(store)
        requests = counts.total / effort.transfers
        log(f"{name}: {effort.transfers} transfers in {seconds:.0f} s, {requests:.1f} requests each")
        found = await measure_idle(scene, effort, standby, began) if idle else None
        return Many(effort.agents, effort.transfers, seconds, counts, store, scene.judge(), found)


async def measure_idle(scene: Scene, effort: Effort, standby: Serving, began: float) -> Idle:
    """Count what agents ask while there is no transfer, in a time in which all their watches are renewed.

    `standby` is one of them that is not the leader; `began` is when they started, on the monotonic clock.
    """
    await scene.stage.delete_transfers()
    await scene.wait_until(lambda seen: all(sight.deleted for sight in seen.newest()), seconds=LEAST_SECONDS)
    first, last = _WATCH_RENEWALS_SECONDS
    await asyncio.sleep(max(SETTLE_SECONDS, began + first - time.monotonic()))
    before, cpu_seconds = scene.stage.doors.count(), standby.child.cpu_seconds
    await asyncio.sleep(last - first)
    counts = scene.stage.doors.count(before)
    return Idle(effort.agents, counts, (standby.child.cpu_seconds - cpu_seconds) / counts.at_seconds * 100)
