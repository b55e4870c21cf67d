"""Objects that Velero's agent created for a transfer: recognized, continued with or deleted."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.models.names import OWNER_UID_LABEL
from exposer.model import Exposed, Owner
from exposer.ownership import BOUND_BY_CONTROLLER, belongs, created_by_velero
from tests.exposer.support.in_place import OLD, assert_returned, give_back, in_place, restore
from tests.exposer.support.restore_steps import claim, clean_up, expose, volume
from tests.exposer.support.scenes import HANDLE, BackupScene, RestoreScene
from tests.exposer.support.world import no_guard
from tests.support.objects import JsonDict

RECORDINGS = Path(__file__).parents[1] / "recordings" / "velero-1.18.2"
NAME = "b1-q9txn"


def recorded(name: str) -> list[JsonDict]:
    events: list[JsonDict] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return [event["object"] for event in events]


def recorded_owner(**changes: str) -> Owner:
    upload = recorded("dataupload")[0]
    meta = upload["metadata"]
    owner = {"api_version": upload["apiVersion"], "kind": upload["kind"], "namespace": meta["namespace"]}
    return Owner(**(owner | {"name": meta["name"], "uid": meta["uid"]} | changes))


def test_the_recorded_snapshot_and_content_are_recognized() -> None:
    owner = recorded_owner()
    contents = recorded("volumesnapshotcontents")
    assert all(created_by_velero(snapshot, owner) for snapshot in recorded("volumesnapshot-of-dataupload"))
    assert {content["metadata"]["name"] for content in contents if created_by_velero(content, owner)} == {NAME}
    assert all(created_by_velero(content, owner) for content in contents if content["metadata"]["name"] == NAME)
    assert not any(created_by_velero(snapshot, owner) for snapshot in recorded("volumesnapshot-source"))


@pytest.mark.parametrize("name", ["pod-of-dataupload", "pvc-of-dataupload"])
def test_the_recorded_pod_and_claim_belong_by_reference(name: str) -> None:
    assert all(belongs(obj, recorded_owner()) for obj in recorded(name))
    assert not any(belongs(obj, recorded_owner(uid="another")) for obj in recorded(name))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"metadata": {"name": NAME, "labels": {OWNER_UID_LABEL: "another"}}}, id="marked by us"),
        pytest.param({"metadata": {"name": NAME, "ownerReferences": [{"uid": "another"}]}}, id="another owner"),
        pytest.param({"metadata": {"name": "other"}}, id="another name"),
        pytest.param({"spec": {}}, id="another form"),
    ],
)
def test_another_owners_object_is_not_recognized(change: dict[str, Any]) -> None:
    snapshot = recorded("volumesnapshot-of-dataupload")[0]
    content = next(c for c in recorded("volumesnapshotcontents") if c["metadata"]["name"] == NAME)
    for obj in (snapshot, content):
        assert not created_by_velero(obj | change, recorded_owner())


async def scene_of_velero(*, pod: bool = True) -> BackupScene:
    """Return a world with a complete expose in Velero's format."""
    scene = BackupScene()
    await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, no_guard))
    for resource in (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS):
        for obj in scene.world.kube.objects(resource):
            if obj["metadata"]["name"] == NAME:
                meta = obj["metadata"] | {"labels": {}, "annotations": {}}
                if resource == PERSISTENT_VOLUME_CLAIMS:
                    meta["ownerReferences"] = [scene.request.owner.reference]
                scene.world.kube.put(obj | {"metadata": meta})
    if not pod:
        await scene.world.client.delete(PODS, "velero", NAME)
        await scene.world.settle()
    return scene


@pytest.mark.looptime
@pytest.mark.parametrize("pod", [True, False], ids=["exposed", "half exposed"])
async def test_objects_of_velero_are_deleted_like_our_own(pod: bool) -> None:
    scene = await scene_of_velero(pod=pod)
    await scene.world.until_none(lambda: scene.exposer().clean_up(scene.request))
    assert not any(NAME in name for name in scene.world.names())
    assert HANDLE not in scene.world.handles


@pytest.mark.looptime
async def test_a_mover_pod_of_velero_is_continued_with() -> None:
    scene = await scene_of_velero()
    exposed = await scene.exposer().ensure(scene.request, no_guard)
    assert isinstance(exposed, Exposed)
    assert exposed.pod["metadata"]["name"] == NAME


@pytest.mark.looptime
async def test_an_incomplete_expose_of_velero_fails() -> None:
    scene = await scene_of_velero(pod=False)
    with pytest.raises(ExposeError, match="was created by Velero's node-agent for an expose that it did not complete"):
        await scene.exposer().ensure(scene.request, no_guard)


async def lend_as_velero(scene: RestoreScene) -> None:
    """Expose the existing volume, and leave PVC and volume as an agent of Velero 1.19 does.

    Source: Velero at 093b61dc6, createRestorePVC in pkg/exposer/generic_restore.go.
    """
    await expose(scene)
    owner = scene.request.owner
    for found in (claim(scene, owner.namespace, owner.name), volume(scene, OLD)):
        meta = found["metadata"]
        for field in ("labels", "annotations"):
            kept = meta.get(field, {}).items()
            dropped = ("nodeagent.io/", BOUND_BY_CONTROLLER)
            meta[field] = {key: text for key, text in kept if not key.startswith(dropped)}
        if found["kind"] == "PersistentVolumeClaim":
            meta["ownerReferences"] = [owner.reference]
        scene.world.kube.put(found)


@pytest.mark.looptime
async def test_an_existing_volume_that_velero_has_lent_is_given_back() -> None:
    scene = in_place()
    await lend_as_velero(scene)
    await give_back(scene)
    await clean_up(scene)
    assert_returned(scene)


@pytest.mark.looptime
@pytest.mark.parametrize("pod", [True, False], ids=["exposed", "half exposed"])
async def test_a_restore_into_a_volume_that_velero_has_lent_is_continued_with(pod: bool) -> None:
    scene = in_place()
    await lend_as_velero(scene)
    if not pod:
        await scene.world.client.delete(PODS, "velero", scene.request.owner.name)
        await scene.world.settle()
    kept = await restore(scene)
    assert (kept.pv_name, kept.provisioned) == (OLD, False)
    assert_returned(scene)
