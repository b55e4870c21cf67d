"""An agent whose wall clock is a day ahead or behind ends no transfer sooner, later, or with another message."""

import asyncio
import itertools
from datetime import timedelta

import pytest

from core.kube.resources import PODS, VOLUME_SNAPSHOTS
from tests.nodeagent.support.dispatching import agent_pod, cluster_node, open_scene
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.repository_scene import open_scene as open_repositories
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS, data_download, data_upload
from tests.support.clock import LoopClock

DAY = timedelta(hours=24)
FOREIGN = "example.com/keep"

pytestmark = [pytest.mark.looptime, pytest.mark.parametrize("skew", [DAY, -DAY], ids=["a day ahead", "a day behind"])]


def message(world: World, kind: str = "DataUpload") -> str:
    return str(world.transfer(kind)["status"].get("message", ""))


async def keep_source_snapshot(world: World) -> None:
    """Have the source snapshot of the only DataUpload stay when it is deleted."""
    snapshot = next(s for s in world.kube.objects(VOLUME_SNAPSHOTS) if s["metadata"]["namespace"] != "velero")
    snapshot["metadata"]["finalizers"] = [FOREIGN]
    world.kube.put(snapshot)


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_kind_of_transfer_completes(kind: str, skew: timedelta) -> None:
    async with open_world(accepted(TRANSFERS[kind]())) as world, world.agent(skew=skew):
        await world.until(lambda: world.done(kind))
    assert (world.phase(kind), message(world, kind)) == ("Completed", "")


async def test_an_operation_has_its_whole_timeout(skew: timedelta) -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(skew=skew):
        await keep_source_snapshot(world)
        world.cluster.tick_seconds = 5.0
        await asyncio.sleep(595)
        assert world.phase() == "Accepted"
        await world.until(lambda: world.phase() == "Failed", seconds=30, every=1)
    assert message(world).startswith("timed out after 10m0s: VolumeSnapshot ")


@pytest.mark.cause("not-prepared-in-time")
async def test_a_mover_pod_has_the_whole_prepare_timeout(skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(starts=False)) as world, world.agent(skew=skew):
        world.cluster.tick_seconds = 30.0
        await asyncio.sleep(1790)
        assert world.phase() == "Accepted"
        await world.until(lambda: world.phase() == "Failed", seconds=30, every=2)
    assert message(world).startswith("not prepared within 30m0s: ")


async def test_a_lost_mover_pod_is_recreated_after_its_pause(skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(rejected="OutOfcpu", rejections=3)) as world:
        seen: dict[str, float] = {}

        def observe() -> bool:
            for pod in world.kube.objects(PODS):
                seen.setdefault(pod["metadata"]["uid"], asyncio.get_running_loop().time())
            return world.done()

        async with world.agent(skew=skew):
            await world.until(observe)
    created = list(seen.values())
    pauses = [later - earlier for earlier, later in itertools.pairwise(created)]
    assert [5 <= pauses[0] < 8, 10 <= pauses[1] < 14, 20 <= pauses[2] < 25] == [True] * 3
    assert world.phase() == "Completed"


async def test_a_handover_has_its_whole_timeout(skew: timedelta) -> None:
    kind = "DataDownload"
    async with open_world(accepted(data_download())) as world, world.agent(skew=skew):
        await world.until(lambda: world.phase(kind) == "InProgress")
        world.cluster.binds = False
        await world.until(lambda: "is being bound" in message(world, kind))
        world.cluster.tick_seconds = 5.0
        await asyncio.sleep(590)
        assert world.phase(kind) == "InProgress"
        await world.until(lambda: world.phase(kind) == "Failed", seconds=30, every=1)
    assert message(world, kind).startswith("not completed within 10m0s after the data was moved: ")


@pytest.mark.parametrize("by", ["cancel", "deletion"])
async def test_a_canceled_mover_has_its_whole_timeout(by: str, skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(stubborn=True)) as world, world.agent(skew=skew):
        await world.until(lambda: world.phase() == "InProgress")
        await world.stop(world.transfer(), by)
        world.cluster.tick_seconds = 60.0
        await asyncio.sleep(3590)
        assert world.phase() == "Canceling"
        await world.until(world.done, seconds=200, every=5)
    if by == "cancel":
        assert "did not stop within 1h0m0s" in message(world)


async def test_a_cleanup_is_not_reported_as_blocked_at_once(skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(starts=False)) as world, world.agent(skew=skew):
        await keep_source_snapshot(world)
        await world.until(lambda: "is being deleted" in message(world))
        await world.stop(world.transfer(), "cancel")
        await world.until(lambda: world.phase() == "Canceled")
        world.cluster.tick_seconds = 5.0
        await asyncio.sleep(590)
        assert "CleanupBlocked" not in world.reasons()
        await world.until(lambda: "CleanupBlocked" in world.reasons(), seconds=30, every=1)


@pytest.mark.parametrize("node", [True, False], ids=["node not ready", "agent unavailable"])
async def test_the_leader_gives_an_absent_agent_the_whole_timeout(node: bool, skew: timedelta) -> None:
    scene = open_scene("node-b")
    scene.skew = skew
    object.__setattr__(scene.kind, "bound_to_node", True)
    stamp = LoopClock().now().isoformat(timespec="seconds")
    scene.kube.put(cluster_node("node-a", ready=not node, since=stamp))
    scene.kube.put(cluster_node("node-b"))
    scene.kube.put(agent_pod("node-a", ready=False))
    scene.add("du", status={"phase": "Accepted", "acceptedTimestamp": stamp}, labels={"nodeagent.io/node": "node-a"})
    seconds, text = (300, "node node-a is not Ready") if node else (1800, "not prepared within 30m0s: no node agent")
    async with scene.dispatching():
        await asyncio.sleep(seconds - 10)
        assert scene.phase("du") == "Accepted"
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=100)
    assert scene.message("du").startswith(text)


async def test_an_init_pod_has_its_whole_timeout(skew: timedelta) -> None:
    async with open_repositories(skew=skew).running() as scene:
        await scene.until_pod()
        scene.set_pod(phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "none"}])
        await asyncio.sleep(80)
        assert scene.phase == ""
        await scene.until_phase("NotReady", seconds=25)
