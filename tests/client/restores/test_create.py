"""Creating a restore: everything is checked first, existing PVCs are never touched, and a repetition is harmless."""

import re
from typing import Any

import pytest

from client.restores.create import check_restore, plan_restore, start_restore
from client.restores.manifests import RequestedRestore
from client.restores.sources import RestoreError, SavedVolume
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, POD_VOLUME_RESTORES, PODS, Resource
from core.models.backups import SavedClaim
from core.models.base import JsonDict
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved

pytestmark = pytest.mark.looptime

_BOTH = (saved(DATA, "s1"), saved(FILES, "s2"))


@pytest.fixture
def scene() -> RestoreScene:
    return RestoreScene()


async def _restore(scene: RestoreScene, *volumes: SavedVolume, request: RequestedRestore | None = None) -> None:
    planned = await plan_restore(scene.tools, request or scene.request(), volumes or _BOTH)
    await start_restore(scene.tools, planned)


async def test_namespaces_claims_and_transfers_are_created_once(scene: RestoreScene) -> None:
    await _restore(scene)
    assert scene.claims.keys() == {"app/data", "db/files"}
    targets = {one["spec"]["targetVolume"]["pvc"]: one["spec"]["snapshotID"] for one in scene.downloads}
    assert targets == {"data": "s1", "files": "s2"}
    assert scene.notes == [
        "volumes of the storage class late are restored once a pod uses their PVC, or at once by --method restore-wait",
        "namespace db was created",
    ]
    before = (scene.claims, scene.downloads)
    await _restore(scene)
    assert (scene.claims, scene.downloads) == before
    with pytest.raises(RestoreError, match="PVC app/data exists already"):
        await _restore(scene, request=scene.request("again"))


async def test_a_pod_waits_for_the_data(scene: RestoreScene) -> None:
    request = scene.request(wait_image="agents:1", classes={"fast": "late"})
    planned = await plan_restore(scene.tools, request, [saved(DATA, "s1")])
    await check_restore(scene.tools, planned)
    await start_restore(scene.tools, planned)
    await start_restore(scene.tools, planned)
    (pod,) = scene.pods
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    named = {key: pod["metadata"][key] for key in ("namespace", "name", "uid")}
    assert transfer["spec"]["pod"] == {"kind": "Pod", **named}
    assert "selector" not in scene.claims["app/data"]["spec"]
    assert (scene.downloads, scene.notes) == ([], [])


async def test_a_claim_that_exists_is_an_error_and_nothing_is_created(scene: RestoreScene) -> None:
    scene.put_claim("files", "db")
    with pytest.raises(RestoreError, match="PVC db/files exists already, and restores go to new PVCs only"):
        await _restore(scene)
    assert scene.downloads == []
    assert scene.claims.keys() == {"db/files"}


@pytest.mark.parametrize(
    ("mappings", "message"),
    [
        (
            {"classes": {"fast": "lat"}},
            r"lat does not exist \(did you mean late\?\): --storage-class-mappings fast:NAME",
        ),
        ({"namespaces": {"db": "app"}}, "PVCs app/data and db/data would both become app/data"),
        ({"namespaces": {"apps": "trial"}}, r"--namespace-mappings: .* has apps \(did you mean app\?\)"),
        ({"classes": {"fats": "late"}}, r"--storage-class-mappings: .* has fats \(did you mean fast\?\)"),
        ({"classes": {"other": "late"}}, r"has other \(there are: fast\)"),
    ],
)
async def test_a_mapping_to_nothing_is_an_error(mappings: dict[str, Any], message: str, scene: RestoreScene) -> None:
    other = SavedClaim(namespace="db", name="data", size="1Gi")
    with pytest.raises(RestoreError, match=message):
        await _restore(scene, saved(DATA), saved(other), request=scene.request(**mappings))
    assert scene.claims == {}


async def test_without_the_permission_to_list_classes_or_to_read_namespaces_it_is_tried(scene: RestoreScene) -> None:
    scene.kube.fail_next("GET", "/storageclasses", 403, message="storageclasses is forbidden")
    planned = await plan_restore(scene.tools, scene.request(), [saved(DATA)])
    assert "it is not known whether the storage classes exist" in scene.notes[0]
    scene.kube.fail_next("GET", "/namespaces/app", 403, message="namespaces is forbidden")
    await start_restore(scene.tools, planned)
    assert (set(scene.claims), len(scene.downloads)) == ({"app/data"}, 1)


