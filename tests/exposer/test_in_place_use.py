"""Which existing volumes are not restored into: those in use, and those of others."""

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.models.base import JsonDict
from core.models.names import IN_PLACE_LABEL
from exposer.model import Pending
from tests.exposer.support.in_place import (
    HANDLE,
    LEFT,
    OLD,
    TARGET_UID,
    assert_returned,
    attach,
    give_back,
    in_place,
    restore,
)
from tests.exposer.support.restore_steps import expose, volume
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.world import no_guard


def put_twin(scene: RestoreScene, handle: str = HANDLE) -> None:
    """Store another PersistentVolume of the same storage, whose PVC is app9/twin."""
    csi = {"driver": "hostpath.csi.k8s.io", "volumeHandle": handle}
    spec = {"csi": csi, "claimRef": {"namespace": "app9", "name": "twin", "uid": "uid-twin"}}
    scene.world.put(PERSISTENT_VOLUMES, "pv-twin", spec=spec | {"persistentVolumeReclaimPolicy": "Retain"})


def put_user(scene: RestoreScene, *, phase: str = "Running", owned: bool = True) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "twin"}}]}
    owners = [owner] if owned else []
    scene.world.put(PODS, "db-0", namespace="app9", spec=spec, status={"phase": phase}, ownerReferences=owners)


SAME = "PersistentVolume pv-twin of the same storage"


@pytest.mark.cause("volume-in-use")
@pytest.mark.parametrize(
    ("phase", "owned", "attached", "message"),
    [
        pytest.param("Running", True, False, f"pod app9/db-0 of StatefulSet db has {SAME}", id="pod with an owner"),
        pytest.param("Pending", False, True, f"pod app9/db-0 has {SAME}", id="pod that starts"),
        pytest.param("Succeeded", True, True, f"{SAME} is on node node-b", id="attached for no pod"),
        pytest.param("Failed", True, False, "", id="pod that has ended"),
    ],
)
async def test_a_volume_whose_storage_is_in_use_is_not_taken(
    phase: str, owned: bool, attached: bool, message: str
) -> None:
    scene = in_place()
    put_twin(scene)
    put_user(scene, phase=phase, owned=owned)
    if attached:
        attach(scene, "pv-twin", "node-b")
    before = volume(scene, OLD)

    found = await scene.exposer().check(scene.request, scene.world.client)

    assert found == (
        Pending("VolumeInUse", f"PersistentVolume {OLD} is in use: {message}", blocked=True) if message else None
    )
    assert volume(scene, OLD) == before


async def test_a_share_of_nfs_is_used_through_every_volume_of_it() -> None:
    share = {"server": "nfs.example", "path": "/export/data"}
    scene = in_place(csi=None, nfs=share)
    spec = {"nfs": share, "claimRef": {"namespace": "app9", "name": "twin"}, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv-twin", spec=spec)
    put_user(scene)

    found = await scene.exposer().check(scene.request, scene.world.client)

    assert found is not None
    assert found.message == f"PersistentVolume {OLD} is in use: pod app9/db-0 of StatefulSet db has {SAME}"


async def test_a_volume_whose_storage_gets_into_use_is_not_written_to() -> None:
    scene = in_place()
    await expose(scene)
    await scene.exposer().confirm(scene.request)
    put_twin(scene)
    put_user(scene)

    with pytest.raises(
        ExposeError, match=f"^PersistentVolume {OLD} is in use: pod app9/db-0 of StatefulSet db has {SAME}$"
    ):
        await scene.exposer().confirm(scene.request)


async def test_a_volume_of_other_storage_does_not_matter() -> None:
    scene = in_place()
    put_twin(scene, handle="handle-other")
    put_user(scene)

    assert await scene.exposer().check(scene.request, scene.world.client) is None


async def test_an_attached_volume_is_taken_once_it_is_detached() -> None:
    scene = in_place()
    attach(scene, OLD, "node-a")

    found = await scene.exposer().ensure(scene.request, no_guard)
    assert found == Pending("Detaching", f"PersistentVolume {OLD} is being detached from node node-a")
    assert scene.world.names() == LEFT
    await scene.world.client.delete(VOLUME_ATTACHMENTS, "", f"{OLD}-node-a")

    await restore(scene)
    assert_returned(scene)


async def test_two_restores_never_share_a_volume() -> None:
    scene, other = in_place(), in_place()
    await expose(scene)
    mark = {"metadata": {"labels": {IN_PLACE_LABEL: "uid-of-another"}}}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", OLD, mark)

    found = await other.exposer(scene.world.kube).check(other.request, scene.world.client)

    assert found == Pending(
        "VolumeInUse", f"PersistentVolume {OLD} is being restored by another DataDownload", blocked=True
    )
    before = volume(scene, OLD)
    await give_back(scene)
    assert volume(scene, OLD) == before


@pytest.mark.cause("existing-volume-unusable")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}},
            f"PersistentVolume {OLD} to restore into belongs to PVC app3/bystander, not to PVC app3/data",
            id="of another PVC",
        ),
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "data", "uid": TARGET_UID}},
            f"PersistentVolume {OLD} to restore into is bound to PVC app3/data: it must be released first",
            id="still bound",
        ),
        pytest.param(
            {"volumeMode": "Block"},
            f"PersistentVolume {OLD} to restore into has volumeMode Block, and PVC app3/data has Filesystem",
            id="of another mode",
        ),
    ],
)
async def test_only_the_released_volume_of_the_target_is_taken(spec: JsonDict, message: str) -> None:
    scene = in_place(**spec)
    before = volume(scene, OLD)

    with pytest.raises(ExposeError) as caught:
        await scene.exposer().check(scene.request, scene.world.client)

    assert str(caught.value) == message
    assert volume(scene, OLD) == before
