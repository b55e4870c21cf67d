"""A restore into an existing volume: the scene, its steps, and its end."""

from typing import Any

from core.kube.resources import VOLUME_ATTACHMENTS
from core.models.base import JsonDict
from exposer.model import KeptVolume
from tests.exposer.support.cuts import Cut
from tests.exposer.support.restore_steps import claim, clean_up, expose, rebind, volume
from tests.exposer.support.scenes import RestoreScene
from tests.support.versions import built

_VOLUME = built("persistentvolume")
OLD = _VOLUME["metadata"]["name"]
RELEASED_UID = _VOLUME["spec"]["claimRef"]["uid"]
"""The UID of the PVC that the server deleted."""
HANDLE = _VOLUME["spec"]["csi"]["volumeHandle"]
TARGET_UID = built("target-pvc")["metadata"]["uid"]
TARGET = "PersistentVolumeClaim app3/data"
LEFT = {"PersistentVolumeClaim app3/bystander", TARGET, f"PersistentVolume /{OLD}"}


def in_place(*, policy: str = "Retain", **spec: Any) -> RestoreScene:
    scene = RestoreScene()
    scene.put_existing(policy=policy, **spec)
    return scene


async def give_back(scene: RestoreScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.give_back(scene.request))


async def restore(scene: RestoreScene, transport: Cut | None = None, kept: KeptVolume | None = None) -> KeptVolume:
    if kept is None:
        await expose(scene, transport)
        kept = await scene.exposer(transport).read_volume(scene.request)
    await rebind(scene, kept, transport)
    await clean_up(scene, transport)
    return kept


def assert_returned(scene: RestoreScene, *, policy: str = "Retain") -> None:
    """Assert that the target has its volume again, and nothing tells of the restore."""
    target, given = claim(scene, "app3", "data"), volume(scene, OLD)
    assert scene.world.names() == LEFT
    assert scene.world.disks == {OLD}
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
