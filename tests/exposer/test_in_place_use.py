"""Which existing volumes are not restored into: those in use, and those of others."""

from dataclasses import replace
from typing import Any

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
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import check, ensure, expose, volume

CSI = {"csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": HANDLE}}
NFS = {"csi": None, "nfs": {"server": "nfs.example", "path": "/export/data"}}


def put_twin(scene: RestoreScene, *, phase: str = "Running", owned: bool = True, **storage: Any) -> None:
    """Store another PersistentVolume of the same storage, and a pod with its PVC app9/twin."""
    reference = {"namespace": "app9", "name": "twin", "uid": "uid-twin"}
    twin = (storage or CSI) | {"claimRef": reference, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv-twin", spec=twin)
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "twin"}}]}
    owners = [owner] if owned else []
    scene.world.put(PODS, "db-0", namespace="app9", spec=spec, status={"phase": phase}, ownerReferences=owners)


SAME = "PersistentVolume pv-twin of the same storage"
BY_OWNED = f"pod app9/db-0 of StatefulSet db has {SAME}"


@pytest.mark.cause("volume-in-use")
@pytest.mark.parametrize(
    ("own", "twin", "attached", "message"),
    [
        pytest.param({}, {}, False, BY_OWNED, id="pod with an owner"),
        pytest.param({}, {"phase": "Pending", "owned": False}, True, f"pod app9/db-0 has {SAME}", id="pod that starts"),
        pytest.param({}, {"phase": "Succeeded"}, True, f"{SAME} is on node node-b", id="attached for no pod"),
        pytest.param({}, {"phase": "Failed"}, False, "", id="pod that has ended"),
        pytest.param(NFS, NFS, False, BY_OWNED, id="a share of NFS"),
        pytest.param({}, {"csi": CSI["csi"] | {"volumeHandle": "other"}}, False, "", id="other storage"),
    ],
)
async def test_a_volume_whose_storage_is_in_use_is_not_taken(
    own: JsonDict, twin: JsonDict, attached: bool, message: str
) -> None:
    scene = in_place(**own)
    put_twin(scene, **twin)
    if attached:
        attach(scene, "pv-twin", "node-b")
    before, text = volume(scene, OLD), f"PersistentVolume {OLD} is in use: {message}"
    assert await check(scene) == (Pending("VolumeInUse", text, blocked=True) if message else None)
    assert volume(scene, OLD) == before


async def test_a_volume_whose_storage_gets_into_use_is_not_written_to() -> None:
    scene = in_place()
    await expose(scene)
    await scene.exposer().confirm(scene.request)
    put_twin(scene)
    with pytest.raises(ExposeError, match=f"^PersistentVolume {OLD} is in use: {BY_OWNED}$"):
        await scene.exposer().confirm(scene.request)


async def test_an_attached_volume_is_taken_once_it_is_detached() -> None:
    scene = in_place()
    attach(scene, OLD, "node-a")
    text = f"PersistentVolume {OLD} is being detached from node node-a"
    assert await ensure(scene) == Pending("Detaching", text)
    assert scene.world.names() == LEFT
    await scene.world.delete(VOLUME_ATTACHMENTS, f"{OLD}-node-a")
    await restore(scene)
    assert_returned(scene)


async def test_two_restores_never_share_a_volume() -> None:
    scene = in_place()
    await expose(scene)
    await scene.world.patch(PERSISTENT_VOLUMES, OLD, labels={IN_PLACE_LABEL: "uid-of-another"})
    before, text = volume(scene, OLD), f"PersistentVolume {OLD} is being restored by another DataDownload"
    assert await check(scene) == Pending("VolumeInUse", text, blocked=True)
    await give_back(scene)
    assert volume(scene, OLD) == before


@pytest.mark.cause("existing-volume-unusable")
@pytest.mark.parametrize(
    ("spec", "request_", "message"),
    [
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}},
            {},
            "belongs to PVC app3/bystander, not to PVC app3/data",
            id="of another PVC",
        ),
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "data", "uid": TARGET_UID}},
            {},
            "is bound to PVC app3/data: it must be released first",
            id="still bound",
        ),
        pytest.param(
            {"volumeMode": "Block"}, {}, "has volumeMode Block, and PVC app3/data has Filesystem", id="of another mode"
        ),
        pytest.param(
            {"csi": None, "local": {"path": "/mnt"}},
            {"by_block": True},
            "by block is of no CSI driver: restore into a new volume",
            id="no device",
        ),
        pytest.param(
            {"csi": {"driver": "d", "volumeHandle": "h", "fsType": "ext4"}},
            {"by_block": True, "fs_type": "xfs"},
            "is mounted as ext4, and the backup has xfs",
            id="another file system",
        ),
    ],
)
async def test_a_volume_that_can_never_be_restored_into_is_refused_untouched(
    spec: JsonDict, request_: dict[str, Any], message: str
) -> None:
    scene = in_place(**spec)
    scene.request = replace(scene.request, **request_)
    before = scene.world.kube.objects(PERSISTENT_VOLUMES)
    for step in (check, ensure):
        with pytest.raises(ExposeError) as caught:
            await step(scene)
        assert str(caught.value) == f"PersistentVolume {OLD} to restore into {message}"
    assert scene.world.kube.objects(PERSISTENT_VOLUMES) == before
