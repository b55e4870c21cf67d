"""Loads that a peer's agent had begun: their mover pods bear none of our labels."""

import asyncio

import pytest

from core.models.base import JsonDict
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, data_upload, mover_pod, pod_volume_backup, pod_volume_restore

pytestmark = pytest.mark.looptime

LOADS = {"DataUpload": data_upload, "PodVolumeBackup": pod_volume_backup, "PodVolumeRestore": pod_volume_restore}
LEFT = {
    # Its source snapshot goes with whatever else was made for it.
    "DataUpload": {"persistentvolumeclaims": ["data"]},
    "PodVolumeBackup": {"pods": ["writer"]},
    "PodVolumeRestore": {"pods": ["writer"]},
}


def adopted(kind: str, phase: str) -> JsonDict:
    """Return a load as the dispatcher labels one that the peer brought to `phase`."""
    load = accepted(LOADS[kind]())
    load["status"] |= {"phase": phase}
    return load


def put_peers_pod(world: World, load: JsonDict) -> None:
    pod = mover_pod(load, phase="Running")
    pod["metadata"]["labels"] = {"velero.io/pod-volume-backup": load["metadata"]["name"]}
    pod["spec"]["volumes"] = [{"name": load["metadata"]["uid"], "hostPath": {"path": "/volume"}}]
    world.kube.put(pod)


@pytest.mark.parametrize("phase", ["Accepted", "Prepared", "InProgress"])
@pytest.mark.parametrize("kind", LOADS)
async def test_a_load_with_a_peers_mover_goes_on_to_its_end(kind: str, phase: str) -> None:
    load = adopted(kind, phase)
    async with open_world(load, mover=Mover(seconds=3)) as world:
        put_peers_pod(world, load)
        async with world.agent():
            await world.until(lambda: world.done(kind), seconds=30)
            # The snapshot's controller takes its content away.
            await asyncio.sleep(1)
    assert world.phase(kind) == "Completed"
    assert world.left() == LEFT[kind]


@pytest.mark.parametrize("kind", LOADS)
async def test_a_peers_mover_is_no_reason_to_take_a_load_from_anybody(kind: str) -> None:
    load = adopted(kind, "Accepted")
    load["metadata"]["labels"] = {}
    async with open_world(load, mover=Mover(seconds=3)) as world:
        put_peers_pod(world, load)
        before = world.load(kind)
        async with world.agent(node=NODE) as agent:
            await world.until(lambda: agent.not_synced() == [])
            # Virtual time: whatever the agent would do, it has done by then.
            await asyncio.sleep(60)
    assert world.load(kind) == before
