"""A long admission queue: what it costs while transfers are pending, how fast they are admitted.

Knows its steps. Does not know targets. No agent carries the transfers out: they are admitted
to nodes whose agents have Ready pods and do not run.
"""

import asyncio

import aiohttp

from benchmarks.scale.doors import Doors
from benchmarks.scale.effort import LEADER_NODE, LEAST_SECONDS, QUEUE_LENGTH, SETTLE_SECONDS, SLOTS, Log, Result
from benchmarks.scale.judge import count_disorder
from benchmarks.scale.manifests import KINDS, Volume, app_namespace, build_claim
from benchmarks.scale.scene import Scene, Serving, open_scene
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS


async def measure_waiting(doors: Doors, name: str, transfers: int, *, log: Log, nodes: int = 3) -> Result:
    """Let many transfers be pending for the quota, then raise it for all of them."""
    async with open_scene(doors, name, nodes=nodes) as scene:
        stage = scene.stage
        await stage.set_up(queue_length=QUEUE_LENGTH, slots=SLOTS)
        apps = [app_namespace(stage.namespace, number) for number in range(10)]
        for app in apps:
            await stage.add_snapshot(app, "shared")
            await stage.client.create(PERSISTENT_VOLUME_CLAIMS, build_claim(app, "shared"))
        await scene.watch()
        leader = await scene.serve(LEADER_NODE)
        await scene.wait_for_leader()
        await asyncio.sleep(SETTLE_SECONDS)
        before_mib = leader.child.memory_mib
        volumes = [Volume(KINDS[n % 2], f"transfer-{n:05}", apps[n % 10], source="shared") for n in range(transfers)]
        await stage.create_transfers(volumes)
        log(f"{name}: {transfers} transfers are created")
        waiting = transfers - min(transfers, QUEUE_LENGTH)
        await _wait_for_queue(scene, leader, waiting)
        cpu_seconds = leader.child.cpu_seconds
        await asyncio.sleep(SETTLE_SECONDS)
        cpu_percent = (leader.child.cpu_seconds - cpu_seconds) / SETTLE_SECONDS * 100
        kib = (leader.child.memory_mib - before_mib) * 1024 / max(1, waiting)
        log(f"{name}: {kib:.2f} KiB for each pending transfer")
        await scene.end(leader.child)
        scene.history.read_on()
        earlier = scene.judge().admissions
        await stage.set_limits(queue_length=max(transfers, QUEUE_LENGTH), slots=SLOTS)
        leader = await scene.serve(LEADER_NODE)
        await scene.wait_until(lambda seen: seen.admitted >= transfers, seconds=LEAST_SECONDS + transfers / 10)
        verdict = scene.judge()
        later = verdict.admissions[len(earlier) :]
        seconds = later[-1].seen_at - later[0].seen_at
        taken = {sight.uid for sight in earlier}
        left = [sight for sight in scene.history.newest() if sight.uid not in taken]
        # The first ones were admitted while others were still being created: no order applies to them.
        disorder = count_disorder(left, later, after=earlier[-1].queue)
        log(f"{name}: {len(later) / seconds:.0f} admissions a second, {disorder} out of order")
        rows = [
            ("memory per pending transfer", f"{kib:.2f} KiB"),
            ("CPU of the leader while they are pending", f"{cpu_percent:.1f} %"),
            ("admissions per second", f"{len(later) / seconds:.0f}"),
            ("CPU per admission", f"{leader.child.cpu_seconds / len(later) * 1000:.1f} ms"),
            ("admitted out of order", f"{disorder}"),
        ]
        figures = {"admissions_per_s": round(len(later) / seconds, 1)}
        return Result(f"{transfers} pending transfers", rows, figures, verdict)


async def _wait_for_queue(scene: Scene, leader: Serving, waiting: int) -> None:
    """Return once the leader reports so many pending transfers, and each of them has a message."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(LEAST_SECONDS):
        while True:
            async with session.get(f"http://127.0.0.1:{leader.port}/status") as answer:
                report = await answer.json()
            if report["queue"].get("phases", {}).get("New", 0) >= waiting:
                break
            await asyncio.sleep(1)
    limit_seconds = LEAST_SECONDS + waiting / 10
    await scene.wait_until(
        lambda seen: sum(1 for sight in seen.newest() if sight.phase == "New" and sight.message) >= waiting,
        seconds=limit_seconds,
    )
