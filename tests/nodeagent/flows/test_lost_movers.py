"""Mover pods that the cluster ends: recreated before the data path started, reported with the cause afterward."""

import asyncio
from datetime import timedelta
from itertools import pairwise

import pytest

from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL, PENDING_REASON_ANNOTATION
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import EVICTED as TERMINATED_BY_KUBELET
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_upload, disrupted, ended

pytestmark = pytest.mark.looptime

EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": "The node was low on resource: memory.",
    "conditions": [TERMINATED_BY_KUBELET],
}
REJECTED = {"phase": "Failed", "reason": "NodeAffinity", "message": "Pod was rejected: node(s) didn't match"}
FULL = {
    "phase": "Failed",
    "reason": "OutOfcpu",
    "message": "Pod was rejected: Node didn't have enough resource: cpu, requested: 500, used: 3900, capacity: 4000",
}
STOPPED = ended(14, "stopped by SIGTERM: data path is canceled")


def pod_of(world: World, transfer: JsonDict) -> JsonDict:
    name = transfer["metadata"]["name"]
    return next((pod for pod in world.kube.objects(PODS) if pod["metadata"]["name"] == name), {})


async def set_status(world: World, transfer: JsonDict, status: JsonDict, *, node: str = NODE) -> str:
    """Write the status of the mover pod, as kubelet or scheduler do; return the pod's UID."""
    pod = pod_of(world, transfer)
    patch = {"spec": {"nodeName": node}, "status": status}
    await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], patch)
    return str(pod["metadata"]["uid"])


async def limit_memory(world: World, transfer: JsonDict, limit: str) -> None:
    pod = pod_of(world, transfer)
    containers = [each | {"resources": {"limits": {"memory": limit}}} for each in pod["spec"]["containers"]]
    await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], {"spec": {"containers": containers}})


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (EVICTED, "was lost before its data path started, will be recreated: Evicted: The node was low", "MoverLost"),
        (REJECTED, "was rejected by its kubelet, will be recreated: NodeAffinity: Pod was", "NodeAffinity"),
        (FULL, "will be recreated: OutOfcpu: Pod was rejected: Node didn't have enough resource: cpu", "OutOfcpu"),
        (STOPPED, "was lost before its data path started, will be recreated: stopped by SIGTERM", "MoverLost"),
    ],
    ids=["evicted", "rejected", "node full", "node shut down"],
)
@pytest.mark.parametrize("phase", ["Accepted", "Prepared"])
@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.cause("mover-lost-before")
async def test_a_mover_pod_that_is_lost_before_its_start_is_recreated(
    kind: str, phase: str, status: JsonDict, text: str, reason: str
) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(starts=phase != "Accepted")) as world:
        async with world.agent(slots=0 if phase == "Prepared" else 1):
            await world.until(lambda: world.phase(kind) == phase and pod_of(world, transfer) != {})
            lost = await set_status(world, transfer, status)
            await world.until(lambda: text in world.transfer(kind)["status"].get("message", ""), seconds=5)
            assert world.phase(kind) == phase
            assert reason in world.reasons()
            assert world.transfer(kind)["metadata"]["annotations"][PENDING_REASON_ANNOTATION] == reason
            world.cluster.mover.starts = True
            await world.until(lambda: pod_of(world, transfer).get("metadata", {}).get("uid", lost) != lost, seconds=20)
        async with world.agent():
            await world.until(lambda: world.done(kind))
        await asyncio.sleep(1)
    found = world.transfer(kind)
    assert (found["status"]["phase"], found["status"].get("message")) == ("Completed", None)
    assert MOVER_LOST_ANNOTATION not in found["metadata"].get("annotations", {})


