"""Pods that wait for the data of a restore are deleted once it has arrived or will not, and no other pod is."""

import asyncio
from datetime import timedelta

import pytest

from client.collections.collection import WaitingPod, cancel_restore, delete_waiting_pods
from client.restores.create import plan_restore, start_restore
from client.restores.sources import RestoreError
from core.kube.resources import POD_VOLUME_RESTORES, PODS
from tests.client.support.restore_scene import DATA, RestoreScene, saved

pytestmark = pytest.mark.looptime


async def _started() -> tuple[RestoreScene, WaitingPod]:
    scene = RestoreScene()
    (planned,) = await plan_restore(scene.tools, scene.request(wait_image="agents:1"), [saved(DATA, "s1")])
    await start_restore(scene.tools, [planned])
    return scene, planned.pod


def _end(scene: RestoreScene, phase: str) -> None:
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    scene.kube.put(transfer | {"status": {"phase": phase}})


async def test_a_pod_whose_data_has_arrived_ends_before_it_is_deleted() -> None:
    scene, waiting = await _started()
    _end(scene, "Completed")
    deleting = asyncio.create_task(delete_waiting_pods(scene.tools, [waiting]), name="delete")
    await asyncio.sleep(5)
    (pod,) = scene.pods
    scene.kube.put(pod | {"status": {"phase": "Succeeded"}})
    await deleting
    assert (scene.pods, scene.notes) == ([], [])


async def test_a_pod_that_does_not_end_is_deleted_a_minute_after_its_data_arrived() -> None:
    scene, waiting = await _started()
    _end(scene, "Completed")
    await delete_waiting_pods(scene.tools, [waiting])
    assert scene.pods == []


async def test_a_pod_that_cannot_be_deleted_is_named_with_the_command() -> None:
    scene, waiting = await _started()
    _end(scene, "Failed")
    scene.kube.fail_next("DELETE", "/pods/", 403, message="is forbidden")
    await delete_waiting_pods(scene.tools, [waiting])
    assert f"kubectl -n app delete pod {waiting.name}" in scene.notes[-1]


async def test_a_pod_whose_transfer_moves_stays_with_a_note() -> None:
    scene, waiting = await _started()
    await delete_waiting_pods(scene.tools, [waiting], timedelta())
    assert [one["metadata"]["name"] for one in scene.pods] == [waiting.name]
    assert f"Pod app/{waiting.name} stays: its PodVolumeRestore has not ended" in scene.notes[-1]


async def test_a_cancel_waits_for_the_end_and_deletes_the_pod() -> None:
    scene, _ = await _started()
    canceling = asyncio.create_task(cancel_restore(scene.tools, "back"), name="cancel")
    await asyncio.sleep(5)
    assert len(scene.pods) == 1
    _end(scene, "Canceled")
    canceled, failures = await canceling
    assert ([one.claim for one in canceled], failures) == (["data"], [])
    assert scene.pods == []


async def test_a_cancel_of_a_restore_that_has_ended_deletes_the_pod() -> None:
    scene, _ = await _started()
    _end(scene, "Failed")
    assert await cancel_restore(scene.tools, "back") == ([], [])
    assert scene.pods == []


async def test_a_pod_that_is_not_of_a_restore_is_not_deleted() -> None:
    scene, waiting = await _started()
    _end(scene, "Canceled")
    (pod,) = scene.pods
    scene.kube.put(pod | {"metadata": pod["metadata"] | {"annotations": {}}})
    await cancel_restore(scene.tools, "back")
    assert [one["metadata"]["name"] for one in scene.pods] == [waiting.name]


async def test_a_transfer_that_cannot_be_created_leaves_no_pod() -> None:
    scene = RestoreScene()
    planned = await plan_restore(scene.tools, scene.request(wait_image="agents:1"), [saved(DATA, "s1")])
    scene.kube.fail_next("POST", "/podvolumerestores", 403, message="is forbidden")
    with pytest.raises(
        RestoreError, match=r"but its PVC exists: .* delete it first \(kubectl -n app delete pvc data\)"
    ):
        await start_restore(scene.tools, planned)
    assert [one for one in scene.kube.objects(PODS) if one["metadata"]["namespace"] == "app"] == []
