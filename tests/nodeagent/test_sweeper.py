"""What is left of loads that were deleted by force goes, in order; nothing else does."""

import asyncio

import pytest

from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.base import JsonDict
from core.models.names import DATA_MOVER_FINALIZER, NODE_LABEL, OWNER_UID_LABEL, REPOSITORY_TYPE_LABEL
from core.models.phases import Phase
from exposer.snapshots import SOURCE_ANNOTATION, VOLUME_ANNOTATION, SnapshotSource
from nodeagent.sweeper import find_vanished
from tests.nodeagent.dispatching import Scene, open_scene
from tests.nodeagent.test_admission_order import entry

__all__: list[str] = []

SOURCE = SnapshotSource.model_validate(
    {
        "snapshotUid": "uid-source",
        "content": "source-content",
        "contentUid": "uid-source-content",
        "size": "1Gi",
        "volumeMode": "Filesystem",
    }
)
KINDS = (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)


def put(scene: Scene, resource: Resource, name: str, **others: object) -> JsonDict:
    """Store an object; `uid` is its own, `owner` the UID on its owner label, the rest its top level."""
    meta: JsonDict = {"name": name, "uid": others.pop("uid", f"uid-{resource.plural}-{name}")}
    if resource.namespaced:
        meta["namespace"] = others.pop("namespace", "velero")
    if owner := others.pop("owner", ""):
        meta["labels"] = {OWNER_UID_LABEL: owner} | dict(others.pop("labels", {}))  # type: ignore[call-overload] # a table
    for key in ("annotations", "finalizers"):
        if key in others:
            meta[key] = others.pop(key)
    obj = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, "spec": {}}
    return scene.kube.put(obj | others)


def leave_backup(scene: Scene, owner: str) -> None:
    """Store what an exposed DataUpload has made."""
    put(scene, PODS, owner, owner=owner)
    put(scene, PERSISTENT_VOLUME_CLAIMS, owner, owner=owner, spec={"volumeName": f"pv-{owner}"})
    claim = {"uid": f"uid-persistentvolumeclaims-{owner}"}
    spec = {"persistentVolumeReclaimPolicy": "Retain", "claimRef": claim}
    put(scene, PERSISTENT_VOLUMES, f"pv-{owner}", spec=spec)
    put(scene, VOLUME_SNAPSHOTS, owner, owner=owner)
    reference = {"namespace": "velero", "name": owner}
    put(
        scene,
        VOLUME_SNAPSHOT_CONTENTS,
        owner,
        owner=owner,
        annotations={SOURCE_ANNOTATION: SOURCE.to_annotation()},
        spec={"deletionPolicy": "Delete", "volumeSnapshotRef": reference},
    )


def names(scene: Scene, resource: Resource) -> list[str]:
    return [
        obj["metadata"]["name"] for obj in scene.kube.objects(resource) if "node-agent" not in obj["metadata"]["name"]
    ]


@pytest.mark.looptime
async def test_what_a_load_left_that_was_deleted_by_force_goes_in_order() -> None:
    scene = open_scene("node-a")
    status = {"phase": "Accepted", "acceptedByNode": "node-a"}
    scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.add("other", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    leave_backup(scene, "uid-of-du")
    leave_backup(scene, "uid-of-other")
    async with scene.dispatching():
        await asyncio.sleep(100)
        assert names(scene, PODS) == ["uid-of-du", "uid-of-other"]
        client = scene.dispatcher()._tools.client
        await client.patch(scene.kind.resource, "velero", "du", {"metadata": {"finalizers": []}})
        await client.delete(scene.kind.resource, "velero", "du")
        await scene.until(lambda: names(scene, PERSISTENT_VOLUME_CLAIMS) == ["uid-of-other"], seconds=70)
        assert names(scene, PODS) == ["uid-of-other"]
        # The snapshot waits for the volume, which its provisioner removes.
        await asyncio.sleep(30)
        assert names(scene, VOLUME_SNAPSHOTS) == ["uid-of-du", "uid-of-other"]
        volume = scene.kube.objects(PERSISTENT_VOLUMES)[0]
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
        await client.delete(PERSISTENT_VOLUMES, "", "pv-uid-of-du")
        await scene.until(lambda: names(scene, VOLUME_SNAPSHOT_CONTENTS) == ["uid-of-other"], seconds=30)
        assert [names(scene, kind) for kind in KINDS] == [["uid-of-other"]] * 4


@pytest.mark.looptime
async def test_a_dispatcher_that_begins_sweeps_what_it_finds_and_nothing_of_anybody_elses() -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "long-gone")
    scene.kube.put(scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)[0])
    for kind in KINDS:
        put(scene, kind, "not-labelled", spec={"volumeSnapshotRef": {"namespace": "velero"}})
    put(scene, PODS, "init", owner="a-repository", labels={REPOSITORY_TYPE_LABEL: "kopia"})
    put(scene, PODS, "elsewhere", owner="x", namespace="other")
    put(
        scene,
        VOLUME_SNAPSHOT_CONTENTS,
        "of-another-agent",
        owner="y",
        spec={"volumeSnapshotRef": {"namespace": "other"}},
    )
    client = scene.dispatcher()._tools.client
    async with scene.dispatching():
        await asyncio.sleep(20)
        assert "long-gone" in names(scene, PODS)
        await scene.until(lambda: "long-gone" not in names(scene, PERSISTENT_VOLUME_CLAIMS), seconds=60)
        await client.delete(PERSISTENT_VOLUMES, "", "pv-long-gone")
        await scene.until(lambda: "long-gone" not in names(scene, VOLUME_SNAPSHOT_CONTENTS), seconds=30)
        await asyncio.sleep(1300)
    assert names(scene, PODS) == ["elsewhere", "init", "not-labelled"]
    assert names(scene, VOLUME_SNAPSHOT_CONTENTS) == ["not-labelled", "of-another-agent"]
    assert names(scene, PERSISTENT_VOLUME_CLAIMS) == names(scene, VOLUME_SNAPSHOTS) == ["not-labelled"]


