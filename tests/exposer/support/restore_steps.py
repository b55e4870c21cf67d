"""The steps of a restore, each until nothing is pending, and its possible ends."""

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from exposer.manifests import changed_name
from exposer.model import Exposed, KeptVolume
from tests.exposer.support.cuts import Cut
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import no_guard
from tests.support.objects import JsonDict

BYSTANDERS = {"PersistentVolumeClaim app3/bystander"}
TARGET = "PersistentVolumeClaim app3/data"


async def expose(scene: RestoreScene, transport: Cut | None = None) -> Exposed:
    exposer = scene.exposer(transport)
    return await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))


async def rebind(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.rebind(scene.request, kept))


async def drop_volume(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.drop_volume(scene.request, kept))


async def clean_up(scene: RestoreScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.clean_up(scene.request))


def claim(scene: RestoreScene, namespace: str, name: str) -> JsonDict:
    claims = scene.world.kube.objects(PERSISTENT_VOLUME_CLAIMS)
    meta = {"namespace": namespace, "name": name}
    found: JsonDict = next(c for c in claims if {key: c["metadata"][key] for key in meta} == meta)
    return found


def volume(scene: BackupScene | RestoreScene, name: str) -> JsonDict:
    volumes = scene.world.kube.objects(PERSISTENT_VOLUMES)
    found: JsonDict = next(v for v in volumes if v["metadata"]["name"] == name)
    return found


def assert_handed_over(scene: RestoreScene, kept: KeptVolume) -> None:
    """Assert that the target has the volume as if provisioned for it, and nothing else is left."""
    target = claim(scene, "app3", "data")
    changed = scene.request.by_block and target["spec"]["volumeMode"] == "Filesystem"
    name = changed_name(kept.pv_name) if changed else kept.pv_name
    given = volume(scene, name)
    assert scene.world.names() == BYSTANDERS | {TARGET, f"PersistentVolume /{name}"}
    assert target["spec"]["volumeName"] == name
    assert given["spec"]["volumeMode"] == target["spec"]["volumeMode"]
    assert target["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert given["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert given["spec"]["persistentVolumeReclaimPolicy"] == kept.reclaim_policy
    assert given["metadata"]["labels"] == target["spec"]["selector"]["matchLabels"]
    assert scene.world.disks == {kept.pv_name}


def assert_clean(scene: RestoreScene) -> None:
    assert scene.world.names() == BYSTANDERS | {TARGET}
    assert scene.world.disks == set()


async def remove_target(scene: RestoreScene) -> None:
    await scene.world.client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", "data")
    await scene.world.settle()


async def replace_target(scene: RestoreScene, meta: JsonDict | None = None) -> None:
    """Have a user delete the target, and the restore r3 of a Velero server make it again, an hour later."""
    await remove_target(scene)
    again = {
        "uid": "uid-again",
        "labels": {"velero.io/restore-name": "r3"},
        "creationTimestamp": "2026-11-21T12:15:02Z",
    }
    scene.put_target("data", meta=again | (meta or {}))


async def bind_target_elsewhere(scene: RestoreScene) -> None:
    patch = {"spec": {"volumeName": "pvc-other"}}
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", patch)
