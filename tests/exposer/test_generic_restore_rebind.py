"""Rebind of a restored volume, interrupted and repeated."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.model import KeptVolume, Pending
from tests.exposer.support.cuts import CUTS, Cut, cut_short, interruptions
from tests.exposer.support.restore_steps import (
    BYSTANDERS,
    assert_clean,
    assert_handed_over,
    bind_target_elsewhere,
    claim,
    clean_up,
    drop_volume,
    expose,
    rebind,
    remove_target,
    replace_target,
    volume,
)
from tests.exposer.support.scenes import RestoreScene


class Transfer:
    """One restore with its requests; `kept` is the volume as recorded in the outcome."""

    def __init__(self, scene: RestoreScene) -> None:
        self.scene, self.world = scene, scene.world
        self.kept: KeptVolume | None = None

    async def carry(self, transport: Cut | None = None) -> None:
        """Run the restore to its end from any state."""
        scene = self.scene
        if self.kept is None:
            await expose(scene, transport)
            self.kept = await scene.exposer(transport).read_volume(scene.request)
        await rebind(scene, self.kept, transport)
        await clean_up(scene, transport)


BY_BLOCK = pytest.mark.parametrize("by_block", [False, True], ids=["files", "by block"])
"""A device is restored, and its volume replaced by one with a file system."""


@CUTS
@BY_BLOCK
async def test_a_restore_interrupted_at_any_request_continues(applied: bool, by_block: bool) -> None:
    def build() -> Transfer:
        return Transfer(RestoreScene(by_block=by_block))

    async for restore in interruptions(build, Transfer.carry, applied=applied, least=20):
        await restore.carry()
        assert restore.kept is not None
        assert_handed_over(restore.scene, restore.kept)


@CUTS
@BY_BLOCK
async def test_a_rebind_interrupted_at_any_request_can_be_dropped(applied: bool, by_block: bool) -> None:
    """Afterward the target has the volume, or the volume is deleted."""
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene(by_block=by_block)
        await expose(scene)
        kept = await scene.exposer().read_volume(scene.request)
        cut = await cut_short(rebind(scene, kept, Cut(scene.world.kube, at, applied=applied)))

        await drop_volume(scene, kept)
        await clean_up(scene)

        if claim(scene, "app3", "data")["spec"].get("volumeName"):
            assert_handed_over(scene, kept)
        else:
            assert_clean(scene)
    assert at > 10


@CUTS
async def test_a_drop_interrupted_at_any_request_continues(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene(reclaim="Retain")
        await expose(scene)
        kept = await scene.exposer().read_volume(scene.request)
        cut = await cut_short(drop_volume(scene, kept, Cut(scene.world.kube, at, applied=applied)))

        await drop_volume(scene, kept)
        await clean_up(scene)

        assert_clean(scene)
    assert at > 5


@pytest.mark.parametrize("nodes", [(), ("node-a", "node-b")], ids=["all are listed", "its nodes are known"])
async def test_the_pvc_is_kept_until_the_volume_is_on_no_node(nodes: tuple[str, ...]) -> None:
    """A driver may refuse to attach it to the consumer's node before that. There may be thousands of attachments."""
    scene = RestoreScene()
    scene.request = replace(scene.request, nodes=nodes)
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    owner, names = scene.request.owner, list[str]()
    for volume_name, node in ((kept.pv_name, "node-b"), ("other", "node-c"), (kept.pv_name, "node-a")):
        spec = {"attacher": "d", "nodeName": node, "source": {"persistentVolumeName": volume_name}}
        names.append(f"csi-{sha256(f'{volume_name}hostpath.csi.k8s.io{node}'.encode()).hexdigest()}")
        scene.world.put(VOLUME_ATTACHMENTS, names[-1], spec=spec)
    await scene.exposer().rebind(scene.request, kept)
    await scene.world.settle()

    found = await scene.exposer().rebind(scene.request, kept)

    assert found == Pending("Detaching", f"PersistentVolume {kept.pv_name} is being detached from node node-a, node-b")
    assert await scene.world.client.read(PODS, owner.namespace, owner.name) is None
    restored = await scene.world.client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
    assert restored is not None
    assert "deletionTimestamp" not in restored["metadata"]
    for name in names:
        await scene.world.client.delete(VOLUME_ATTACHMENTS, "", name)
    await rebind(scene, kept)
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
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    for _ in range(steps):
        await scene.world.settle()
        await scene.exposer().rebind(scene.request, kept)
    await lose(scene)
    await scene.world.settle()

    with pytest.raises(ExposeError, match=message):
        await scene.exposer().rebind(scene.request, kept)
    await drop_volume(scene, kept)
    await clean_up(scene)

    assert scene.world.names() - {"PersistentVolumeClaim app3/data"} == BYSTANDERS
    assert scene.world.disks == set()


