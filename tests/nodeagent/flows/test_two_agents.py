"""Two agents on one node, as during a rolling update, and transfers that an agent of Velero has started."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import Request
from core.models.names import NODE_LABEL
from core.models.phases import AttemptStage, RetryRules
from tests.nodeagent.flows.test_retries import attempts_of, set_pod_status
from tests.nodeagent.flows.test_retries import mover_pod as pod_of
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES, Mover
from tests.nodeagent.support.transfers import (
    MOVER_LABELS,
    NAMESPACE,
    NODE,
    TRANSFERS,
    data_upload,
    ended,
    mover_pod,
    pod_volume_backup,
    pod_volume_restore,
)
from tests.support.objects import JsonDict
from tests.support.transports import Pause

pytestmark = pytest.mark.looptime


RUNNING = {"InProgress", "Canceling"}


@pytest.mark.parametrize("interrupted", [0, 1], ids=["", "retried"])
@pytest.mark.parametrize("end", ["Completed", "Failed", "Canceled"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_two_agents_of_one_node_run_a_transfer_once(kind: str, end: str, interrupted: int) -> None:
    broken = {"exit_code": 11, "message": "no space left"} if end == "Failed" else {}
    mover = Mover(seconds=3, interrupted=interrupted, **broken)  # type: ignore[arg-type] # values of two types
    retries = RetryRules(initial_backoff=timedelta(seconds=1), deadline=None)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(open_world(accepted(TRANSFERS[kind]()), mover=mover))
        world.cluster.grants = True
        for _ in range(2):
            await stack.enter_async_context(world.agent(retries=retries))
        before = world.everything()
        if end == "Canceled":
            await world.until(
                lambda: world.reasons().count("Retried") == interrupted and world.phase(kind) == "InProgress"
            )
            mover.seconds = 1000
            await world.stop(world.transfer(kind), "cancel")
        await world.until(lambda: world.done(kind))
        await asyncio.sleep(20)
        assert world.phase(kind) == end
        created = [name for name in world.everything() if name not in before]
        assert created == (["PersistentVolume /pvc-*"] if (kind, end) == ("DataDownload", "Completed") else [])
        assert len([reason for reason in world.reasons() if reason == end]) == 1
        assert world.reasons().count("Interrupted") == interrupted


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_two_agents_of_one_node_share_its_slots(kind: str) -> None:
    transfers: list[JsonDict] = [accepted(TRANSFERS[kind](name)) for name in ("first", "second")]
    for transfer in transfers:
        ref = transfer["spec"].get("pod") or transfer["spec"].get("targetVolume") or transfer["spec"]["csiSnapshot"]
        key = "volumeSnapshot" if "volumeSnapshot" in ref else "pvc" if "pvc" in ref else "name"
        ref[key] = f"{ref[key]}-{transfer['metadata']['name']}"
    most = 0
    async with open_world(*transfers) as world, world.agent(slots=1), world.agent(slots=1):
        async with asyncio.timeout(300):
            while not (world.done(kind, "first") and world.done(kind, "second")):
                most = max(most, sum(world.phase(kind, name) in RUNNING for name in ("first", "second")))
                await asyncio.sleep(0.01)
        assert [world.phase(kind, name) for name in ("first", "second")] == ["Completed", "Completed"]
    assert most == 1


@pytest.mark.parametrize("verb", ["GET", "DELETE"])
@pytest.mark.parametrize("kind", ["DataUpload", "DataDownload"])
async def test_an_agent_that_was_frozen_leaves_the_next_attempt_of_another_agent_alone(kind: str, verb: str) -> None:
    retries, resource = RetryRules(initial_backoff=timedelta(seconds=1), deadline=None), TRANSFER_RESOURCES[kind]
    async with open_world(accepted(TRANSFERS[kind]()), mover=Mover(seconds=1000)) as world:
        name = world.transfer(kind)["metadata"]["name"]
        path = f"/pods/{name}"

        def withdraws(request: Request) -> bool:
            waiting = attempts_of(world, kind).stage is AttemptStage.WAITING
            return waiting and request.method == verb and request.path.endswith(path)

        first = Pause(world.kube, withdraws)
        async with world.agent(first, retries=retries):
            await world.until(lambda: world.transfer(kind).get("status", {}).get("progress") is not None)
            await set_pod_status(world, kind, ended(137))
            await first.stopped.wait()
            # As the leader reassigns it.
            world.cluster.node, world.cluster.grants = "node-b", True
            labels = {"metadata": {"labels": {NODE_LABEL: "node-b"}}}
            await world.cluster.client.patch(resource, NAMESPACE, name, labels)
            async with world.agent(node="node-b", retries=retries):
                await world.until(lambda: attempts_of(world, kind).stage is AttemptStage.RUNNING)
                before = [pod_of(world, kind), *world.kube.objects(PERSISTENT_VOLUME_CLAIMS)]
                first.over.set()
                await asyncio.sleep(30)
                after = [pod_of(world, kind), *world.kube.objects(PERSISTENT_VOLUME_CLAIMS)]
    assert [one["metadata"].get("deletionTimestamp") for one in after] == [None] * len(before)
    assert [one["metadata"]["uid"] for one in after] == [one["metadata"]["uid"] for one in before]
    assert (attempts_of(world, kind).number, world.phase(kind)) == (2, "InProgress")


BY_VELERO = {"DataUpload": data_upload, "PodVolumeBackup": pod_volume_backup, "PodVolumeRestore": pod_volume_restore}
BLOCK = {"datamover": "velero-block"}
LEFT = {
    # Its source snapshot is deleted with the expose objects.
    "DataUpload": {"persistentvolumeclaims": ["data"]},
    "PodVolumeBackup": {"pods": ["writer"]},
    "PodVolumeRestore": {"pods": ["writer"]},
}


def adopted(kind: str, phase: str) -> JsonDict:
    """Return a transfer that Velero moved to `phase`, as the dispatcher labels it."""
    transfer = accepted(BY_VELERO[kind]())
    transfer["status"] |= {"phase": phase}
    return transfer


def put_pod_of_velero(world: World, transfer: JsonDict) -> None:
    pod = mover_pod(transfer, phase="Running")
    pod["metadata"]["labels"] = {MOVER_LABELS[transfer["kind"]]: transfer["metadata"]["name"]}
    pod["spec"]["volumes"] = [{"name": transfer["metadata"]["uid"], "hostPath": {"path": "/volume"}}]
    world.kube.put(pod)


@pytest.mark.parametrize(
    ("phase", "labeled"),
    [("Accepted", True), ("Prepared", True), ("InProgress", True), ("Accepted", False), ("Prepared", False)],
)
@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in BY_VELERO), ("DataUpload", BLOCK)])
async def test_a_transfer_whose_mover_of_velero_runs_here_completes(
    kind: str, phase: str, labeled: bool, changes: JsonDict
) -> None:
    """Also without the leader: no label names this node."""
    transfer = adopted(kind, phase)
    transfer["spec"] |= changes
    if not labeled:
        transfer["metadata"]["labels"] = {}
        transfer["status"] |= {"acceptedByNode": "node-of-velero"} if kind == "DataUpload" else {}
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        put_pod_of_velero(world, transfer)
        async with world.agent():
            await world.until(lambda: world.phase(kind) == "Completed" and world.done(kind), seconds=30)
            # The snapshot controller deletes the content.
            await asyncio.sleep(1)
    assert world.left() == LEFT[kind]


async def test_the_pod_of_another_data_mover_is_no_reason_to_take_a_transfer_over() -> None:
    transfer = adopted("DataUpload", "Accepted")
    transfer["metadata"]["labels"] = {}
    transfer["spec"]["datamover"] = "another"
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        put_pod_of_velero(world, transfer)
        before = world.transfer()
        async with world.agent(node=NODE) as agent:
            await world.until(lambda: agent._cache.not_synced() == [])
            # Virtual time: more than the agent needs for every step.
            await asyncio.sleep(60)
    assert world.transfer() == before


@pytest.mark.parametrize("phase", ["Prepared", "InProgress", "Canceling"])
async def test_a_transfer_that_veleros_agent_has_taken_over_is_left_to_it(phase: str) -> None:
    """The mover pod that this agent created runs on a node of Velero's agent, which deletes it before it is final."""
    transfer = adopted("DataUpload", phase)
    transfer["status"] |= {"node": "node-b"}
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        world.kube.put(mover_pod(transfer, node="node-b", phase="Running"))
        async with world.agent():
            await world.until(lambda: world.transfer()["metadata"]["labels"][NODE_LABEL] == "node-b", seconds=5)
            before = world.transfer()
            await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
            await asyncio.sleep(60)
    assert world.transfer() == before
