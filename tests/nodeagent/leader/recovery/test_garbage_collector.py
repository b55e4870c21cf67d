"""Leaked objects of force-deleted transfers are deleted in order, and nothing else."""

import asyncio
import json

import pytest

from core.kube.resources import (
    CONFIG_MAPS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.names import (
    BASE_SNAPSHOT_LABEL,
    COPY_LABEL,
    DATA_MOVER_FINALIZER,
    IN_PLACE_CLAIM_ANNOTATION,
    NODE_LABEL,
    OWNER_UID_LABEL,
    RECLAIM_POLICY_ANNOTATION,
    REPOSITORY_TYPE_LABEL,
    STORAGE_LOCATION_LABEL,
)
from core.models.phases import Phase
from exposer.leaked_objects import LeakedObjects, delete_leaked_objects, list_leaked_objects
from exposer.manifests import SOURCE_ANNOTATION, VOLUME_ANNOTATION, SnapshotSource
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.recovery.garbage_collector import may_have_leaked
from tests.nodeagent.support.dispatching import Scene, entry, open_scene
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

SOURCE = SnapshotSource.from_wire(
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
    """Store an object with its own `uid`, the UID `owner` in its owner label, and further top-level fields."""
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
    """Store the expose objects of a DataUpload."""
    put(scene, PODS, owner, owner=owner)
    put(scene, PERSISTENT_VOLUME_CLAIMS, owner, owner=owner, spec={"volumeName": f"pv-{owner}"})
    claim = {"uid": f"uid-persistentvolumeclaims-{owner}"}
    spec = {"persistentVolumeReclaimPolicy": "Retain", "claimRef": claim}
    by = {"pv.kubernetes.io/provisioned-by": "hostpath.csi.k8s.io"}
    put(scene, PERSISTENT_VOLUMES, f"pv-{owner}", annotations=by, spec=spec)
    put(scene, VOLUME_SNAPSHOTS, owner, owner=owner)
    reference = {"namespace": "velero", "name": owner}
    put(
        scene,
        VOLUME_SNAPSHOT_CONTENTS,
        owner,
        owner=owner,
        annotations={SOURCE_ANNOTATION: SOURCE.to_json()},
        spec={"deletionPolicy": "Delete", "volumeSnapshotRef": reference},
    )


def names(scene: Scene, resource: Resource) -> list[str]:
    return [
        obj["metadata"]["name"] for obj in scene.kube.objects(resource) if "node-agent" not in obj["metadata"]["name"]
    ]


@pytest.mark.parametrize("resource", [*KINDS, PERSISTENT_VOLUMES], ids=lambda one: one.kind)
async def test_an_object_without_the_label_that_selects_it_hides_no_other(resource: Resource) -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "uid-of-du")
    claim = {"uid": "uid-gone", "name": "gone", "namespace": "velero"}
    stray = put(scene, resource, "stray", spec={"claimRef": claim})
    body = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": {"resourceVersion": "1"}}
    scene.kube.fail_next("GET", f"/{resource.plural}", json.dumps(body | {"items": [stray]}).encode())
    found = await list_leaked_objects(scene.client, "velero")
    assert list(found) == ["uid-of-du"]


async def test_leaked_objects_of_a_force_deleted_transfer_are_deleted_in_order() -> None:
    scene = open_scene("node-a")
    status = {"phase": "Accepted", "acceptedByNode": "node-a"}
    scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.add("other", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    leave_backup(scene, "uid-of-du")
    leave_backup(scene, "uid-of-other")
    async with scene.dispatching():
        await asyncio.sleep(100)
        assert names(scene, PODS) == ["uid-of-du", "uid-of-other"]
        await scene.client.patch(scene.kind.spec.resource, "velero", "du", {"metadata": {"finalizers": []}})
        await scene.client.delete(scene.kind.spec.resource, "velero", "du")
        await scene.until(lambda: names(scene, PERSISTENT_VOLUME_CLAIMS) == ["uid-of-other"], seconds=70)
        assert names(scene, PODS) == ["uid-of-other"]
        # The snapshot waits for the volume, which its provisioner removes.
        await asyncio.sleep(30)
        assert names(scene, VOLUME_SNAPSHOTS) == ["uid-of-du", "uid-of-other"]
        volume = scene.kube.objects(PERSISTENT_VOLUMES)[0]
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
        await scene.client.delete(PERSISTENT_VOLUMES, "", "pv-uid-of-du")
        await scene.until(lambda: names(scene, VOLUME_SNAPSHOT_CONTENTS) == ["uid-of-other"], seconds=100)
        assert [names(scene, kind) for kind in KINDS] == [["uid-of-other"]] * 4


async def test_a_base_snapshot_stays_as_long_as_its_transfer() -> None:
    scene = open_scene("node-a")
    reference = {"namespace": "velero", "name": "du"}
    spec = {"deletionPolicy": "Retain", "volumeSnapshotRef": reference}
    for uid in ("uid-of-du", "uid-of-other"):
        base = put(scene, VOLUME_SNAPSHOT_CONTENTS, uid, spec=spec, finalizers=["driver/snapshot"])
        base["metadata"]["labels"] = {BASE_SNAPSHOT_LABEL: uid}
        scene.kube.put(base)
    for name in ("du", "other"):
        scene.add(name, status={"phase": "Completed"}, labels={NODE_LABEL: "node-a"})
    async with scene.dispatching():
        await asyncio.sleep(700)
        assert names(scene, VOLUME_SNAPSHOT_CONTENTS) == ["uid-of-du", "uid-of-other"]
        await scene.client.delete(scene.kind.spec.resource, "velero", "du")

        def deleted() -> list[str]:
            contents = scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
            return [one["metadata"]["name"] for one in contents if one["metadata"].get("deletionTimestamp")]

        await scene.until(lambda: deleted() == ["uid-of-du"], seconds=660)
        policies = [one["spec"]["deletionPolicy"] for one in scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)]
        assert policies == ["Delete", "Retain"]


def leaked_report(dispatcher: Dispatcher) -> JsonDict:
    """Return what the status page reports about leaked objects."""
    return dict(dispatcher.report()["leakedObjects"])


def put_handed_over(
    scene: Scene, name: str, claim: JsonDict, *, owner: str = "deleted", target: str = "", policy: str = "Delete"
) -> None:
    """Store a volume in mid-rebind, to the PVC `target`: namespaces and name; `policy` is its class's."""
    put(
        scene,
        PERSISTENT_VOLUMES,
        name,
        **({"owner": owner} if owner else {}),
        annotations={IN_PLACE_CLAIM_ANNOTATION: target, RECLAIM_POLICY_ANNOTATION: policy} if target else {},
        spec={"persistentVolumeReclaimPolicy": "Retain", "claimRef": claim},
        status={"phase": "Released"},
    )


async def test_a_volume_in_mid_rebind_of_a_deleted_transfer_is_reclaimed_and_no_other() -> None:
    scene = open_scene("node-a")
    gone = {"namespace": "velero", "name": "dd", "uid": "uid-of-the-claim-that-is-gone"}
    put_handed_over(scene, "lost", gone)
    put_handed_over(scene, "somebodys", gone, owner="")
    target = {"namespace": "app", "name": "data", "uid": "uid-of-target"}
    put(scene, PERSISTENT_VOLUME_CLAIMS, "data", uid="uid-of-target", namespace="app")
    put_handed_over(scene, "of-the-target", target, target="velero/app/data")
    before = target | {"uid": "uid-of-the-one-before"}
    put_handed_over(scene, "of-no-target", before, target="velero/app/data")
    put_handed_over(scene, "of-a-class-that-retains", before, target="velero/app/data", policy="Retain")
    put_handed_over(scene, "of-another-target", target | {"name": "other"}, target="elsewhere/app/other")
    put_handed_over(scene, "of-another-agent", gone | {"namespace": "elsewhere"})
    put_handed_over(scene, "let-go", {})
    put(scene, PERSISTENT_VOLUME_CLAIMS, "taken", uid="uid-taken")
    put_handed_over(scene, "taken", {"namespace": "velero", "name": "taken", "uid": "uid-taken"})
    status = {"phase": "InProgress", "node": "node-a"}
    scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    put_handed_over(scene, "under-way", gone, owner="uid-of-du")

    def condemned() -> list[str]:
        volumes = scene.kube.objects(PERSISTENT_VOLUMES)
        return [v["metadata"]["name"] for v in volumes if v["spec"]["persistentVolumeReclaimPolicy"] == "Delete"]

    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: condemned() == ["lost", "of-no-target"], seconds=60)
        reported = "PersistentVolume lost is being deleted; PersistentVolume of-no-target is being deleted"
        assert leaked_report(dispatcher) == {"deletedTransfers": 1, "pendingMessages": [reported], "lastError": ""}
        for name in condemned():
            await scene.client.delete(PERSISTENT_VOLUMES, "", name)
        await asyncio.sleep(700)
        assert leaked_report(dispatcher) == {"deletedTransfers": 0, "pendingMessages": [], "lastError": ""}
    assert condemned() == []
    assert len(names(scene, PERSISTENT_VOLUMES)) == 8