async def test_a_deleted_volume_fails_the_rebind() -> None:
    scene = RestoreScene()
    await expose(scene)

    with pytest.raises(ExposeError, match="PersistentVolume pvc-none with the restored data was deleted"):
        await scene.exposer().rebind(scene.request, KeptVolume("pvc-none", "Delete"))
    assert await scene.exposer().drop_volume(scene.request, KeptVolume("pvc-none", "Delete")) is None


async def test_a_volume_of_another_pvc_is_neither_bound_nor_dropped() -> None:
    scene = RestoreScene()
    reference = {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}
    spec = {"claimRef": reference, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv", spec=spec)
    kept = KeptVolume("pv", "Delete")

    with pytest.raises(ExposeError, match="belongs to another PersistentVolumeClaim"):
        await scene.exposer().rebind(scene.request, kept)
    assert await scene.exposer().drop_volume(scene.request, kept) is None
    assert volume(scene, "pv")["spec"] == spec


async def free_volume(scene: RestoreScene, name: str, *, label: bool) -> None:
    """Remove the reference of a volume that is being rebound, as an administrator does in order to keep its data."""
    patch: JsonDict = {"spec": {"claimRef": None}}
    if not label:
        patch["metadata"] = {"labels": {OWNER_UID_LABEL: None}}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", name, patch)


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
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    for _ in range(2):
        await scene.exposer().rebind(scene.request, kept)
        await scene.world.settle()
    before = volume(scene, kept.pv_name)
    del before["spec"]["claimRef"]

    with pytest.raises(ExposeError, match=f"^PersistentVolume {kept.pv_name} with the restored data was freed$"):
        await scene.exposer(Freeing(scene, kept.pv_name, at)).rebind(scene.request, kept)
    await drop_volume(scene, kept)
    await clean_up(scene)

    assert volume(scene, kept.pv_name)["spec"] == before["spec"]
    assert scene.world.disks == {kept.pv_name}


async def test_a_volume_without_a_reference_is_ours_while_it_has_our_label() -> None:
    scene = RestoreScene()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await scene.exposer().rebind(scene.request, kept)
    await free_volume(scene, kept.pv_name, label=True)

    await rebind(scene, kept)
    await clean_up(scene)

    assert_handed_over(scene, kept)


async def test_a_label_of_the_volume_is_not_replaced_by_the_targets_selector() -> None:
    scene = RestoreScene()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    selected = claim(scene, "app3", "data")["spec"]["selector"]["matchLabels"]
    own = dict.fromkeys(selected, "the volume's own")
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", kept.pv_name, {"metadata": {"labels": own}})

    await rebind(scene, kept)

    assert volume(scene, kept.pv_name)["metadata"]["labels"] == own


async def test_a_missing_volume_cannot_be_read() -> None:
    scene = RestoreScene()

    with pytest.raises(
        ExposeError, match="PersistentVolumeClaim velero/r2-9nft8 with the restored data no longer exists"
    ):
        await scene.exposer().read_volume(scene.request)