@pytest.mark.parametrize("path", ["/persistentvolumeclaims", "/datadownloads"])
async def test_a_missing_permission_names_the_volume_and_a_repetition_works(path: str, scene: RestoreScene) -> None:
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


_METHODS = pytest.mark.parametrize(("image", "resource"), [("", DATA_DOWNLOADS), ("agents:1", POD_VOLUME_RESTORES)])


async def _restore_data(scene: RestoreScene, image: str, snapshot_id: str = "s1") -> None:
    planned = await plan_restore(scene.tools, scene.request(wait_image=image), [saved(DATA, snapshot_id)])
    await start_restore(scene.tools, planned)


def _bind(scene: RestoreScene) -> None:
    raw = scene.claims["app/data"]
    scene.kube.put(raw | {"spec": raw["spec"] | {"volumeName": "pv-1"}})


async def _delete(scene: RestoreScene, resource: Resource) -> None:
    for raw in scene.kube.objects(resource):
        if (raw["metadata"].get("annotations") or {}).get("nodeagent.io/restore"):
            await scene.client.delete(resource, raw["metadata"]["namespace"], raw["metadata"]["name"])


@_METHODS
async def test_a_claim_without_a_volume_gets_another_transfer(
    image: str, resource: Resource, scene: RestoreScene
) -> None:
    await _restore_data(scene, image)
    await _delete(scene, resource)
    await _restore_data(scene, image)
    assert len(scene.kube.objects(resource)) == 1
    _bind(scene)
    await _delete(scene, resource)
    with pytest.raises(RestoreError, match=r"PVC app/data of restore back has a volume, and .* not written to again"):
        await _restore_data(scene, image)
    assert scene.kube.objects(resource) == []


@_METHODS
@pytest.mark.parametrize("phase", ["Completed", "Failed", "Canceled"])
async def test_after_its_end_no_claim_is_made(image: str, resource: Resource, phase: str, scene: RestoreScene) -> None:
    await _restore_data(scene, image)
    (transfer,) = scene.kube.objects(resource)
    scene.kube.put(transfer | {"status": {"phase": phase}})
    await _delete(scene, PERSISTENT_VOLUME_CLAIMS)
    command = f"kubectl -n velero delete {resource.plural} {transfer['metadata']['name']}"
    with pytest.raises(RestoreError, match="restore back has ended: choose another name .*" + re.escape(command)):
        await _restore_data(scene, image)
    assert scene.claims == {}


@pytest.mark.parametrize("phase", ["InProgress", "Completed"])
async def test_no_other_pod_waits_when_the_transfer_exists(phase: str, scene: RestoreScene) -> None:
    await _restore_data(scene, "agents:1")
    _bind(scene)
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    scene.kube.put(transfer | {"status": {"phase": phase}})
    await _delete(scene, PODS)
    await _restore_data(scene, "agents:1")
    assert scene.pods == []
    assert len(scene.kube.objects(POD_VOLUME_RESTORES)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"annotations": {}}},
        {"metadata": {"deletionTimestamp": "2026-11-21T10:00:00Z", "finalizers": ["a/b"]}},
        {"spec": {"volumes": []}},
        {"spec": {"initContainers": [{"name": "a", "command": ["sleep", "inf"]}]}},
    ],
    ids=["of-another", "being-deleted", "another-volume", "another-command"],
)
async def test_a_pod_that_does_not_wait_for_it_is_not_written_to(change: JsonDict, scene: RestoreScene) -> None:
    await _restore_data(scene, "agents:1")
    await _delete(scene, POD_VOLUME_RESTORES)
    (pod,) = scene.pods
    scene.kube.put(pod | {key: pod[key] | value for key, value in change.items()})
    with pytest.raises(RestoreError, match=r"Pod app/back\S+ exists already, and does not wait for this restore"):
        await _restore_data(scene, "agents:1")
    assert scene.kube.objects(POD_VOLUME_RESTORES) == []


@_METHODS
async def test_another_snapshot_under_the_name_is_an_error(image: str, resource: Resource, scene: RestoreScene) -> None:
    await _restore_data(scene, image)
    await _delete(scene, PERSISTENT_VOLUME_CLAIMS)
    with pytest.raises(RestoreError, match="exists already, and restores another snapshot: choose another name"):
        await _restore_data(scene, image, "s9")
    assert (scene.claims, len(scene.kube.objects(resource))) == ({}, 1)