async def test_without_permission_for_a_list_little_is_logged_and_requested(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene("node-a")
    scene.kube.fail_next("GET", "/volumesnapshotcontents", 403, times=1000)
    async with scene.dispatching():
        await asyncio.sleep(3700)
    assert sum("/volumesnapshotcontents" in one.path for one in scene.kube.requests) == 7
    assert caplog.text.count("garbage collection failed") == 1


@pytest.mark.parametrize("configured", [True, False])
async def test_leaked_copies_are_collected_where_configured_and_never_listed_elsewhere(configured: bool) -> None:
    scene = open_scene("node-a")
    scene.has_copies = configured
    for resource, name in ((SECRETS, "token"), (CONFIG_MAPS, "kms")):
        put(scene, resource, name, owner="deleted", labels={COPY_LABEL: "deleted"})
        put(scene, resource, f"{name}-in-use", owner="uid-of-du", labels={COPY_LABEL: "uid-of-du"})
        put(scene, resource, f"{name}-of-a-user", labels={COPY_LABEL: "deleted"})
        put(scene, resource, f"{name}-labeled", owner="deleted")
    status = {"phase": "Completed"}
    scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    async with scene.dispatching():
        await asyncio.sleep(100)
    gone = {"token", "kms"} if configured else set()
    left = {name for resource in (SECRETS, CONFIG_MAPS) for name in names(scene, resource)}
    assert {"token", "kms"} - left == gone
    assert len(left) == 8 - len(gone)
    listed = [r for r in scene.kube.requests if r.path.endswith("/namespaces/velero/secrets")]
    assert bool(listed) is configured


async def test_a_new_dispatcher_collects_leaked_objects_and_nothing_else() -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "long-gone")
    scene.kube.put(scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)[0])
    for kind in KINDS:
        put(scene, kind, "not-labeled", spec={"volumeSnapshotRef": {"namespace": "velero"}})
    put(scene, PODS, "init", owner="a-repository", labels={REPOSITORY_TYPE_LABEL: "kopia"})
    put(scene, PODS, "validation", owner="a-location", labels={STORAGE_LOCATION_LABEL: "default"})
    put(scene, PODS, "elsewhere", owner="x", namespace="other")
    put(
        scene,
        VOLUME_SNAPSHOT_CONTENTS,
        "of-another-agent",
        owner="y",
        spec={"volumeSnapshotRef": {"namespace": "other"}},
    )
    async with scene.dispatching():
        await asyncio.sleep(20)
        assert "long-gone" in names(scene, PODS)
        await scene.until(lambda: "long-gone" not in names(scene, PERSISTENT_VOLUME_CLAIMS), seconds=60)
        await scene.client.delete(PERSISTENT_VOLUMES, "", "pv-long-gone")
        await scene.until(lambda: "long-gone" not in names(scene, VOLUME_SNAPSHOT_CONTENTS), seconds=30)
        await asyncio.sleep(1300)
    assert names(scene, PODS) == ["elsewhere", "init", "not-labeled", "validation"]
    assert names(scene, VOLUME_SNAPSHOT_CONTENTS) == ["not-labeled", "of-another-agent"]
    assert names(scene, PERSISTENT_VOLUME_CLAIMS) == names(scene, VOLUME_SNAPSHOTS) == ["not-labeled"]


