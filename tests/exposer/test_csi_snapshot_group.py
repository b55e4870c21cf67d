"""Exposes of snapshots that were taken as a group, as a Velero server hands them over."""

from dataclasses import replace
from datetime import timedelta

from core.kube.resources import VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from exposer.model import Exposed, Pending
from tests.exposer.support.cuts import CUTS, interruptions
from tests.exposer.support.scenes import HANDLE, SOURCE_CONTENT, BackupScene
from tests.exposer.support.steps import clean_up, ensure, expose
from tests.exposer.test_csi_snapshot import BYSTANDERS, assert_clean, assert_exposed, only


def _in_group() -> BackupScene:
    """Return a scene whose source is in a group, as a Velero server leaves it: the group's own objects are gone.

    Source: external-snapshotter v8.6.0, buildVolumeSnapshotContentSpecForGroupSnapshot; Velero main,
    pkg/backup/actions/csi/pvc_action.go (updateVGSCreatedVS).
    """
    scene = BackupScene()
    scene.world.groups[HANDLE] = "group-1"
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)
    meta = {"annotations": {"groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle": "group-1"}}
    spec = {key: value for key, value in content["spec"].items() if key != "volumeSnapshotClassName"}
    status = content["status"] | {"volumeGroupSnapshotHandle": "group-1"}
    scene.world.kube.put(content | {"metadata": content["metadata"] | meta, "spec": spec, "status": status})
    snapshot = only(scene, VOLUME_SNAPSHOTS, "velero-data-lwkc4")
    named = snapshot["status"] | {"volumeGroupSnapshotName": "velero-db-x"}
    scene.world.kube.put(
        snapshot | {"spec": {"source": {"volumeSnapshotContentName": SOURCE_CONTENT}}, "status": named}
    )
    return scene


async def test_a_member_that_is_deleted_only_with_its_group_is_exposed_and_reported() -> None:
    scene = _in_group()
    said: list[str] = []

    async def step() -> Exposed | Pending:
        found: Exposed | Pending = await ensure(scene)
        if isinstance(found, Pending) and found.blocked:
            said.append(found.message)
        return found

    await scene.world.until_exposed(step)
    assert_exposed(scene)
    (message,) = said
    assert message.startswith("VolumeSnapshot velero/b1-q9txn is of the group group-1, whose snapshots driver hostpath")
    assert message.endswith(f" deletes only together: {HANDLE} stays on the storage")
    await clean_up(scene)
    assert scene.world.names() == BYSTANDERS
    assert scene.world.handles == {HANDLE, "other"}


async def test_a_member_of_a_group_that_the_driver_deletes_alone_is_deleted() -> None:
    scene = _in_group()
    scene.world.groups.clear()
    await expose(scene)
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS)
    assert not {"nodeagent.io/snapshot-group", "groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"} & set(
        content["metadata"]["annotations"]
    )
    await clean_up(scene)
    assert_clean(scene)


async def test_a_member_that_its_driver_refuses_to_delete_is_kept_and_reported_after_the_operation_timeout() -> None:
    scene = _in_group()
    scene.world.lists = False
    await expose(scene)
    exposer = scene.exposer()
    for _ in range(5):
        found = await exposer.clean_up(scene.request)
        await scene.world.settle()
    assert found is not None
    assert found.message.startswith("VolumeSnapshotContent b1-q9txn is being deleted")
    # The longest that the next one may take.
    found = await exposer.clean_up(replace(scene.request, operation_timeout=timedelta()))
    assert found is not None
    assert found.reason == "SnapshotInGroup"
    assert found.message.endswith(f" deletes only together: {HANDLE} stays on the storage")
    await scene.world.until_none(lambda: exposer.clean_up(scene.request))
    assert scene.world.names() == BYSTANDERS
    assert scene.world.handles == {HANDLE, "other"}


@CUTS
async def test_an_expose_of_a_member_that_is_interrupted_at_any_request_continues(applied: bool) -> None:
    async for scene in interruptions(_in_group, expose, applied=applied, least=20):
        await expose(scene)
        assert_exposed(scene)
        await clean_up(scene)
        assert scene.world.names() == BYSTANDERS
