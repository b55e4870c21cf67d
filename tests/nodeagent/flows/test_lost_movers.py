"""Movers that the cluster takes away: made anew before they began, told by whom afterwards."""

import asyncio

import pytest

from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NODE_LABEL
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import LOADS, NAMESPACE, NODE, data_upload

pytestmark = pytest.mark.looptime

EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
REJECTED = {"phase": "Failed", "reason": "NodeAffinity", "message": "Pod was rejected: node(s) didn't match"}
PREEMPTED = {
    "conditions": [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "default-scheduler: preempting to accommodate a higher priority pod",
        }
    ]
}

KILLED = {
    "phase": "Failed",
    "containerStatuses": [{"name": "mover", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}],
}


def pod_of(world: World, load: JsonDict) -> JsonDict:
    name = load["metadata"]["name"]
    return next((pod for pod in world.kube.objects(PODS) if pod["metadata"]["name"] == name), {})


async def tell(world: World, load: JsonDict, status: JsonDict, *, node: str = NODE) -> str:
    """Write the status of the load's pod, as kubelet or scheduler do; return the pod's UID."""
    pod = pod_of(world, load)
    patch = {"spec": {"nodeName": node}, "status": status}
    await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], patch)
    return str(pod["metadata"]["uid"])


async def limit_memory(world: World, load: JsonDict, limit: str) -> None:
    """Give the container of the load's pod a memory limit."""
    pod = pod_of(world, load)
    containers = [each | {"resources": {"limits": {"memory": limit}}} for each in pod["spec"]["containers"]]
    await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], {"spec": {"containers": containers}})


@pytest.mark.parametrize(
    ("status", "words"),
    [(EVICTED, "Evicted: The node was low on resource"), (REJECTED, "NodeAffinity: Pod was rejected")],
    ids=["evicted", "rejected"],
)
@pytest.mark.parametrize("phase", ["Accepted", "Prepared"])
@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.cause("mover-lost-before")
async def test_a_mover_that_is_lost_before_it_began_is_made_anew(
    kind: str, phase: str, status: JsonDict, words: str
) -> None:
    load = accepted(LOADS[kind]())
    async with open_world(load, mover=Mover(starts=phase != "Accepted")) as world:
        async with world.agent(slots=0 if phase == "Prepared" else 1):
            await world.until(lambda: world.phase(kind) == phase and pod_of(world, load) != {})
            lost = await tell(world, load, status)
            await world.until(lambda: words in world.load(kind)["status"].get("message", ""), seconds=5)
            assert world.phase(kind) == phase
            assert "MoverLost" in world.reasons()
            world.cluster.mover.starts = True
            await world.until(lambda: pod_of(world, load).get("metadata", {}).get("uid", lost) != lost, seconds=20)
        async with world.agent():
            await world.until(lambda: world.done(kind))
        await asyncio.sleep(1)
    found = world.load(kind)
    assert (found["status"]["phase"], found["status"].get("message")) == ("Completed", None)
    assert MOVER_LOST_ANNOTATION not in found["metadata"].get("annotations", {})


@pytest.mark.parametrize("kind", LOADS)
async def test_a_prepared_mover_that_somebody_deletes_is_made_anew(kind: str) -> None:
    load = accepted(LOADS[kind]())
    async with open_world(load) as world:
        async with world.agent(slots=0):
            await world.until(lambda: world.phase(kind) == "Prepared")
            lost = pod_of(world, load)["metadata"]["uid"]
            await world.cluster.client.delete(PODS, NAMESPACE, load["metadata"]["name"])
            await world.until(lambda: pod_of(world, load).get("metadata", {}).get("uid", lost) != lost, seconds=20)
            assert world.reasons().count("MoverLost") == 1
        async with world.agent():
            await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Completed"


async def test_a_mover_that_is_made_anew_may_come_to_another_node() -> None:
    load = accepted(data_upload())
    async with open_world(load) as world:
        async with world.agent(slots=0), world.agent(node="node-b"):
            await world.until(lambda: world.phase() == "Prepared")
            world.cluster.node = "node-b"
            await tell(world, load, EVICTED)
            await world.until(world.done)
        status = world.load()["status"]
        assert (status["phase"], status["node"], status.get("message")) == ("Completed", "node-b", None)
        assert NODE_LABEL not in world.load()["metadata"]["labels"]
        assert "TakenOver" in world.reasons()


async def test_another_nodes_kubelet_may_refuse_a_mover_too() -> None:
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(starts=False)) as world, world.agent():
        await world.until(lambda: pod_of(world, load) != {})
        await tell(world, load, REJECTED, node="node-b")
        await world.until(lambda: "Pod was rejected" in world.load()["status"].get("message", ""), seconds=10)
        world.cluster.mover.starts = True
        await world.until(world.done)
    assert world.phase() == "Completed"


@pytest.mark.cause("mover-not-taken-over")
async def test_a_mover_on_a_node_without_an_agent_says_so() -> None:
    load = accepted(data_upload())
    async with open_world(load) as world, world.agent():
        world.cluster.node = "node-b"
        message = "data mover pod velero/du-1 is on node node-b, whose node agent has not taken it over yet"
        await world.until(lambda: world.load()["status"].get("message") == message, seconds=10)
        async with world.agent(node="node-b"):
            await world.until(world.done)
    assert (world.phase(), world.load()["status"].get("message")) == ("Completed", None)


