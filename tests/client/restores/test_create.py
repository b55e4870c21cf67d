"""Creating a restore: everything is checked first, existing PVCs are never touched, and a repetition is harmless."""

import pytest

from client.restores.create import check_restore, plan_restore, start_restore
from client.restores.manifests import RequestedRestore
from client.restores.sources import RestoreError, SavedVolume
from core.kube.resources import POD_VOLUME_RESTORES
from core.models.backups import SavedClaim
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved

pytestmark = pytest.mark.looptime

_BOTH = (saved(DATA, "s1"), saved(FILES, "s2"))


@pytest.fixture
def scene() -> RestoreScene:
    return RestoreScene()


async def _restore(scene: RestoreScene, *volumes: SavedVolume, request: RequestedRestore | None = None) -> None:
    planned = await plan_restore(scene.tools, request or scene.request(), volumes or _BOTH)
    await start_restore(scene.tools, planned)


async def test_namespaces_claims_and_transfers_are_created(scene: RestoreScene) -> None:
    await _restore(scene)
    assert scene.claims.keys() == {"app/data", "db/files"}
    targets = {one["spec"]["targetVolume"]["pvc"]: one["spec"]["snapshotID"] for one in scene.downloads}
    assert targets == {"data": "s1", "files": "s2"}
    assert scene.notes == [
        "volumes of the storage class late are restored once a pod uses their PVC, or at once by --method restore-wait",
        "namespace db was created",
    ]


async def test_a_repetition_changes_nothing(scene: RestoreScene) -> None:
    await _restore(scene)
    before = (scene.claims, scene.downloads)
    await _restore(scene)
    assert (scene.claims, scene.downloads) == before


async def test_a_pod_waits_for_the_data(scene: RestoreScene) -> None:
    request = scene.request(wait_image="agents:1", classes={"fast": "late"})
    planned = await plan_restore(scene.tools, request, [saved(DATA, "s1")])
    await check_restore(scene.tools, planned)
    await start_restore(scene.tools, planned)
    await start_restore(scene.tools, planned)
    (pod,) = scene.pods
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    assert transfer["spec"]["pod"] == {
        "kind": "Pod",
        "namespace": "app",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
    }
    assert "selector" not in scene.claims["app/data"]["spec"]
    assert (scene.downloads, scene.notes) == ([], [])


async def test_a_claim_that_exists_is_an_error_and_nothing_is_created(scene: RestoreScene) -> None:
    scene.put_claim("files", "db")
    with pytest.raises(RestoreError, match="PVC db/files exists already, and restores go to new PVCs only"):
        await _restore(scene)
    assert scene.downloads == []
    assert scene.claims.keys() == {"db/files"}


async def test_the_claim_of_another_restore_is_an_error(scene: RestoreScene) -> None:
    await _restore(scene)
    with pytest.raises(RestoreError, match="PVC app/data exists already"):
        await _restore(scene, request=scene.request("again"))


async def test_a_class_that_does_not_exist_is_an_error_with_the_one_that_may_be_meant(scene: RestoreScene) -> None:
    request = scene.request(classes={"fast": "lat"})
    with pytest.raises(RestoreError, match=r"StorageClass lat does not exist \(did you mean late\?\)"):
        await _restore(scene, saved(DATA), request=request)
    assert scene.claims == {}


async def test_two_volumes_never_become_one_claim(scene: RestoreScene) -> None:
    other = SavedClaim(namespace="db", name="data", size="1Gi")
    request = scene.request(namespaces={"db": "app"})
    with pytest.raises(RestoreError, match="PVCs app/data and db/data would both become app/data"):
        await _restore(scene, saved(DATA), saved(other), request=request)


async def test_without_the_permission_to_list_classes_it_is_tried(scene: RestoreScene) -> None:
    scene.kube.fail_next("GET", "/storageclasses", 403, message="storageclasses is forbidden")
    await _restore(scene, saved(DATA))
    assert "it is not known whether the storage classes exist" in scene.notes[0]
    assert len(scene.downloads) == 1


@pytest.mark.parametrize("path", ["/persistentvolumeclaims", "/datadownloads"])
async def test_a_missing_permission_names_the_volume_and_a_repetition_completes_it(
    path: str, scene: RestoreScene
) -> None:
    scene.kube.fail_next("POST", path, 403, message="is forbidden: User jane cannot create")
    with pytest.raises(RestoreError, match=r"PVC app/data is not restored: .*403.*cannot create.*; none was started"):
        await _restore(scene)
    await _restore(scene)
    assert len(scene.downloads) == 2


@pytest.mark.parametrize("path", ["/namespaces", "/namespaces/app/persistentvolumeclaims", "/datadownloads"])
async def test_what_could_not_be_created_is_found_before_anything_is(path: str, scene: RestoreScene) -> None:
    planned = await plan_restore(scene.tools, scene.request(), _BOTH)
    scene.kube.fail_next("POST", path, 403, message="is forbidden: User jane cannot create")
    with pytest.raises(RestoreError, match=r"cannot be restored, nothing was changed: create \(dry run\) .*403"):
        await check_restore(scene.tools, planned)
    await check_restore(scene.tools, planned)
    assert (scene.claims, scene.downloads) == ({}, [])


async def test_a_user_who_may_not_read_namespaces_may_restore_into_one(scene: RestoreScene) -> None:
    planned = await plan_restore(scene.tools, scene.request(), [saved(DATA)])
    scene.kube.fail_next("GET", "/namespaces/app", 403, message="namespaces is forbidden")
    await start_restore(scene.tools, planned)
    assert scene.claims.keys() == {"app/data"}