async def test_a_transfer_whose_mover_pod_is_not_replaced_yet_delays_no_other() -> None:
    transfers = [accepted(data_upload(f"du-{number}")) for number in (1, 2)]
    transfers[1]["spec"]["csiSnapshot"]["volumeSnapshot"] = "vs-2"
    async with open_world(*transfers) as world, world.agent(slots=0) as agent:
        await world.until(lambda: [world.phase(name=name) for name in ("du-1", "du-2")] == ["Prepared", "Prepared"])
        world.cluster.mover.starts = False
        await set_status(world, transfers[0], EVICTED)
        await world.until(lambda: "MoverLost" in world.reasons())
        agent.set_slots(1)
        await world.until(lambda: world.done(name="du-2"), seconds=30)
        world.cluster.mover.starts = True
        await world.until(lambda: world.done(name="du-1"))
    assert [world.phase(name=name) for name in ("du-1", "du-2")] == ["Completed", "Completed"]


async def test_a_recreated_mover_pod_may_be_scheduled_to_another_node() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world:
        async with world.agent(slots=0), world.agent(node="node-b"):
            await world.until(lambda: world.phase() == "Prepared")
            world.cluster.node = "node-b"
            await set_status(world, transfer, EVICTED)
            await world.until(world.done)
        status = world.transfer()["status"]
        assert (status["phase"], status["node"], status.get("message")) == ("Completed", "node-b", None)
        assert NODE_LABEL not in world.transfer()["metadata"]["labels"]
        assert "TakenOver" in world.reasons()


async def test_the_kubelet_of_another_node_may_reject_a_mover_pod() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(starts=False)) as world, world.agent():
        await world.until(lambda: pod_of(world, transfer) != {})
        await set_status(world, transfer, REJECTED, node="node-b")
        await world.until(lambda: "Pod was rejected" in world.transfer()["status"].get("message", ""), seconds=10)
        world.cluster.mover.starts = True
        await world.until(world.done)
    assert world.phase() == "Completed"


@pytest.mark.cause("mover-not-taken-over")
async def test_a_mover_pod_on_a_node_without_an_agent_is_reported() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world, world.agent():
        world.cluster.node = "node-b"
        message = "data mover pod velero/du-1 is on node node-b, whose node agent has not taken it over yet"
        await world.until(lambda: world.transfer()["status"].get("message") == message, seconds=10)
        async with world.agent(node="node-b"):
            await world.until(world.done)
    assert (world.phase(), world.transfer()["status"].get("message")) == ("Completed", None)


async def test_pods_are_recreated_with_growing_pauses_until_the_prepare_timeout() -> None:
    transfer = accepted(data_upload())
    seen: dict[str, float] = {}
    loop = asyncio.get_running_loop()
    skew = timedelta(hours=-24)
    async with open_world(transfer, mover=Mover(rejected="OutOfcpu")) as world, world.agent(skew=skew):

        def observe() -> bool:
            if uid := pod_of(world, transfer).get("metadata", {}).get("uid"):
                seen.setdefault(uid, loop.time())
            return world.done()

        began = loop.time()
        await world.until(lambda: observe() or len(seen) > 4, every=0.5)
        world.cluster.tick_seconds = 2.0
        await world.until(observe, seconds=2000, every=2.0)
        assert 1800 <= loop.time() - began < 1830
    pauses = [later - earlier for earlier, later in pairwise(seen.values())]
    assert [5 <= pauses[0] < 8, 10 <= pauses[1] < 14, 20 <= pauses[2] < 25] == [True] * 3
    assert 8 <= len(seen) <= 14
    status = world.transfer()["status"]
    assert (status["phase"], status["message"].startswith("not prepared within 30m0s: ")) == ("Failed", True)
    assert "; lost data mover pods: " in status["message"]
    assert "the last one because of OutOfcpu" in status["message"]