async def test_a_kubelet_that_takes_no_pod_is_asked_ever_less_often_until_the_prepare_timeout() -> None:
    load = accepted(data_upload())
    seen: set[str] = set()
    async with open_world(load, mover=Mover(rejected="OutOfcpu")) as world, world.agent():
        world.cluster.tick_seconds = 2.0

        def look() -> bool:
            seen.add(pod_of(world, load).get("metadata", {}).get("uid", ""))
            return world.done()

        began = asyncio.get_running_loop().time()
        await world.until(look, seconds=2000, every=2.0)
        assert 1800 <= asyncio.get_running_loop().time() - began < 1830
    status = world.load()["status"]
    assert status["phase"] == "Failed"
    assert status["message"].startswith("not prepared within 30m0s: ")
    assert "lost: " in status["message"]
    assert "the last one by OutOfcpu" in status["message"]
    assert 8 <= len(seen - {""}) <= 14


@pytest.mark.parametrize("phase", ["Accepted", "Prepared"])
@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.cause("mover-killed-before")
async def test_a_mover_that_is_killed_each_time_is_not_made_anew_forever(kind: str, phase: str) -> None:
    load = accepted(LOADS[kind]())
    lost: list[str] = []
    async with open_world(load, mover=Mover(starts=phase != "Accepted")) as world, world.agent(slots=0):
        world.kube.logs[NAMESPACE, load["metadata"]["name"]] = "the last line of its log"
        for _ in range(3):
            await world.until(lambda: pod_of(world, load).get("metadata", {}).get("uid", "") not in {"", *lost})
            await world.until(lambda: world.phase(kind) == phase)
            await limit_memory(world, load, "64Mi")
            lost.append(await tell(world, load, KILLED))
        await world.until(lambda: world.done(kind), seconds=30)
    status = world.load(kind)["status"]
    assert status["phase"] == "Failed"
    assert status["message"] == (
        f"data mover pod velero/{load['metadata']['name']} was killed 3 times before its data path started: "
        "killed by signal 9 (exit code 137), probably out of memory (limit 64Mi); its log ends: the last line of its log"
    )
    assert MOVER_LOST_ANNOTATION not in world.load(kind)["metadata"].get("annotations", {})


async def test_no_load_gets_mover_after_mover_without_end() -> None:
    """Each pod lasts for an hour, so that no timeout ends it."""
    load = accepted(data_upload())
    seen: set[str] = set()
    async with open_world(load) as world, world.agent(slots=0):
        world.cluster.tick_seconds = 20.0
        while not world.done():
            await world.until(
                lambda: world.done() or pod_of(world, load).get("metadata", {}).get("uid", "") not in {"", *seen},
                seconds=1000,
                every=5.0,
            )
            if not world.done():
                await asyncio.sleep(3600)
                seen.add(await tell(world, load, EVICTED))
                await asyncio.sleep(60)
    assert len(seen) == 20
    assert world.load()["status"]["message"].startswith(
        "data mover pod velero/du-1 was lost 20 times before its data path started: Evicted: The node was low"
    )


async def test_one_that_was_made_anew_and_vanishes_has_its_own_time_to_come_back() -> None:
    load = accepted(data_upload())
    async with open_world(load) as world, world.agent(slots=0):
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
    assert "not replaced within 30m0s" in world.load()["status"]["message"]


async def test_a_prepared_load_whose_mover_does_not_come_back_fails_by_the_same_timeout() -> None:
    load = accepted(data_upload())
    async with open_world(load) as world, world.agent(slots=0):
        await world.until(lambda: world.phase() == "Prepared")
        world.cluster.tick_seconds = 20.0
        await asyncio.sleep(7200)
        assert world.phase() == "Prepared"
        world.cluster.mover.starts = False
        began = asyncio.get_running_loop().time()
        await tell(world, load, EVICTED)
        await world.until(world.done, seconds=2000, every=2.0)
        assert 1800 <= asyncio.get_running_loop().time() - began < 1830
    status = world.load()["status"]
    assert status["phase"] == "Failed"
    assert status["message"].startswith("data mover pod was lost and not replaced within 30m0s: ")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param(EVICTED, "Evicted: The node was low on resource: memory.", id="evicted"),
        pytest.param({"phase": "Failed", "reason": "OOMKilled"}, "OOMKilled", id="no word but the reason"),
        pytest.param(
            {
                "phase": "Failed",
                **PREEMPTED,
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 14, "message": "SIGTERM: the data path is canceled"}}}
                ],
            },
            "preempting to accommodate a higher priority pod",
            id="preempted",
        ),
    ],
)
@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.cause("mover-lost")
async def test_a_mover_that_is_lost_in_the_middle_ends_its_load_and_it_says_by_whom(
    kind: str, status: JsonDict, words: str
) -> None:
    load = accepted(LOADS[kind]())
    async with open_world(load, mover=Mover(seconds=1000)) as world, world.agent():
        await world.until(lambda: world.phase(kind) == "InProgress")
        await tell(world, load, status)
        await world.until(lambda: world.done(kind), seconds=20)
    found = world.load(kind)["status"]
    assert found["phase"] == "Failed"
    assert words in found["message"]


async def test_a_pod_that_is_gone_before_anybody_saw_its_end_still_says_who_took_it() -> None:
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(seconds=1000)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        await tell(world, load, PREEMPTED)
        await asyncio.sleep(1)
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done, seconds=20)
    assert world.phase() == "Failed"
    assert "default-scheduler: preempting to accommodate" in world.load()["status"]["message"]


async def test_a_good_end_counts_though_its_pod_is_taken_away_at_once() -> None:
    """A drain deletes a pod that has just ended; the agent sees it go before it saw the end."""
    load = accepted(data_upload())
    async with open_world(load, mover=Mover(seconds=2)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        world.kube.fail_next("PATCH", "/datauploads/", 500, times=8)
        await world.until(lambda: pod_of(world, load)["status"]["phase"] == "Succeeded")
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done)
    assert (world.phase(), world.load()["status"]["snapshotID"]) == ("Completed", "kopia-1")
