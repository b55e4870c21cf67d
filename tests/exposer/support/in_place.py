"""A restore into an existing volume: the scene, its steps, and its end."""

from typing import Any

from core.kube.resources import PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from exposer.model import KeptVolume
from tests.exposer.support.cuts import Cut
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import Restore, claim, volume
from tests.support.versions import built

_VOLUME = built("persistentvolume")
OLD = _VOLUME["metadata"]["name"]
SHOWN = f"{OLD}-block"
"""The second PersistentVolume, through which a device is written that has a file system."""
RELEASED_UID = _VOLUME["spec"]["claimRef"]["uid"]
"""The UID of the PVC that the server deleted."""
HANDLE = _VOLUME["spec"]["csi"]["volumeHandle"]
TARGET_UID = built("target-pvc")["metadata"]["uid"]
TARGET = "PersistentVolumeClaim app3/data"
LEFT = {"PersistentVolumeClaim app3/bystander", TARGET, f"PersistentVolume /{OLD}"}
_RESTORING, _TARGET = ("velero", "r2-9nft8"), ("app3", "data")
_KEPT = ("accessModes", "capacity", "csi", "storageClassName", "volumeMode")


def in_place(*, by_block: bool = False, policy: str = "Delete", **spec: Any) -> RestoreScene:
    scene = RestoreScene(by_block=by_block)
    scene.put_existing(policy=policy, **spec)
    return scene


async def give_back(scene: RestoreScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.give_back(scene.request))


async def restore(scene: RestoreScene, transport: Cut | None = None) -> KeptVolume:
    whole = Restore(scene)
    await whole.carry(transport)
    kept: KeptVolume = whole.kept
    return kept


class Watched(Cut):
    """A transport that checks after each request that the volume is safe, whatever happens next."""

    def __init__(self, scene: Any, at: int = 0, *, applied: bool = False) -> None:
        super().__init__(scene.world.kube, at, applied=applied)
        self._scene = scene

    async def request(self, request: Request) -> Response:
        try:
            return await super().request(request)
        finally:
            assert_safe(self._scene)


def assert_safe(scene: Any) -> None:
    """Assert that the volume is there and unchanged, is not reclaimed, and is used neither twice nor by others."""
    before, given = built("persistentvolume"), volume(scene, OLD)
    shown = [one for one in scene.world.kube.objects(PERSISTENT_VOLUMES) if one["metadata"]["name"] == SHOWN]
    assert given["metadata"]["uid"] == before["metadata"]["uid"]
    assert "deletionTimestamp" not in given["metadata"]
    assert {key: given["spec"][key] for key in _KEPT} == {key: before["spec"][key] for key in _KEPT}
    reference = given["spec"]["claimRef"]
    returned = _claim_of(given) == _TARGET and reference.get("uid") != RELEASED_UID
    assert _claim_of(given) in {_RESTORING, _TARGET}
    assert given["spec"]["persistentVolumeReclaimPolicy"] == "Retain" or returned
    for one in shown:
        assert _claim_of(one) == _claim_of(given) == _RESTORING
        assert one["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert not reference.get("uid")
    assert _claim_of(given) == _RESTORING or not scene.world.kube.objects(PODS)


def _claim_of(one: JsonDict) -> tuple[str, str]:
    return one["spec"]["claimRef"]["namespace"], one["spec"]["claimRef"]["name"]


def assert_returned(scene: RestoreScene, *, policy: str = "Delete") -> None:
    """Assert that the target has its volume again, and no mark of the restore."""
    target, given = claim(scene, "app3", "data"), volume(scene, OLD)
    assert scene.world.names() == LEFT
    assert scene.world.disks == {HANDLE}
    assert target["spec"]["volumeName"] == OLD
    assert target["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert given["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert_unmarked(given, policy=policy)


def assert_unmarked(given: JsonDict, *, policy: str) -> None:
    assert given["spec"]["persistentVolumeReclaimPolicy"] == policy
    marks = {**given["metadata"].get("labels", {}), **given["metadata"].get("annotations", {})}
    assert [key for key in marks if key.startswith("nodeagent.io/")] == []


def attach(scene: RestoreScene, name: str, node: str) -> None:
    spec = {"attacher": "d", "nodeName": node, "source": {"persistentVolumeName": name}}
    scene.world.put(VOLUME_ATTACHMENTS, f"{name}-{node}", spec=spec)