@pytest.mark.parametrize("phase", ["Accepted", "Prepared"])
@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.cause("mover-killed-before")
async def test_a_mover_pod_that_is_killed_three_times_is_not_recreated(kind: str, phase: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    lost: list[str] = []
    async with open_world(transfer, mover=Mover(starts=phase != "Accepted")) as world, world.agent(slots=0):
        world.kube.logs[NAMESPACE, transfer["metadata"]["name"]] = "the last line of its log"
        for _ in range(3):
            await world.until(lambda: pod_of(world, transfer).get("metadata", {}).get("uid", "") not in {"", *lost})
            await world.until(lambda: world.phase(kind) == phase)
            await limit_memory(world, transfer, "64Mi")
            lost.append(await set_status(world, transfer, ended(137)))
        await world.until(lambda: world.done(kind), seconds=30)
    status = world.transfer(kind)["status"]
    assert status["phase"] == "Failed"
    assert status["message"] == (
        f"data mover pod velero/{transfer['metadata']['name']} was killed 3 times before its data path started: "
        "killed by signal 9 (exit code 137), probably out of memory (limit 64Mi); "
        "its log ends: the last line of its log"
    )
    assert MOVER_LOST_ANNOTATION not in world.transfer(kind)["metadata"].get("annotations", {})


@pytest.mark.parametrize("kind", ["PodVolumeBackup", "PodVolumeRestore"])
async def test_a_workload_that_is_deleted_while_its_node_is_full_fails_its_transfer(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(rejected="OutOfcpu")) as world, world.agent():
        # The next mover pod is minutes away.
        await world.until(lambda: world.reasons().count("OutOfcpu") == 6, seconds=200)
        ref = transfer["spec"]["pod"]
        await world.cluster.client.delete(PODS, ref["namespace"], ref["name"])
        await world.until(lambda: world.done(kind), seconds=25)
    assert "is not available: it does not exist" in world.transfer(kind)["status"]["message"]


async def test_each_lost_mover_pod_has_a_timeout_of_its_own() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world, world.agent(slots=0):
        await world.until(lambda: world.phase() == "Prepared")
        world.cluster.tick_seconds = 20.0
        for _ in range(2):
            await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
            await asyncio.sleep(2000)
        assert (world.phase(), world.reasons().count("MoverLost")) == ("Prepared", 2)
        world.cluster.mover.starts = False
        began = asyncio.get_running_loop().time()
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done, seconds=2000, every=2.0)
        assert 1800 <= asyncio.get_running_loop().time() - began < 1840
    message = world.transfer()["status"]["message"]
    assert message.startswith("data mover pod was lost and not replaced within 30m0s: ")


@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.cause("mover-lost")
async def test_a_pod_lost_while_running_fails_its_transfer_with_cause(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(seconds=1000)) as world, world.agent():
        await world.until(lambda: world.phase(kind) == "InProgress")
        await set_status(world, transfer, EVICTED)
        await world.until(lambda: world.done(kind), seconds=20)
    found = world.transfer(kind)["status"]
    assert found["phase"] == "Failed"
    assert "Evicted: The node was low on resource: memory." in found["message"]


async def test_the_cause_of_a_pod_that_was_deleted_before_its_end_was_observed_is_reported() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(seconds=1000)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        await set_status(world, transfer, disrupted("PreemptionByScheduler"))
        await asyncio.sleep(1)
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done, seconds=20)
    assert world.phase() == "Failed"
    message = world.transfer()["status"]["message"]
    assert message.startswith("data mover pod velero/du-1 was lost on node node-a without a result: ")
    assert "PreemptionByScheduler: a cause" in message


async def test_a_result_counts_although_its_pod_is_deleted_at_once() -> None:
    """A drain deletes a pod that has just ended; the agent observes the deletion before the end."""
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(seconds=2)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        world.kube.fail_next("PATCH", "/datauploads/", 500, times=8)
        await world.until(lambda: pod_of(world, transfer)["status"]["phase"] == "Succeeded")
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done)
    assert (world.phase(), world.transfer()["status"]["snapshotID"]) == ("Completed", "kopia-1")
