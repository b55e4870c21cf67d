"""Restores by block: a device is written, and its volume gets the mode of the target."""

from dataclasses import replace

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUMES
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.manifests import changed_name
from tests.exposer.support.cuts import CUTS, Cut, cut_short
from tests.exposer.support.restore_steps import (
    BYSTANDERS,
    assert_clean,
    assert_handed_over,
    claim,
    clean_up,
    drop_volume,
    expose,
    rebind,
    volume,
)
from tests.exposer.support.scenes import RestoreScene


@pytest.mark.parametrize(
    ("named", "found", "fs_type"),
    [("xfs", "ext4", "xfs"), ("", "ext4", "ext4"), ("", "", None)],
    ids=["by the server", "by the mover", "not known"],
)
async def test_a_volume_with_a_file_system_gets_what_was_restored_as_a_device(
    named: str, found: str, fs_type: str | None
) -> None:
    scene = RestoreScene(by_block=True)
    scene.request = replace(scene.request, fs_type=named)
    exposed = await expose(scene)
    assert claim(scene, "velero", "r2-9nft8")["spec"]["volumeMode"] == "Block"
    assert "--volume-mode=Block" in exposed.pod["spec"]["containers"][0]["args"]
    kept = replace(await scene.exposer().read_volume(scene.request), fs_type=found)
    before = volume(scene, kept.pv_name)

    await rebind(scene, kept)
    await clean_up(scene)

    assert_handed_over(scene, kept)
    csi = before["spec"]["csi"] | {"volumeAttributes": {"kind": "fast"}}
    after = volume(scene, changed_name(kept.pv_name))
    assert after["spec"]["csi"] == csi | ({"fsType": fs_type} if fs_type else {})
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


async def test_a_target_for_a_device_gets_the_volume_itself() -> None:
    scene = RestoreScene(mode="Block", by_block=True)
    await expose(scene)
    await scene.exposer().confirm(scene.request)
    kept = await scene.exposer().read_volume(scene.request)

    await rebind(scene, kept)
    await clean_up(scene)

    assert_handed_over(scene, kept)
    assert claim(scene, "app3", "data")["spec"]["volumeName"] == kept.pv_name


@CUTS
async def test_what_an_interrupted_replacement_leaves_is_deleted_with_its_transfer(applied: bool) -> None:
    """Unless the target has the volume already: two PersistentVolumes of one storage are never for different uses."""
    at, cut, handed_over = 0, True, 0
    while cut:
        at, scene = at + 1, RestoreScene(by_block=True)
        await expose(scene)
        kept = await scene.exposer().read_volume(scene.request)
        cut = await cut_short(rebind(scene, kept, Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()

        await delete_leaked(scene)

        if claim(scene, "app3", "data")["spec"].get("volumeName"):
            handed_over += 1
            assert_handed_over(scene, kept)
        else:
            assert_clean(scene)
    assert 1 < handed_over < at - 10


async def delete_leaked(scene: RestoreScene) -> None:
    """Do what garbage collection does once the transfer was deleted by force."""
    uid = scene.request.owner.uid
    for _ in range(10):
        leaked = (await list_leaked_objects(scene.world.client, "velero")).get(uid)
        if leaked is None or not await delete_leaked_objects(scene.world.client, leaked):
            return
        await scene.world.settle()
    raise AssertionError("never done")


async def test_a_volume_that_existed_before_is_not_replaced() -> None:
    """Kubernetes may bind the restore PVC to it; deleting it is for whoever made it."""
    scene = RestoreScene(by_block=True)
    scene.world.put_available("pv")
    await expose(scene)

    with pytest.raises(ExposeError, match="was bound to the existing PersistentVolume pv, whose volumeMode cannot"):
        await scene.exposer().confirm(scene.request)
    kept = await scene.exposer().read_volume(scene.request)
    await drop_volume(scene, kept)
    await clean_up(scene)

    assert volume(scene, "pv")["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


async def test_a_volume_of_another_owner_with_the_name_of_the_replacement_is_kept() -> None:
    scene = RestoreScene(by_block=True)
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    scene.world.put(PERSISTENT_VOLUMES, changed_name(kept.pv_name), spec={"persistentVolumeReclaimPolicy": "Retain"})

    with pytest.raises(ExposeError, match="already exists and does not belong to DataDownload r2-9nft8"):
        await rebind(scene, kept)
    await drop_volume(scene, kept)
    await clean_up(scene)

    left = {f"PersistentVolume /{changed_name(kept.pv_name)}", "PersistentVolumeClaim app3/data"}
    assert scene.world.names() == BYSTANDERS | left
    assert scene.world.disks == set()
