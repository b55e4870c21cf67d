"""An operation that times out fails its transfer and is named; what may be a fault of the node is marked.

An agent whose wall clock is a day ahead or behind ends no transfer sooner, later, or with another message.
"""

import asyncio
import json
from datetime import timedelta

import pytest

from core.kube.resources import PODS, VOLUME_SNAPSHOTS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL, NOT_PREPARED_ANNOTATION
from nodeagent.transfers.mover_pod import MoverLoss
from tests.nodeagent.support.dispatching import Gate, agent_pod, cluster_node, open_scene
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.repository_scene import open_scene as open_repositories
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, TRANSFERS, data_download, data_upload
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


FOREIGN = "example.com/keep"
_DAY = timedelta(hours=24)
"""How much an agent's wall clock may be wrong."""
SKEWED = pytest.mark.parametrize("skew", [_DAY, -_DAY], ids=["a day ahead", "a day behind"])


def with_timeout(transfer: JsonDict, timeout: str) -> JsonDict:
    transfer["spec"] = transfer["spec"] | {"operationTimeout": timeout}
    return transfer


def movers(world: World) -> list[JsonDict]:
    return [pod for pod in world.kube.objects(PODS) if pod["metadata"]["namespace"] == "velero"]


@pytest.mark.parametrize(
    ("timeout", "seconds", "shown", "skew"),
    [("2m0s", 120, "2m0s", _DAY), ("", 600, "10m0s", _DAY), ("0s", 600, "10m0s", -_DAY)],
    ids=["of the transfer", "of the agent", "zero counts as none"],
)
async def test_a_source_snapshot_not_deleted_in_time_is_a_failure(
    timeout: str, seconds: float, shown: str, skew: timedelta
) -> None:
    async with open_world(with_timeout(accepted(data_upload()), timeout)) as world:
        (snapshot,) = world.kube.objects(VOLUME_SNAPSHOTS)
        snapshot["metadata"]["finalizers"] = [FOREIGN]
        world.kube.put(snapshot)
        async with world.agent(skew=skew):
            world.cluster.tick_seconds = 5.0
            await asyncio.sleep(seconds - 5)
            assert world.phase() == "Accepted"
            await world.until(lambda: world.phase() == "Failed", seconds=25, every=1)
    meta = snapshot["metadata"]
    name = f"VolumeSnapshot {meta['namespace']}/{meta['name']}"
    # Its cleanup is blocked too, so the mark for the leader is still there.
    assert world.transfer()["metadata"]["annotations"][NOT_PREPARED_ANNOTATION] == "OperationTimeout"
    assert world.transfer()["status"]["message"] == (
        f"timed out after {shown}: {name} is being deleted (finalizers: {FOREIGN})"
    )


@pytest.mark.cause("operation-too-long")
async def test_a_backup_snapshot_that_is_not_ready_in_time_fails_the_transfer() -> None:
    async with open_world(with_timeout(accepted(data_upload()), "90s")) as world:
        world.cluster.snapshots_become_ready = False
        async with world.agent():
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: world.phase() == "Failed", seconds=110, every=1)
    message = world.transfer()["status"]["message"]
    assert message == "timed out after 1m30s: VolumeSnapshot velero/du-1 is not ready yet"


async def test_the_timeout_begins_again_if_the_transfer_left_its_agent_during_a_step() -> None:
    async with open_world(with_timeout(accepted(data_upload()), "90s")) as world:
        world.cluster.snapshots_become_ready = False
        gate = Gate(world.kube, lambda request: request.path.endswith("volumesnapshots/du-1"))
        gate.open.set()
        async with world.agent(gate):
            await asyncio.sleep(10)
            gate.open.clear()
            await world.until(lambda: gate.waiting > 0)
            for node in ("node-b", NODE):
                transfer = world.transfer()
                transfer["metadata"]["labels"][NODE_LABEL] = node
                world.kube.put(transfer)
                await asyncio.sleep(1)
                gate.open.set()
                await asyncio.sleep(120 if node != NODE else 10)
            assert world.phase() == "Accepted"


