"""Repeating a restore: what it may still fill is continued, and nothing is written to a volume that may be in use."""

import re
from typing import Any

import pytest

from client.restores.create import plan_restore, start_restore
from client.restores.sources import RestoreError
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, POD_VOLUME_RESTORES, PODS, Resource
from core.models.base import JsonDict
from tests.client.support.restore_scene import DATA, RestoreScene, saved

pytestmark = pytest.mark.looptime

_METHODS = pytest.mark.parametrize(("image", "resource"), [("", DATA_DOWNLOADS), ("agents:1", POD_VOLUME_RESTORES)])


@pytest.fixture
def scene() -> RestoreScene:
    return RestoreScene()


async def _restore(scene: RestoreScene, image: str, snapshot_id: str = "s1") -> None:
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
async def test_a_claim_with_a_volume_is_not_written_to_again_when_its_transfer_is_gone(
    image: str, resource: Resource, scene: RestoreScene
) -> None:
    await _restore(scene, image)
    _bind(scene)
    await _delete(scene, resource)
    with pytest.raises(RestoreError, match=r"PVC app/data of restore back has a volume, and .* not written to again"):
        await _restore(scene, image)
    assert scene.kube.objects(resource) == []


@_METHODS
async def test_a_claim_without_a_volume_gets_another_transfer(
    image: str, resource: Resource, scene: RestoreScene
) -> None:
    await _restore(scene, image)
    await _delete(scene, resource)
    await _restore(scene, image)
    assert len(scene.kube.objects(resource)) == 1


@_METHODS
@pytest.mark.parametrize("phase", ["Completed", "Failed", "Canceled"])
async def test_a_restore_that_has_ended_makes_no_claim_again(
    image: str, resource: Resource, phase: str, scene: RestoreScene
) -> None:
    await _restore(scene, image)
    (transfer,) = scene.kube.objects(resource)
    scene.kube.put(transfer | {"status": {"phase": phase}})
    await _delete(scene, PERSISTENT_VOLUME_CLAIMS)
    command = f"kubectl -n velero delete {resource.plural} {transfer['metadata']['name']}"
    with pytest.raises(RestoreError, match="restore back has ended: choose another name .*" + re.escape(command)):
        await _restore(scene, image)
    assert scene.claims == {}


@pytest.mark.parametrize("phase", ["InProgress", "Completed"])
async def test_no_other_pod_waits_when_the_transfer_exists(phase: str, scene: RestoreScene) -> None:
    await _restore(scene, "agents:1")
    _bind(scene)
    (transfer,) = scene.kube.objects(POD_VOLUME_RESTORES)
    scene.kube.put(transfer | {"status": {"phase": phase}})
    await _delete(scene, PODS)
    await _restore(scene, "agents:1")
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
async def test_a_pod_that_does_not_wait_for_this_restore_is_not_written_to(
    change: JsonDict, scene: RestoreScene
) -> None:
    await _restore(scene, "agents:1")
    await _delete(scene, POD_VOLUME_RESTORES)
    (pod,) = scene.pods
    scene.kube.put(pod | {key: pod[key] | value for key, value in change.items()})
    with pytest.raises(RestoreError, match=r"Pod app/back\S+ exists already, and does not wait for this restore"):
        await _restore(scene, "agents:1")
    assert scene.kube.objects(POD_VOLUME_RESTORES) == []


@_METHODS
async def test_another_snapshot_under_the_same_name_is_an_error_before_anything_is_created(
    image: str, resource: Resource, scene: RestoreScene
) -> None:
    await _restore(scene, image)
    await _delete(scene, PERSISTENT_VOLUME_CLAIMS)
    with pytest.raises(RestoreError, match="exists already, and restores another snapshot: choose another name"):
        await _restore(scene, image, "s9")
    assert (scene.claims, len(scene.kube.objects(resource))) == ({}, 1)


@pytest.mark.parametrize(
    ("mappings", "message"),
    [
        ({"namespaces": {"apps": "trial"}}, r"--namespace-mappings: .* has apps \(did you mean app\?\)"),
        ({"classes": {"fats": "late"}}, r"--storage-class-mappings: .* has fats \(did you mean fast\?\)"),
        ({"classes": {"other": "late"}}, r"has other \(there are: fast\)"),
    ],
)
async def test_a_mapping_of_no_volume_is_an_error(mappings: dict[str, Any], message: str, scene: RestoreScene) -> None:
    with pytest.raises(RestoreError, match=message):
        await plan_restore(scene.tools, scene.request(**mappings), [saved(DATA)])