@pytest.mark.parametrize("untouched", [True, False], ids=["source is there", "source half taken over"])
async def test_the_snapshot_of_an_existing_source_is_kept(untouched: bool) -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "gone")
    await scene.client.delete(PERSISTENT_VOLUMES, "", "pv-gone")
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


async def test_an_object_that_cannot_be_deleted_is_reported_blocks_no_other_and_is_retried() -> None:
    scene = open_scene("node-a")
    for owner in ("a", "b"):
        put(scene, PODS, owner, owner=owner)
    scene.kube.fail_next("DELETE", "pods/a", 403, times=3)
    # Without permission to list volumes everything else is collected.
    scene.kube.fail_next("GET", "/persistentvolumes", 403, times=1000)
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: names(scene, PODS) == ["a"], seconds=60)
        await scene.until(lambda: leaked_report(dispatcher)["deletedTransfers"] == 1, seconds=60)
        assert "velero/a" in leaked_report(dispatcher)["lastError"]
        await scene.until(lambda: names(scene, PODS) == [], seconds=100)


async def test_an_object_that_is_held_for_days_costs_few_requests() -> None:
    scene = open_scene("node-a")
    put(scene, VOLUME_SNAPSHOT_CONTENTS, "a", owner="a", finalizers=["driver/x"])
    async with scene.dispatching():
        await asyncio.sleep(3600)
        before = len(scene.kube.requests)
        await asyncio.sleep(3600)
        assert len(scene.kube.requests) - before < 1300
        put(scene, PODS, "b", owner="b")
        await scene.until(lambda: names(scene, PODS) == [], seconds=130)


