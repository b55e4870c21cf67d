"""Objects that Velero's agent created for a transfer: recognized, continued with or deleted; and rejected pods."""

import json
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from core.models.names import OWNER_UID_LABEL
from exposer.model import Owner
from exposer.ownership import BOUND_BY_CONTROLLER, belongs, create_pod, created_by_velero
from tests.exposer.support.in_place import OLD, assert_returned, give_back, in_place, restore
from tests.exposer.support.scenes import HANDLE, BackupScene, RestoreScene
from tests.exposer.support.steps import claim, clean_up, ensure, expose, volume
from tests.support.golden import RECORDINGS
from tests.support.objects import JsonDict
from tests.support.scripted import rejection, scripted_client, stored

NAME = "b1-q9txn"


def recorded(name: str) -> list[JsonDict]:
    events: list[JsonDict] = json.loads((RECORDINGS / f"{name}.json").read_text())
    return [event["object"] for event in events]


def recorded_owner(**changes: str) -> Owner:
    upload = recorded("dataupload")[0]
    meta = upload["metadata"]
    owner = {"api_version": upload["apiVersion"], "kind": upload["kind"], "namespace": meta["namespace"]}
    return Owner(**(owner | {"name": meta["name"], "uid": meta["uid"]} | changes))


def test_the_recorded_objects_are_recognized() -> None:
    owner, other = recorded_owner(), recorded_owner(uid="another")
    contents = recorded("volumesnapshotcontents")
    assert all(created_by_velero(snapshot, owner) for snapshot in recorded("volumesnapshot-of-dataupload"))
    assert {content["metadata"]["name"] for content in contents if created_by_velero(content, owner)} == {NAME}
    assert all(created_by_velero(content, owner) for content in contents if content["metadata"]["name"] == NAME)
    assert not any(created_by_velero(snapshot, owner) for snapshot in recorded("volumesnapshot-source"))
    for obj in (*recorded("pod-of-dataupload"), *recorded("pvc-of-dataupload")):
        assert (belongs(obj, owner), belongs(obj, other)) == (True, False)


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


async def scene_of_velero(*, pod: bool) -> BackupScene:
    """Return a world with an expose in Velero's format, complete if it has its pod."""
    scene = BackupScene()
    await expose(scene)
    for resource in (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS):
        obj = scene.world.find(resource, NAME)
        meta = obj["metadata"] | {"labels": {}, "annotations": {}}
        if resource == PERSISTENT_VOLUME_CLAIMS:
            meta["ownerReferences"] = [scene.request.owner.reference]
        scene.world.kube.put(obj | {"metadata": meta})
    if not pod:
        await scene.world.delete(PODS, f"velero/{NAME}", settle=True)
    return scene


by_pod = pytest.mark.parametrize("pod", [True, False], ids=["exposed", "half exposed"])


@pytest.mark.looptime
@by_pod
async def test_a_mover_pod_of_velero_is_continued_with_and_its_objects_deleted_like_our_own(pod: bool) -> None:
    scene = await scene_of_velero(pod=pod)
    if pod:
        assert (await ensure(scene)).pod["metadata"]["name"] == NAME
    else:
        message = "was created by Velero's node-agent for an expose that it did not complete"
        with pytest.raises(ExposeError, match=message):
            await ensure(scene)
    await clean_up(scene)
    assert not any(NAME in name for name in scene.world.names())
    assert HANDLE not in scene.world.handles


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
    scene = in_place(policy="Retain")
    await lend_as_velero(scene)
    await give_back(scene)
    await clean_up(scene)
    assert_returned(scene, policy="Retain")


@pytest.mark.looptime
@by_pod
async def test_a_restore_into_a_volume_that_velero_has_lent_is_continued_with(pod: bool) -> None:
    scene = in_place(policy="Retain")
    await lend_as_velero(scene)
    if not pod:
        await scene.world.delete(PODS, f"velero/{scene.request.owner.name}", settle=True)
    kept = await restore(scene)
    assert (kept.pv_name, kept.provisioned) == (OLD, False)
    assert_returned(scene, policy="Retain")


_POD = stored(PODS, metadata={"name": "du-1"}, spec={"priorityClassName": "low", "x": 1})


@pytest.mark.parametrize("message", ["exceeded quota", "no PriorityClass with name low was found"])
async def test_any_other_rejection_of_a_pod_is_raised(message: str) -> None:
    pod = {"metadata": _POD["metadata"], "spec": {"x": 1}} if "Priority" in message else _POD
    with pytest.raises(ForbiddenError):
        await create_pod(scripted_client(lambda _: rejection(403, message, "Forbidden")), pod)
