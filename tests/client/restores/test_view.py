"""Restores as people see them: gathered from DataDownloads, awaited, and canceled."""

import asyncio

import pytest

from client.backups.moving import explain_end
from client.backups.progress import VolumeProgress
from client.backups.view import BackupPhase
from client.restores.create import plan_restore, start_restore
from client.restores.view import (
    Restore,
    cancel_restore,
    find_restores,
    wait_for_restore,
)
from core.kube.errors import NotFoundError
from core.kube.resources import DATA_DOWNLOADS
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved

pytestmark = pytest.mark.looptime


async def _started() -> RestoreScene:
    scene = RestoreScene()
    planned = await plan_restore(scene.tools, scene.request(), [saved(DATA, "s1"), saved(FILES, "s2")])
    await start_restore(scene.tools, planned)
    return scene


async def _read(scene: RestoreScene) -> Restore:
    (found,) = (await find_restores(scene.client, "velero", ("back",))).restores
    return found


async def test_a_restore_is_the_sum_of_its_transfers() -> None:
    scene = await _started()
    scene.move("data", "Completed", progress={"totalBytes": 7, "bytesDone": 7})
    scene.move("files", "InProgress", progress={"totalBytes": 3, "bytesDone": 1})
    found = await _read(scene)
    assert (found.phase, found.counted, found.bytes_done, found.total_bytes) == (BackupPhase.IN_PROGRESS, "1/2", 8, 10)
    assert [f"{one.namespace}/{one.claim}" for one in found.volumes] == ["app/data", "db/files"]


async def test_a_transfer_that_is_missing_is_counted() -> None:
    scene = await _started()
    for claim in ("data", "files"):
        scene.move(claim, "Completed")
    gone = next(one for one in scene.downloads if one["spec"]["targetVolume"]["pvc"] == "files")
    await scene.client.delete(DATA_DOWNLOADS, "velero", gone["metadata"]["name"])
    found = await _read(scene)
    assert (found.phase, found.counted, found.missing) == (BackupPhase.INCOMPLETE, "1/2", 1)
    assert explain_end(found) == "1 of 2 volumes have no transfer: it was deleted"


async def test_waiting_ends_with_the_last_transfer_and_shows_all_on_the_way() -> None:
    scene = await _started()
    shown: list[list[VolumeProgress]] = []
    waiting = asyncio.create_task(
        wait_for_restore(scene.client, scene.clock, ("velero", "back"), shown.append), name="wait"
    )
    await asyncio.sleep(1.5)
    # An outage of the API server on the way.
    scene.kube.fail_next("GET", "/datadownloads", "lost", times=10)
    scene.move("data", "Completed")
    scene.move("files", "Failed", message="the bucket is gone")
    found = await waiting
    assert found.phase is BackupPhase.PARTIALLY_FAILED
    assert explain_end(found) == "PVC db/files is Failed: the bucket is gone"
    assert [str(one.volume.phase) for one in shown[0]] == ["New", "New"]


async def test_a_cancel_requests_the_end_of_what_has_not_ended_and_writes_no_status() -> None:
    scene = await _started()
    scene.move("data", "Completed")
    canceled = await cancel_restore(scene.tools, "velero", "back")
    assert [one.claim for one in canceled] == ["files"]
    assert {one["spec"]["targetVolume"]["pvc"]: one["spec"].get("cancel", False) for one in scene.downloads} == {
        "data": False,
        "files": True,
    }
    assert (await _read(scene)).phase is BackupPhase.CANCELING


async def test_a_restore_of_before_the_definitions_of_velero_1_19_is_canceled() -> None:
    scene = await _started()
    scene.move("data", "Completed")
    scene.kube.fail_next("PATCH", "/datadownloads/", 422)
    old = next(one for one in scene.downloads if one["spec"]["targetVolume"]["pvc"] == "files")
    del old["spec"]["restoreType"]
    scene.kube.put(old)
    await cancel_restore(scene.tools, "velero", "back")
    assert {(one["spec"].get("cancel"), one["spec"]["restoreType"]) for one in scene.downloads} == {
        (None, ""),
        (True, ""),
    }


async def test_an_unknown_name_is_an_error_with_the_one_that_may_be_meant() -> None:
    scene = await _started()
    with pytest.raises(NotFoundError, match=r"there is no restore bakc in namespace velero \(did you mean back\?\)"):
        await find_restores(scene.client, "velero", ("bakc",))


async def test_transfers_of_others_are_no_restore_of_ours() -> None:
    scene = await _started()
    raw = scene.downloads[0]
    raw["metadata"] |= {"name": "velero-1", "labels": {"velero.io/restore-name": "r"}, "annotations": {}, "uid": "u9"}
    scene.kube.put(raw)
    assert [one.name for one in (await find_restores(scene.client, "velero")).restores] == ["back"]
