"""As many nodes as a large cluster has, a loaded queue, and a leader that is killed in the middle.

Knows its steps. Does not know what the formulas predict (`benchmarks.scale.validation`).
"""

import time
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.counts import Counts, Store
from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import LEADER_NODE, SLOTS, Effort, Log, prepare
from benchmarks.scale.judge import Verdict
from benchmarks.scale.leaders import wait_for_another
from benchmarks.scale.load import Load, read_load, read_server_mib
from benchmarks.scale.manifests import node_name
from benchmarks.scale.many import Idle, measure_idle
from benchmarks.scale.occupancy import Occupancy, measure_occupancy
from benchmarks.scale.scene import Scene, Serving, open_scene
from benchmarks.scale.waiting import Waiting, measure_waiting
from core.kube.resources import CONFIG_MAPS
from core.models.names import ADMISSIONS_CONFIGMAP

__all__ = ["Large", "Ledger", "Takeover", "measure_large"]

_LEASES: Final = "leases"


@dataclass(frozen=True)
class Takeover:
    """The leader's death: seconds until another agent held the Lease, and until that one admitted a transfer.

    `conflicts` are the candidates that came too late.
    """

    held_after: float
    admitted_after: float
    conflicts: int


@dataclass(frozen=True)
class Ledger:
    """The admission ledger in the middle: reservations and bytes."""

    entries: int
    size_bytes: int


@dataclass(frozen=True)
class Large:
    """Transfers of all kinds, carried out by as many agents as a large cluster has.

    `takeover` is None where the first leader had lost its Lease before it could be killed.
    """

    agents: int
    transfers: int
    seconds: float
    occupancy: Occupancy
    counts: Counts
    store: Store
    load: Load
    watches: int
    watches_mib: float
    server_mib: float
    ledger: Ledger
    takeover: Takeover | None
    idle: Idle
    waiting: Waiting
    verdict: Verdict


async def measure_large(doors: Doors, name: str, effort: Effort, *, log: Log) -> Large:
    """Admit a long queue alone; then have transfers carried out, kill the leader at half, and see idle agents."""
    waiting = await measure_waiting(doors, f"pending-{name}", effort.transfers, nodes=effort.agents, log=log)
    async with open_scene(doors, name, nodes=effort.agents) as scene:
        await scene.stage.set_up(queue_length=effort.queue_length, slots=SLOTS)
        volumes = await prepare(scene, effort)
        log(f"{name}: {len(volumes)} volumes are there")
        bare_mib, bare_watches = read_server_mib(doors), doors.count_watches()
        leader = await scene.serve(LEADER_NODE)
        await scene.wait_for_leader()
        began = time.monotonic()
        await scene.host_agents([node_name(n) for n in range(1, effort.agents)], processes=effort.processes)
        standby = await scene.serve(node_name(0))
        await scene.wait_ready(standby)
        watches, watches_mib = doors.count_watches() - bare_watches, read_server_mib(doors) - bare_mib
        log(f"{name}: {effort.agents} agents are ready after {time.monotonic() - began:.0f} s, {watches} watches")
        before, store, load, created_at = doors.count(), doors.read_store(), read_load(scene), time.time()
        await scene.stage.create_transfers(volumes)
        log(f"{name}: {effort.transfers} transfers are created after {time.time() - created_at:.0f} s")
        await scene.wait_until(lambda seen: seen.admitted * 2 >= effort.transfers, seconds=effort.limit_seconds)
        ledger = await _read_ledger(scene)
        log(f"{name}: {scene.history.done} transfers done after {time.time() - created_at:.0f} s")
        takeover = await _kill_leader(scene, leader)
        log(f"{name}: {_describe(takeover)}")
        await scene.wait_until(lambda seen: seen.done >= effort.transfers, seconds=effort.limit_seconds)
        counts, store, ended_at = doors.count(before), doors.read_store().since(store), time.time()
        load, server_mib = read_load(scene).since(load), read_server_mib(doors)
        occupancy = measure_occupancy(scene.history.sights, created_at, ended_at)
        log(f"{name}: {effort.transfers} transfers in {occupancy.seconds:.0f} s")
        verdict = scene.judge()
        idle = await measure_idle(scene, effort, standby, began)
        return Large(
            effort.agents,
            effort.transfers,
            occupancy.seconds,
            occupancy,
            counts,
            store,
            load,
            watches,
            watches_mib,
            server_mib,
            ledger,
            takeover,
            idle,
            waiting,
            verdict,
        )


def _describe(takeover: Takeover | None) -> str:
    if takeover is None:
        return "the leader had lost its Lease before it could be killed"
    return f"another leader after {takeover.held_after:.1f} s, which admits after {takeover.admitted_after:.1f} s"


async def _read_ledger(scene: Scene) -> Ledger:
    """Return the size of the ledger as it is now."""
    stored = await scene.stage.client.read(CONFIG_MAPS, scene.stage.namespace, ADMISSIONS_CONFIGMAP) or {}
    uids = (stored.get("data") or {}).get("uids", "")
    return Ledger(len(uids.split()), len(uids))


async def _kill_leader(scene: Scene, leader: Serving) -> Takeover | None:
    """Kill the leader for good; return once another one admits transfers, or None where `leader` is none any more."""
    doors = scene.stage.doors
    holder, before = await scene.wait_for_leader(), doors.count()
    if holder.rpartition("_")[0] != leader.node:
        # Its renewals came too late on a busy machine. To kill the other one is to kill all agents of its process.
        return None
    killed_at = time.monotonic()
    await scene.kill(leader.child)
    await wait_for_another(scene, holder)
    held_after = time.monotonic() - killed_at
    scene.history.read_on()
    admitted = scene.history.admitted
    await scene.wait_until(lambda seen: seen.admitted > admitted, seconds=60.0)
    admitted_after = time.monotonic() - killed_at
    conflicts = doors.count(before).conflicts_by_verb_and_resource()
    return Takeover(held_after, admitted_after, sum(n for (_, what), n in conflicts.items() if what == _LEASES))
