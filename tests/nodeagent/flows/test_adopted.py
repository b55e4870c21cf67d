"""Transfers that an agent of Velero has started: their mover pods have none of our labels."""

import asyncio

import pytest

from core.kube.resources import PODS
from core.models.names import NODE_LABEL
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import (
    MOVER_LABELS,
    NAMESPACE,
    NODE,
    data_upload,
    mover_pod,
    pod_volume_backup,
    pod_volume_restore,
)
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

TRANSFERS = {"DataUpload": data_upload, "PodVolumeBackup": pod_volume_backup, "PodVolumeRestore": pod_volume_restore}
LEFT = {
    # Its source snapshot is deleted with the expose objects.
    "DataUpload": {"persistentvolumeclaims": ["data"]},
    "PodVolumeBackup": {"pods": ["writer"]},
    "PodVolumeRestore": {"pods": ["writer"]},
}


def adopted(kind: str, phase: str) -> JsonDict:
    """Return a transfer that Velero moved to `phase`, as the dispatcher labels it."""
    transfer = accepted(TRANSFERS[kind]())
    transfer["status"] |= {"phase": phase}
    return transfer


def put_pod_of_velero(world: World, transfer: JsonDict) -> None:
    pod = mover_pod(transfer, phase="Running")
    pod["metadata"]["labels"] = {MOVER_LABELS[transfer["kind"]]: transfer["metadata"]["name"]}
    pod["spec"]["volumes"] = [{"name": transfer["metadata"]["uid"], "hostPath": {"path": "/volume"}}]
    world.kube.put(pod)


@pytest.mark.parametrize("phase", ["Accepted", "Prepared", "InProgress"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_transfer_with_a_mover_of_velero_completes(kind: str, phase: str) -> None:
    transfer = adopted(kind, phase)
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        put_pod_of_velero(world, transfer)
        async with world.agent():
            await world.until(lambda: world.done(kind), seconds=30)
            # The snapshot controller deletes the content.
            await asyncio.sleep(1)
    assert world.phase(kind) == "Completed"
    assert world.left() == LEFT[kind]


@pytest.mark.parametrize("phase", ["Accepted", "Prepared"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_transfer_whose_mover_of_velero_runs_here_is_carried_on(kind: str, phase: str) -> None:
    """Without the leader: no label names this node."""
    transfer = adopted(kind, phase)
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


async def test_a_block_mover_that_veleros_agent_created_is_started() -> None:
    transfer = adopted("DataUpload", "Accepted")
    transfer["spec"]["datamover"] = "velero-block"
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        put_pod_of_velero(world, transfer)
        async with world.agent():
            await world.until(world.done, seconds=30)
    assert world.phase() == "Completed"


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
