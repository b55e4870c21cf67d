"""Leaders that are killed, or paused for longer than their lease lasts, while transfers run; each is a process."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import SLOTS, Effort, Log, Result, prepare
from benchmarks.scale.history import History
from benchmarks.scale.manifests import node_name
from benchmarks.scale.scene import Scene, Serving, open_scene

_LEASE_SECONDS: Final = 3.0
_GRACE_SECONDS: Final = 2.0
"""After the lease time: stand-bys try at different moments, and this machine is busy."""

Disturb = Callable[[Scene, dict[str, Serving]], Awaitable[float]]
"""What is done to the leader; returns after how many seconds another agent became leader."""


async def measure_leaders(doors: Doors, name: str, effort: Effort, *, disturbs: Sequence[Disturb], log: Log) -> Result:
    """Do one thing after the other to the leader, while transfers run.

    Its figure counts how often another agent became leader in time: never where not all transfers completed.
    """
    async with open_scene(doors, name, nodes=effort.agents, lease_seconds=_LEASE_SECONDS) as scene:
        await scene.stage.set_up(queue_length=effort.queue_length, slots=SLOTS)
        volumes = await prepare(scene, effort)
        servings = [await scene.serve(node_name(number)) for number in range(effort.agents)]
        for serving in servings:
            await scene.wait_ready(serving)
        agents = {serving.node: serving for serving in servings}
        await scene.wait_for_leader()
        began = time.monotonic()
        await scene.stage.create_transfers(volumes)
        took: list[float] = []
        for number, disturb in enumerate(disturbs, start=1):
            share = effort.transfers * number // (len(disturbs) + 1)
            # A new leader has admitted some before it is disturbed.
            await scene.wait_until(partial(_admitted, share), seconds=effort.limit_seconds)
            took.append(await disturb(scene, agents))
            log(f"{name}: {number} of {len(disturbs)}, another agent became leader after {took[-1]:.1f} s")
        await scene.wait_until(lambda seen: seen.done >= effort.transfers, seconds=effort.limit_seconds)
        verdict = scene.judge()
        good = sum(1 for seconds in took if seconds <= scene.lease_seconds + _GRACE_SECONDS)
        good *= verdict.final_phases == {"Completed": effort.transfers}
        rows = [
            ("another agent became leader in time", f"{good} times"),
            ("longest time without a leader", f"{max(took):.1f} s"),
            ("seconds", f"{time.monotonic() - began:.0f}"),
        ]
        return Result(f"leader, {len(disturbs)} {name}", rows, {f"leader_{name}_ok": good}, verdict)


def _admitted(share: int, seen: History) -> bool:
    return seen.admitted >= share


async def kill_leader(scene: Scene, agents: dict[str, Serving]) -> float:
    """Kill the leader and start it again; return after how many seconds another agent became leader."""
    holder = await scene.wait_for_leader()
    node = holder.rpartition("_")[0]
    killed_at = time.monotonic()
    await scene.kill(agents[node].child)
    agents[node] = await scene.serve(node)
    await wait_for_another(scene, holder)
    return time.monotonic() - killed_at


async def pause_leader(scene: Scene, agents: dict[str, Serving]) -> float:
    """Pause the leader for twice the lease time; return after how many seconds another agent became leader."""
    holder = await scene.wait_for_leader()
    leader = agents[holder.rpartition("_")[0]].child
    paused_at = time.monotonic()
    leader.pause()
    try:
        await wait_for_another(scene, holder)
        took = time.monotonic() - paused_at
        await asyncio.sleep(max(0.0, 2 * scene.lease_seconds - took))
    finally:
        leader.go_on()
    return took


async def wait_for_another(scene: Scene, holder: str) -> None:
    """Return once there is a leader that is not `holder`. Raises BenchmarkError if there is none for two minutes."""
    try:
        await scene.wait_for_leader(other_than=holder)
    except TimeoutError as e:
        raise BenchmarkError(f"no agent became leader after {holder}") from e
