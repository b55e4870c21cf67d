"""Rebind of a restored volume, interrupted and repeated."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.manifests import changed_name
from exposer.model import KeptVolume, Pending
from tests.exposer.support.cuts import CUTS, Cut, interruptions
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import (
    BYSTANDERS,
    TARGET,
    Restore,
    assert_clean,
    assert_ended,
    assert_handed_over,
    begun,
    bind_target_elsewhere,
    claim,
    clean_up,
    collect,
    expose,
    remove_target,
    replace_target,
    volume,
)

BY_BLOCK = pytest.mark.parametrize("by_block", [False, True], ids=["files", "by block"])
"""By block, a device is restored, and its volume replaced by one with a file system."""


def restore(*, by_block: bool = False, reclaim: str = "Delete") -> Restore:
    return Restore(RestoreScene(by_block=by_block, reclaim=reclaim))


@CUTS
@BY_BLOCK
async def test_a_restore_interrupted_at_any_request_continues(applied: bool, by_block: bool) -> None:
    async for one in interruptions(partial(restore, by_block=by_block), Restore.carry, applied=applied, least=20):
        await one.carry()
        assert_handed_over(one.scene, one.kept)


@CUTS
@pytest.mark.parametrize(
    ("by_block", "collected"),
    [(False, False), (True, False), (True, True)],
    ids=["files", "by block", "by block, and its transfer is deleted"],
)
async def test_after_an_interrupted_rebind_the_target_has_the_volume_or_it_is_deleted(
    applied: bool, by_block: bool, collected: bool
) -> None:
    """Two PersistentVolumes of one storage are never for different uses, also while the first one is being deleted."""
    ended, cut = [], partial(interruptions, applied=applied, least=10, settle=collected)
    async for one in cut(partial(restore, by_block=by_block), Restore.rebind, prepare=Restore.begin):
        if collected:
            await collect(one.scene)
        else:
            await one.drop()
            await clean_up(one.scene)
        ended.append(assert_ended(one.scene, one.kept))
    assert 1 < sum(ended) < len(ended) - 10 * collected


@CUTS
async def test_a_drop_interrupted_at_any_request_continues(applied: bool) -> None:
    build = partial(restore, reclaim="Retain")
    async for one in interruptions(build, Restore.drop, applied=applied, least=5, prepare=Restore.begin):
        await one.drop()
        await clean_up(one.scene)
        assert_clean(one.scene)


@pytest.mark.parametrize("nodes", [(), ("node-a", "node-b")], ids=["all are listed", "its nodes are known"])
async def test_the_pvc_is_kept_until_the_volume_is_on_no_node(nodes: tuple[str, ...]) -> None:
    """A driver may refuse to attach it to the consumer's node before that. There may be thousands of attachments."""
    scene = RestoreScene()
    scene.request = replace(scene.request, nodes=nodes)
    one = await begun(scene)
    kept, names = one.kept, list[str]()
    for volume_name, node in ((kept.pv_name, "node-b"), ("other", "node-c"), (kept.pv_name, "node-a")):
        spec = {"attacher": "d", "nodeName": node, "source": {"persistentVolumeName": volume_name}}
        names.append(f"csi-{sha256(f'{volume_name}hostpath.csi.k8s.io{node}'.encode()).hexdigest()}")
        scene.world.put(VOLUME_ATTACHMENTS, names[-1], spec=spec)
    await scene.exposer().rebind(scene.request, kept)
    await scene.world.settle()
    found = await scene.exposer().rebind(scene.request, kept)
    assert found == Pending("Detaching", f"PersistentVolume {kept.pv_name} is being detached from node node-a, node-b")
    assert scene.world.kube.objects(PODS) == []
    assert "deletionTimestamp" not in claim(scene, "velero", "r2-9nft8")["metadata"]
    for name in names:
        await scene.world.delete(VOLUME_ATTACHMENTS, name)
    await one.rebind()
    assert claim(scene, "app3", "data")["spec"]["volumeName"] == kept.pv_name
    listed = [one.query for one in scene.world.kube.requests if one.path.endswith(VOLUME_ATTACHMENTS.plural)]
    assert all(("fieldSelector" in query) is bool(nodes) for query in listed)


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (remove_target, "target PVC app3/data was deleted"),
        (bind_target_elsewhere, "was bound to PersistentVolume pvc-other meanwhile"),
        (replace_target, "target PVC app3/data was made by restore r3 meanwhile"),
    ],
    ids=["deleted", "bound elsewhere", "another restore's"],
)
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_target_that_is_lost_fails_the_rebind_and_the_volume_is_dropped(
    lose: Callable[[RestoreScene], Awaitable[None]], message: str, steps: int
) -> None:
    """The last step points the volume at the target."""
    scene = RestoreScene()
    one = await begun(scene)
    for _ in range(steps):
        await scene.world.settle()
        await scene.exposer().rebind(scene.request, one.kept)
    await lose(scene)
    await scene.world.settle()
    with pytest.raises(ExposeError, match=message):
        await one.rebind()
    await one.drop()
    await clean_up(scene)
    assert scene.world.names() - {TARGET} == BYSTANDERS
    assert scene.world.disks == set()


async def test_a_deleted_volume_fails_the_rebind() -> None:
    one = Restore(RestoreScene())
    await expose(one.scene)
    one.kept = KeptVolume("pvc-none", "Delete")
    with pytest.raises(ExposeError, match="PersistentVolume pvc-none with the restored data was deleted"):
        await one.rebind()
    assert await one.scene.exposer().drop_volume(one.scene.request, one.kept) is None