ERROR = 'failed to pull and unpack image "localhost:5000/a:b": dial tcp 127.0.0.1:5000: connect: connection refused'
ATTEMPTS = [
    {"reason": "ErrImagePull", "message": ERROR},
    {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "localhost:5000/a:b": ErrImagePull: {ERROR}'},
]
"""What a kubelet 1.34 writes in turn."""


async def fail_pulls(world: World, seconds: int) -> None:
    """Let each attempt of the kubelet fail for so long."""
    world.cluster.tick_seconds = 1.0
    await world.until(lambda: movers(world) != [])
    (meta,) = (pod["metadata"] for pod in movers(world))
    for second in range(seconds):
        if second % 50 in {0, 10}:
            waiting = [{"name": "mover", "state": {"waiting": ATTEMPTS[second % 50 > 0]}}]
            patch = {"spec": {"nodeName": NODE}, "status": {"phase": "Pending", "containerStatuses": waiting}}
            await world.cluster.client.patch(PODS, meta["namespace"], meta["name"], patch)
        await asyncio.sleep(1)


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_an_image_that_is_not_available_for_five_minutes_fails_the_transfer(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(starts=False)) as world, world.agent():
        await fail_pulls(world, 295)
        assert world.phase(kind) == "Accepted"
        assert "connection refused" in world.transfer(kind)["status"]["message"]
        await world.until(lambda: world.phase(kind) == "Failed", seconds=15, every=1)
    name = transfer["metadata"]["name"]
    text = f"image of Pod velero/{name} is not available on node node-a: ImagePullBackOff: Back-off pulling image"
    assert world.transfer(kind)["status"]["message"].startswith(f"timed out after 5m0s: {text}")


@SKEWED
@pytest.mark.cause("completion-too-long")
async def test_a_handover_that_times_out_fails_the_transfer(skew: timedelta) -> None:
    transfer = with_timeout(accepted(data_download()), "90s")
    async with open_world(transfer) as world, world.agent(skew=skew):
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.cluster.binds = False
        await world.until(lambda: "Binding" in world.reasons())
        await asyncio.sleep(80)
        assert world.phase("DataDownload") == "InProgress"
        await world.until(lambda: world.phase("DataDownload") == "Failed", seconds=20, every=1)
        message = world.transfer("DataDownload")["status"]["message"]
        assert message.startswith("not completed within 1m30s after the data was moved: target PVC app3/data")


async def _delete_source_snapshot(world: World) -> None:
    (snapshot,) = (each["metadata"] for each in world.kube.objects(VOLUME_SNAPSHOTS))
    await world.cluster.client.delete(VOLUME_SNAPSHOTS, snapshot["namespace"], snapshot["name"])


@pytest.mark.parametrize(
    ("mover", "without", "marks"),
    [
        pytest.param(Mover(starts=False), "", ["PrepareTimeout"], id="a mover pod that does not start"),
        pytest.param(Mover(), "a ready snapshot", ["OperationTimeout"], id="an operation that times out"),
        pytest.param(Mover(evicted=True), "", ["MoverLost"], id="mover pods that are lost"),
        pytest.param(Mover(), "its source", [], id="a missing snapshot is the transfer's own fault"),
        pytest.param(Mover(exit_code=11, message="disk"), "", [], id="a data path that fails is not the node's"),
    ],
)
async def test_what_may_be_a_fault_of_the_node_is_marked(mover: Mover, without: str, marks: list[str]) -> None:
    """For the leader, until the transfer that failed before Prepared is cleaned up."""
    transfer = accepted(data_upload())
    if mover.evicted:
        losses = MoverLoss(since=NOON, last=NOON, times=19)
        transfer["metadata"]["annotations"] = {MOVER_LOST_ANNOTATION: losses.to_json()}
    async with open_world(transfer, mover=mover) as world:
        world.cluster.tick_seconds = 20.0
        world.cluster.snapshots_become_ready = without != "a ready snapshot"
        if without == "its source":
            await _delete_source_snapshot(world)
        async with world.agent():
            await world.until(world.done, seconds=2500, every=10)
    assert world.phase() == "Failed"
    assert NOT_PREPARED_ANNOTATION not in world.transfer()["metadata"].get("annotations", {})
    patches = [json.loads(one.body or b"{}") for one in world.kube.requests if one.method == "PATCH"]
    annotations = [(patch.get("metadata") or {}).get("annotations") or {} for patch in patches]
    assert [mark for one in annotations if (mark := one.get(NOT_PREPARED_ANNOTATION))] == marks


def message(world: World, kind: str = "DataUpload") -> str:
    return str(world.transfer(kind)["status"].get("message", ""))


@SKEWED
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_every_kind_of_transfer_completes(kind: str, skew: timedelta) -> None:
    async with open_world(accepted(TRANSFERS[kind]())) as world, world.agent(skew=skew):
        await world.until(lambda: world.done(kind))
    assert (world.phase(kind), message(world, kind)) == ("Completed", "")


@SKEWED
@pytest.mark.cause("not-prepared-in-time")
async def test_a_mover_pod_has_the_whole_prepare_timeout(skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(starts=False)) as world, world.agent(skew=skew):
        world.cluster.tick_seconds = 30.0
        await asyncio.sleep(1790)
        assert world.phase() == "Accepted"
        await world.until(lambda: world.phase() == "Failed", seconds=30, every=2)
    assert message(world).startswith("not prepared within 30m0s: ")


@SKEWED
@pytest.mark.parametrize("by", ["cancel", "deletion"])
async def test_a_canceled_mover_has_its_whole_timeout_again_after_a_restart(by: str, skew: timedelta) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(stubborn=True)) as world:
        async with world.agent(skew=skew):
            await world.until(lambda: world.phase() == "InProgress")
            await world.stop(world.transfer(), by)
            world.cluster.tick_seconds = 60.0
            await asyncio.sleep(3590)
        async with world.agent(skew=skew):
            await asyncio.sleep(3590)
            assert world.phase() == "Canceling"
            await world.until(world.done, seconds=200, every=5)
    if by == "cancel":
        assert "did not stop within 1h0m0s" in message(world)


@SKEWED
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


@SKEWED
async def test_an_init_pod_has_its_whole_timeout(skew: timedelta) -> None:
    async with open_repositories(skew=skew).running() as scene:
        await scene.until_pod()
        scene.set_pod(phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "none"}])
        await asyncio.sleep(80)
        assert scene.phase == ""
        await scene.until_phase("NotReady", seconds=25)