async def test_malformed_objects_block_no_other(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "a")
    # Whatever its definition says: what was stored before it said so is as it was.
    put(scene, VOLUME_SNAPSHOT_CONTENTS, "source-content", uid=SOURCE.content_uid)
    put(scene, PERSISTENT_VOLUMES, "odd", owner="b", spec={"claimRef": {"uid": "x", "namespace": "velero"}})
    put(scene, VOLUME_SNAPSHOT_CONTENTS, "edited", owner="d", spec={"volumeSnapshotRef": {"name": "d"}})
    put(scene, PODS, "c", owner="c")
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: "c" not in names(scene, PODS), seconds=60)
        await scene.client.delete(PERSISTENT_VOLUMES, "", "pv-a")
        reported = "VolumeSnapshotContent source-content refers to no VolumeSnapshot"
        await scene.until(lambda: dispatcher.report()["leakedObjects"]["lastError"] == reported, seconds=60)
        await asyncio.sleep(60)
        scene.add("du")
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=5)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert "odd" in names(scene, PERSISTENT_VOLUMES)
    assert "edited" in names(scene, VOLUME_SNAPSHOT_CONTENTS)


async def test_a_bug_that_one_object_triggers_does_not_end_the_leader(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = open_scene("node-a")

    async def fail(*_: object, **__: object) -> dict[str, LeakedObjects]:
        raise KeyError("namespace")

    with monkeypatch.context() as patched:
        patched.setattr("nodeagent.leader.recovery.garbage_collector.list_leaked_objects", fail)
        async with scene.dispatching() as dispatcher:
            await scene.until(lambda: "KeyError('namespace')" in str(dispatcher.report()))
            await asyncio.sleep(60)
            patched.undo()
            put(scene, PODS, "c", owner="c")
            await scene.until(lambda: names(scene, PODS) == [], seconds=60)
    failures = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in failures] == ["garbage collection failed, will retry: 'namespace'"]


@pytest.mark.parametrize(
    ("transfer", "left"),
    [
        pytest.param(entry("du", node_label="n", finalizer=True, phase=Phase.ACCEPTED), True, id="accepted"),
        pytest.param(entry("du", node_label="n", finalizer=True, phase=Phase.COMPLETED), True, id="clean-up is due"),
        pytest.param(entry("du", phase=Phase.COMPLETED), False, id="released"),
        pytest.param(entry("du"), False, id="without an agent"),
    ],
)
def test_only_a_transfer_that_may_have_leaked_objects_causes_a_collection(transfer: object, left: bool) -> None:
    assert may_have_leaked({"du": transfer}, {}) is left  # type: ignore[dict-item] # an entry
    assert may_have_leaked({"du": transfer}, {"du": transfer}) is False  # type: ignore[dict-item] # an entry


@pytest.mark.parametrize("labels", [{}, {OWNER_UID_LABEL: "gone"}], ids=["of a snapshot", "of a restore"])
async def test_a_volume_that_cannot_be_deleted_is_named_with_its_reason(labels: dict[str, str]) -> None:
    scene = open_scene("node-a")
    leave_backup(scene, "gone")
    volume = scene.kube.objects(PERSISTENT_VOLUMES)[0]
    volume["metadata"]["labels"] = labels
    volume["spec"]["claimRef"] |= {"namespace": "velero", "name": "gone"}
    scene.kube.put(volume | {"status": {"phase": "Failed", "message": "it is\nin use"}})
    for resource in (PODS, PERSISTENT_VOLUME_CLAIMS):
        await scene.client.delete(resource, "velero", "gone")
    (content,) = scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
    content["metadata"]["annotations"][VOLUME_ANNOTATION] = "pv-gone"
    scene.kube.put(content)
    leaked = await list_leaked_objects(scene.client, "velero")
    message = await delete_leaked_objects(scene.client, leaked["gone"])
    of = "" if labels else " of the snapshot"
    assert message == f"PersistentVolume pv-gone{of} is being deleted: it is in use"
