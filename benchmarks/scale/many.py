"""Transfers of all kinds, carried out by one agent, few or many; and many agents without any transfer."""

import asyncio
import time
from typing import Final

from benchmarks.scale.counts import Counts, Store
from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import LEADER_NODE, LEAST_SECONDS, SETTLE_SECONDS, SLOTS, Effort, Log, Result, prepare
from benchmarks.scale.manifests import node_name
from benchmarks.scale.scene import Scene, Serving, open_scene

_WATCH_RENEWALS_SECONDS: Final = (300.0, 425.0)
"""In this time since its start every watch of an agent is renewed once."""

_AGENTS: Final = {"few": "5_agents", "many": "50_agents"}
"""How the figures of a scenario end, whatever its number of agents."""

_GROWN_SLOTS: Final = 10
_REST_SECONDS: Final = 30.0
"""After this a client has closed the connections that it no longer needs."""


async def measure_many(doors: Doors, name: str, effort: Effort, *, log: Log, idle: bool = False) -> Result:
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
        store = Store(*(now - then for now, then in zip(doors.read_store(), store, strict=True)))
        log(f"{name}: {effort.transfers} transfers in {seconds:.0f} s")
        rows = [("seconds", f"{seconds:.0f}"), *_rows(counts, store, effort.transfers)]
        figures = {
            "conflict_share": round(counts.conflict_share, 5),
            f"requests_per_cr_{_AGENTS[name]}": round(counts.total / effort.transfers, 2),
            f"watch_bytes_per_cr_{_AGENTS[name]}": round(counts.watch_bytes / effort.transfers),
        }
        if idle:
            found, cpu_percent = await measure_idle(scene, standby, began)
            requests, server = (figure / found.at_seconds for figure in (found.total, found.cpu_seconds))
            figures["idle_requests_per_s_50_agents"] = round(requests, 2)
            figures["agent_idle_cpu_percent"] = round(cpu_percent, 3)
            rows += [
                ("without transfers: requests per second", f"{requests:.2f}"),
                ("without transfers: CPU of the agents' API server", f"{server:.1%}"),
                ("without transfers: CPU of an agent that is not the leader", f"{cpu_percent:.2f} %"),
            ]
        title = f"{effort.agents} agents, {effort.transfers} transfers"
        return Result(title, rows, figures, scene.judge(), _explain(name, counts, effort.transfers))


def _rows(counts: Counts, store: Store, transfers: int) -> list[tuple[str, str]]:
    return [
        ("requests per transfer (writes)", f"{counts.total / transfers:.1f} ({counts.writes / transfers:.1f})"),
        ("writes with a conflict", f"{counts.conflict_share:.2%}"),
        ("requests rejected with 429", f"{counts.rejected}"),
        ("bytes to watches per transfer", f"{counts.watch_bytes / transfers:,.0f}"),
        ("objects written to etcd per transfer, by all components", f"{store.writes / transfers:.1f}"),
        ("growth of etcd's file per transfer", f"{store.file_bytes / transfers / 1024:.0f} KiB"),
        ("CPU of the agents' API server per transfer", f"{counts.cpu_seconds / transfers * 1000:.0f} ms"),
    ]


def _explain(name: str, counts: Counts, transfers: int) -> list[str]:
    """Return requests and conflicts by what was done to what."""
    requests, conflicts = counts.by_verb_and_resource(), counts.conflicts_by_verb_and_resource()
    return [
        f"\nrequests per transfer, {name}:",
        *(f"  {verb:7} {what:28} {number / transfers:7.3f}" for (verb, what), number in requests.most_common(30)),
        f"\nconflicts, {name}:",
        *(f"  {verb:7} {what:28} {number:7}" for (verb, what), number in conflicts.most_common()),
    ]


async def measure_idle(scene: Scene, standby: Serving, began: float) -> tuple[Counts, float]:
    """Count what agents ask while there is no transfer, in a time in which all their watches are renewed.

    `standby` is one of them that is not the leader: the second result is its processor time in percent. `began` is
    when they started, on the monotonic clock.
    """
    await scene.stage.delete_transfers()
    await scene.wait_until(lambda seen: all(sight.deleted for sight in seen.newest()), seconds=LEAST_SECONDS)
    first, last = _WATCH_RENEWALS_SECONDS
    await asyncio.sleep(max(SETTLE_SECONDS, began + first - time.monotonic()))
    before, cpu_seconds = scene.stage.doors.count(), standby.child.cpu_seconds
    await asyncio.sleep(last - first)
    counts = scene.stage.doors.count(before)
    return counts, (standby.child.cpu_seconds - cpu_seconds) / counts.at_seconds * 100


async def measure_growth(doors: Doors, name: str, effort: Effort, *, log: Log) -> Result:
    """Have one agent, which never is the leader, carry out many transfers."""
    async with open_scene(doors, name, nodes=1) as scene:
        await scene.stage.set_up(queue_length=effort.queue_length, slots=_GROWN_SLOTS)
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
