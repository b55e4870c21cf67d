"""A transfer that fails before Prepared is marked for the leader if that may be a fault of its node."""

import json

import pytest

from core.kube.resources import VOLUME_SNAPSHOTS
from core.models.base import JsonDict
from core.models.names import MOVER_LOST_ANNOTATION, NOT_PREPARED_ANNOTATION
from nodeagent.transfers.mover_pod import MoverLoss
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import data_upload

pytestmark = pytest.mark.looptime


async def marks_of(transfer: JsonDict, mover: Mover, *, snapshot: bool = True, ready: bool = True) -> list[str]:
    """Return the marks that an agent writes until the transfer has failed and is cleaned up."""
    async with open_world(transfer, mover=mover) as world:
        world.cluster.tick_seconds = 20.0
        world.cluster.snapshots_become_ready = ready
        if not snapshot:
            await _delete_source_snapshot(world)
        async with world.agent():
            await world.until(world.done, seconds=2500, every=10)
    assert world.phase() == "Failed"
    assert NOT_PREPARED_ANNOTATION not in world.transfer()["metadata"].get("annotations", {})
    patches = [json.loads(one.body or b"{}") for one in world.kube.requests if one.method == "PATCH"]
    annotations = [(patch.get("metadata") or {}).get("annotations") or {} for patch in patches]
    return [mark for one in annotations if (mark := one.get(NOT_PREPARED_ANNOTATION))]


async def _delete_source_snapshot(world: World) -> None:
    (snapshot,) = (each["metadata"] for each in world.kube.objects(VOLUME_SNAPSHOTS))
    await world.cluster.client.delete(VOLUME_SNAPSHOTS, snapshot["namespace"], snapshot["name"])


async def test_a_mover_pod_that_does_not_start_may_be_the_nodes_fault() -> None:
    assert await marks_of(accepted(data_upload()), Mover(starts=False)) == ["PrepareTimeout"]


async def test_an_operation_that_times_out_may_be_the_nodes_fault() -> None:
    assert await marks_of(accepted(data_upload()), Mover(), ready=False) == ["OperationTimeout"]


async def test_mover_pods_that_are_lost_may_be_the_nodes_fault() -> None:
    transfer = accepted(data_upload())
    losses = MoverLoss(since=NOON, last=NOON, times=19)
    transfer["metadata"]["annotations"] = {MOVER_LOST_ANNOTATION: losses.to_json()}
    assert await marks_of(transfer, Mover(evicted=True)) == ["MoverLost"]


async def test_a_missing_snapshot_is_the_transfers_own_fault() -> None:
    assert await marks_of(accepted(data_upload()), Mover(), snapshot=False) == []


async def test_a_failed_data_path_is_not_the_nodes_fault() -> None:
    assert await marks_of(accepted(data_upload()), Mover(exit_code=11, message="disk")) == []
