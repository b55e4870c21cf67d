"""An operation that times out fails its transfer and is named; what may be a fault of the node is marked."""

import asyncio
import json

import pytest

from core.kube.resources import PODS, VOLUME_SNAPSHOTS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL, NOT_PREPARED_ANNOTATION, OWNER_UID_LABEL
from nodeagent.transfers.mover_pod import MoverLoss
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, TRANSFERS, data_download, data_upload

pytestmark = pytest.mark.looptime


FOREIGN = "example.com/keep"


def with_timeout(transfer: JsonDict, timeout: str) -> JsonDict:
    transfer["spec"] = transfer["spec"] | {"operationTimeout": timeout}
    return transfer


def movers(world: World) -> list[JsonDict]:
    return [pod for pod in world.kube.objects(PODS) if pod["metadata"]["namespace"] == "velero"]


def source_snapshot(world: World) -> JsonDict:
    return next(s for s in world.kube.objects(VOLUME_SNAPSHOTS) if s["metadata"]["namespace"] != "velero")


@pytest.mark.parametrize(
    ("timeout", "seconds", "shown"),
    [("2m0s", 120, "2m0s"), ("", 600, "10m0s"), ("0s", 600, "10m0s")],
    ids=["of the transfer", "of the agent", "zero counts as none"],
)
async def test_a_source_snapshot_not_deleted_in_time_is_a_failure(timeout: str, seconds: float, shown: str) -> None:
    async with open_world(with_timeout(accepted(data_upload()), timeout)) as world:
        snapshot = source_snapshot(world)
        snapshot["metadata"]["finalizers"] = [FOREIGN]
        world.kube.put(snapshot)
        async with world.agent():
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: world.phase() == "Failed", seconds=seconds + 20, every=1)
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


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_an_image_that_is_available_again_before_that_completes_the_transfer(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(starts=False)) as world, world.agent():
        await fail_pulls(world, 290)
        world.cluster.mover.starts = True
        await world.until(lambda: world.done(kind))
    assert (world.phase(kind), world.transfer(kind)["status"].get("message")) == ("Completed", None)


async def test_an_agent_that_restarts_begins_the_timeout_of_an_image_again() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(starts=False)) as world:
        async with world.agent():
            await fail_pulls(world, 200)
        async with world.agent():
            await fail_pulls(world, 200)
            assert world.phase() == "Accepted"


@pytest.mark.cause("completion-too-long")
async def test_a_handover_that_times_out_fails_the_transfer() -> None:
    async with open_world(with_timeout(accepted(data_download()), "90s")) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.cluster.binds = False
        await world.until(lambda: world.phase("DataDownload") == "Failed", seconds=110, every=1)
        message = world.transfer("DataDownload")["status"]["message"]
        assert message.startswith("not completed within 1m30s after the data was moved: target PVC app3/data")
        assert "Binding" in world.reasons()


@pytest.mark.parametrize("build", [data_upload, data_download])
@pytest.mark.parametrize(
    ("timeout", "flag"), [("90s", "1m30s"), ("", "10m0s")], ids=["of the transfer", "of the agent"]
)
async def test_the_mover_gets_the_timeout_as_flag(build: object, timeout: str, flag: str) -> None:
    transfer = with_timeout(accepted(build()), timeout)  # type: ignore[operator] # one of the two factories
    async with open_world(transfer) as world, world.agent():
        await world.until(lambda: world.kube.objects(PODS) != [])
        (pod,) = world.kube.objects(PODS)
    assert pod["metadata"]["labels"][OWNER_UID_LABEL] == transfer["metadata"]["uid"]
    assert f"--resource-timeout={flag}" in pod["spec"]["containers"][0]["args"]


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