async def test_a_volume_of_another_pvc_is_neither_bound_nor_dropped() -> None:
    scene, kept = RestoreScene(), KeptVolume("pv", "Delete")
    reference = {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}
    spec = {"claimRef": reference, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv", spec=spec)
    with pytest.raises(ExposeError, match="belongs to another PersistentVolumeClaim"):
        await scene.exposer().rebind(scene.request, kept)
    assert await scene.exposer().drop_volume(scene.request, kept) is None
    assert volume(scene, "pv")["spec"] == spec


async def free_volume(scene: RestoreScene, name: str, *, label: bool) -> None:
    """Remove the reference of a volume that is being rebound, as an administrator does in order to keep its data."""
    marks: JsonDict = {} if label else {"labels": {OWNER_UID_LABEL: None}}
    await scene.world.patch(PERSISTENT_VOLUMES, name, spec={"claimRef": None}, **marks)


class Freeing(Cut):
    """A transport over which the volume `name` is freed before the `at`-th request."""

    def __init__(self, scene: RestoreScene, name: str, at: int) -> None:
        super().__init__(scene.world.kube)
        self._free = partial(free_volume, scene, name, label=False)
        self._before = at

    async def request(self, request: Request) -> Response:
        if len(self.calls) + 1 == self._before:
            await self._free()
        return await super().request(request)


@pytest.mark.parametrize("at", range(1, 7))
async def test_a_volume_that_was_freed_is_neither_bound_nor_dropped(at: int) -> None:
    """Also before any request of the step that binds it, up to the last read."""
    scene = RestoreScene()
    one = await begun(scene)
    name = one.kept.pv_name
    for _ in range(2):
        await scene.exposer().rebind(scene.request, one.kept)
        await scene.world.settle()
    before = volume(scene, name)
    del before["spec"]["claimRef"]
    with pytest.raises(ExposeError, match=f"^PersistentVolume {name} with the restored data was freed$"):
        await scene.exposer(Freeing(scene, name, at)).rebind(scene.request, one.kept)
    await one.drop()
    await clean_up(scene)
    assert volume(scene, name)["spec"] == before["spec"]
    assert scene.world.disks == {name}


async def test_a_volume_without_a_reference_is_ours_while_it_has_our_label() -> None:
    scene = RestoreScene()
    one = await begun(scene)
    await scene.exposer().rebind(scene.request, one.kept)
    await free_volume(scene, one.kept.pv_name, label=True)
    await one.carry()
    assert_handed_over(scene, one.kept)


async def test_a_label_of_the_volume_is_not_replaced_by_the_targets_selector() -> None:
    scene = RestoreScene()
    one = await begun(scene)
    selected = claim(scene, "app3", "data")["spec"]["selector"]["matchLabels"]
    own = dict.fromkeys(selected, "the volume's own")
    await scene.world.patch(PERSISTENT_VOLUMES, one.kept.pv_name, labels=own)
    await one.rebind()
    assert volume(scene, one.kept.pv_name)["metadata"]["labels"] == own


async def test_a_missing_volume_cannot_be_read() -> None:
    scene = RestoreScene()
    message = "PersistentVolumeClaim velero/r2-9nft8 with the restored data no longer exists"
    with pytest.raises(ExposeError, match=message):
        await scene.exposer().read_volume(scene.request)


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
    one = await begun(scene)
    one.kept = replace(one.kept, fs_type=found)
    before = volume(scene, one.kept.pv_name)
    await one.carry()
    assert_handed_over(scene, one.kept)
    csi = before["spec"]["csi"] | {"volumeAttributes": {"kind": "fast"}}
    after = volume(scene, changed_name(one.kept.pv_name))
    assert after["spec"]["csi"] == csi | ({"fsType": fs_type} if fs_type else {})
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


async def test_a_target_for_a_device_gets_the_volume_itself() -> None:
    scene = RestoreScene(mode="Block", by_block=True)
    one = await begun(scene)
    await scene.exposer().confirm(scene.request)
    await one.carry()
    assert_handed_over(scene, one.kept)
    assert claim(scene, "app3", "data")["spec"]["volumeName"] == one.kept.pv_name


async def test_a_volume_that_existed_before_is_not_replaced() -> None:
    """Kubernetes may bind the restore PVC to it; only its owner deletes it."""
    scene = RestoreScene(by_block=True)
    scene.world.put_available("pv")
    one = await begun(scene)
    with pytest.raises(ExposeError, match="was bound to the existing PersistentVolume pv, whose volumeMode cannot"):
        await scene.exposer().confirm(scene.request)
    await one.drop()
    await clean_up(scene)
    assert volume(scene, "pv")["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


async def test_a_volume_of_another_owner_with_the_name_of_the_replacement_is_kept() -> None:
    scene = RestoreScene(by_block=True)
    one = await begun(scene)
    name = changed_name(one.kept.pv_name)
    scene.world.put(PERSISTENT_VOLUMES, name, spec={"persistentVolumeReclaimPolicy": "Retain"})
    with pytest.raises(ExposeError, match="already exists and does not belong to DataDownload r2-9nft8"):
        await one.rebind()
    await one.drop()
    await clean_up(scene)
    assert scene.world.names() == BYSTANDERS | {f"PersistentVolume /{name}", TARGET}
    assert scene.world.disks == set()
