"""What is deleted of an interrupted backup before its next attempt."""

import json

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.models.base import parse_time
from core.models.phases import Interruption, InterruptionCause
from exposer.causes import CauseFinder
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.model import Pending
from tests.exposer.support.scenes import BackupScene
from tests.exposer.support.world import no_guard
from tests.exposer.test_csi_snapshot import assert_exposed, expose
from tests.nodeagent.support.hand_clock import HandClock

_AT = parse_time("2026-11-21T12:00:00Z")


@pytest.mark.parametrize(
    ("cause", "terminated", "forced", "same"),
    [
        pytest.param(InterruptionCause.KILLED, True, False, True, id="only the mover ended"),
        pytest.param(InterruptionCause.EVICTED, True, False, False, id="it was evicted"),
        pytest.param(InterruptionCause.NODE_LOST, False, True, False, id="its node is lost"),
    ],
)
async def test_a_backup_is_withdrawn_and_exposed_again(
    cause: InterruptionCause, terminated: bool, forced: bool, same: bool
) -> None:
    scene = BackupScene()
    await expose(scene)
    owner = scene.request.owner
    claim = await scene.world.client.get(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
    exposer = scene.exposer()

    interruption = Interruption(at=_AT, cause=cause, terminated=terminated)
    await scene.world.until_none(lambda: exposer.withdraw(scene.request, interruption))

    assert await scene.world.client.read(PODS, owner.namespace, owner.name) is None
    deletions = [one for one in scene.world.kube.requests if one.method == "DELETE" and "/pods/" in one.path]
    grace = [json.loads(one.body or b"").get("gracePeriodSeconds") for one in deletions]
    assert grace == [0 if forced else None]
    left = await scene.world.client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
    assert (left is not None and left["metadata"]["uid"] == claim["metadata"]["uid"]) is same
    await expose(scene)
    await scene.world.settle()
    assert_exposed(scene)


async def test_a_pod_that_its_kubelet_does_not_end_holds_no_backup() -> None:
    scene, clock = BackupScene(), HandClock()
    client, owner = scene.world.client, scene.request.owner
    exposer = CSISnapshotExposer(client, CauseFinder(client, clock))
    await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))
    (pod,) = scene.world.kube.objects(PODS)
    await client.delete(PODS, owner.namespace, owner.name)
    for clock.seconds in (0.0, 119.0, 120.0):
        assert isinstance(await exposer.ensure(scene.request, no_guard), Pending)
    deletions = [one for one in scene.world.kube.requests if one.method == "DELETE" and "/pods/" in one.path]
    assert [json.loads(one.body or b"").get("gracePeriodSeconds") for one in deletions] == [None, 0]
    await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))
    assert pod["metadata"]["uid"] not in {one["metadata"]["uid"] for one in scene.world.kube.objects(PODS)}


async def test_the_snapshot_is_deleted_after_the_volumes_of_all_attempts() -> None:
    """A volume can be deleted only once it is detached from the lost node."""
    scene = BackupScene()
    await expose(scene)
    scene.world.reclaims = False
    lost = Interruption(at=_AT, cause=InterruptionCause.NODE_LOST, terminated=False)
    await scene.world.until_none(lambda: scene.exposer().withdraw(scene.request, lost))
    await expose(scene)
    await scene.world.settle()
    (first, second) = [one["metadata"]["name"] for one in scene.world.kube.objects(PERSISTENT_VOLUMES)]

    for _ in range(3):
        pending = await scene.exposer().clean_up(scene.request)
        await scene.world.settle()

    assert pending is not None
    assert pending.message == f"PersistentVolume {first} of the snapshot is being deleted"
    assert scene.world.violations == []
    assert second in scene.world.disks
    scene.world.reclaims = True
    await scene.world.until_none(lambda: scene.exposer().clean_up(scene.request))
    assert scene.world.disks == set()
    assert scene.world.violations == []
