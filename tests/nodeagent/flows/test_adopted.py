"""Transfers that an agent of Velero has started: their mover pods have none of our labels."""

import asyncio

import pytest

from core.models.base import JsonDict
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, data_upload, mover_pod, pod_volume_backup, pod_volume_restore

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
    pod["metadata"]["labels"] = {"velero.io/pod-volume-backup": transfer["metadata"]["name"]}
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


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_mover_of_velero_is_no_reason_to_take_a_transfer_over(kind: str) -> None:
    transfer = adopted(kind, "Accepted")
    transfer["metadata"]["labels"] = {}
    async with open_world(transfer, mover=Mover(seconds=3)) as world:
        put_pod_of_velero(world, transfer)
        before = world.transfer(kind)
        async with world.agent(node=NODE) as agent:
            await world.until(lambda: agent._cache.not_synced() == [])
            # Virtual time: more than the agent needs for every step.
            await asyncio.sleep(60)
    assert world.transfer(kind) == before