@pytest.mark.looptime
@pytest.mark.parametrize("untouched", [True, False], ids=["source is there", "source half taken over"])
async def test_the_snapshot_of_a_source_that_is_still_there_survives(untouched: bool) -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "gone")
    await scene.dispatcher()._tools.client.delete(PERSISTENT_VOLUMES, "", "pv-gone")
    reference = {"namespace": "app", "name": "source"}
    put(
        scene,
        VOLUME_SNAPSHOT_CONTENTS,
        "source-content",
        uid="uid-source-content",
        spec={"volumeSnapshotRef": reference},
    )
    if untouched:
        put(scene, VOLUME_SNAPSHOTS, "source", uid="uid-source", namespace="app")
    policies = set()
    async with scene.dispatching():
        async with asyncio.timeout(100):
            while "gone" in names(scene, VOLUME_SNAPSHOTS) or "gone" in names(scene, VOLUME_SNAPSHOT_CONTENTS):
                for content in scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS):
                    policies.add(content["spec"].get("deletionPolicy"))
                await asyncio.sleep(0.01)
    last = [h.before for h in scene.kube._store.history if h.after is None and h.resource == VOLUME_SNAPSHOT_CONTENTS]
    ours = next(obj for obj in last if obj is not None and obj["metadata"]["name"] == "gone")
    assert ours["spec"]["deletionPolicy"] == ("Retain" if untouched else "Delete")
    assert names(scene, VOLUME_SNAPSHOT_CONTENTS) == (["source-content"] if untouched else [])
    assert ours["metadata"]["annotations"][VOLUME_ANNOTATION] == "pv-gone"


@pytest.mark.looptime
async def test_one_that_cannot_be_removed_holds_up_no_other_and_is_tried_again() -> None:
    scene = open_scene("node-a")
    for owner in ("a", "b"):
        put(scene, PODS, owner, owner=owner)
    scene.kube.fail_next("DELETE", "pods/a", 403, times=3)
    async with scene.dispatching():
        await scene.until(lambda: names(scene, PODS) == ["a"], seconds=60)
        await scene.until(lambda: names(scene, PODS) == [], seconds=60)


@pytest.mark.parametrize(
    ("load", "left"),
    [
        pytest.param(entry("du", node_label="n", finalizer=True, phase=Phase.ACCEPTED), True, id="accepted"),
        pytest.param(entry("du", node_label="n", finalizer=True, phase=Phase.COMPLETED), True, id="clean-up is due"),
        pytest.param(entry("du", phase=Phase.COMPLETED), False, id="released"),
        pytest.param(entry("du"), False, id="nobody's yet"),
    ],
)
def test_only_a_load_that_may_have_left_something_is_a_reason_to_sweep(load: object, left: bool) -> None:
    assert find_vanished({"du": load}, {}) is left  # type: ignore[dict-item] # an entry
    assert find_vanished({"du": load}, {"du": load}) is False  # type: ignore[dict-item] # an entry
