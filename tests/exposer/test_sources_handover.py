"""The snapshot on the storage outlives a transfer as its deletion policy says, unless its handover was finished."""

from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from exposer.manifests import SOURCE_ANNOTATION
from exposer.model import NotOwnerError, Pending
from tests.exposer.support.cuts import Cut, cut_short
from tests.exposer.support.inputs import snapshot_request
from tests.exposer.support.scenes import HANDLE, SOURCE_CONTENT, BackupScene
from tests.exposer.support.steps import GuardAt, check, clean_up, collect, ensure, expose
from tests.exposer.support.world import World
from tests.exposer.test_csi_snapshot import BYSTANDERS, GUARDED, assert_clean, assert_exposed, only

SNAPSHOT = "VolumeSnapshot app/velero-data-lwkc4"
CONTENT = f"VolumeSnapshotContent /{SOURCE_CONTENT}"
_WRITES = ("shared", "with a snapshot", "set to Retain", "snapshot deleted", "handed over", "with a PVC", "with a pod")
STAGES = ("untouched", *_WRITES)
"""What the last write of an interrupted expose has left."""
by_stage = pytest.mark.parametrize("stage", STAGES)
by_end = pytest.mark.parametrize("end", [clean_up, collect], ids=["cleanup", "garbage collection"])
by_policy = pytest.mark.parametrize("policy", ["Delete", "Retain"])


End = Callable[[BackupScene], Awaitable[None]]


def source_content(scene: BackupScene) -> JsonDict | None:
    contents = scene.world.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
    return next((each for each in contents if each["metadata"]["name"] == SOURCE_CONTENT), None)


def is_handed_over(scene: BackupScene) -> bool:
    content = source_content(scene)
    return content is None or "deletionTimestamp" in content["metadata"]


def assert_retained(scene: BackupScene) -> None:
    """Assert that the source content is as it was found, that its handle exists, and that nothing of ours is left."""
    content = source_content(scene)
    assert content is not None
    assert content["spec"]["deletionPolicy"] == "Retain"
    assert scene.world.handles == {HANDLE, "other"}
    assert scene.world.names() == BYSTANDERS | {CONTENT}
    assert scene.world.violations == []


def assert_ended(scene: BackupScene, policy: str, *, handed_over: bool) -> None:
    if policy == "Retain" and not handed_over:
        assert_retained(scene)
    else:
        assert_clean(scene)


def writes(cut: Cut) -> list[int]:
    """Return the numbers of the writes: what lies between two of them changes nothing."""
    return [number for number, call in enumerate(cut.calls, start=1) if not call.startswith("GET")]


async def expose_until(scene: BackupScene, stage: str) -> bool:
    """Expose until `stage`, and return whether the handover was finished then."""
    if stage != "untouched":
        at = (await find_stages())[stage]
        assert await cut_short(expose(scene, Cut(scene.world.kube, at, applied=True)))
    handed_over = is_handed_over(scene)
    await scene.world.settle()
    return handed_over


async def find_stages() -> dict[str, int]:
    """Return the number of the write that ends each stage of an expose."""
    scene = BackupScene()
    cut = Cut(scene.world.kube)
    await expose(scene, cut)
    return dict(zip(_WRITES, writes(cut), strict=True))


@by_policy
@by_stage
async def test_a_transfer_that_ends_in_any_stage_keeps_or_deletes_its_snapshot(policy: str, stage: str) -> None:
    """So it does where its cleanup is interrupted after any of its requests."""
    scene = BackupScene(policy=policy)
    handed_over = await expose_until(scene, stage)
    calm = Cut(scene.world.kube)
    await clean_up(scene, calm)
    assert_ended(scene, policy, handed_over=handed_over)
    for at in writes(calm):
        scene = BackupScene(policy=policy)
        await expose_until(scene, stage)
        assert await cut_short(clean_up(scene, Cut(scene.world.kube, at, applied=True)))
        await scene.world.settle()
        await clean_up(scene)
        assert_ended(scene, policy, handed_over=handed_over)


@by_policy
@by_stage
async def test_garbage_collection_in_any_stage_restores_the_policy_that_was_found(policy: str, stage: str) -> None:
    scene = BackupScene(policy=policy)
    handed_over = await expose_until(scene, stage)
    source_is_there = SNAPSHOT in scene.world.names()
    await collect(scene)
    if source_is_there:
        assert only(scene, VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)["spec"]["deletionPolicy"] == policy
        assert scene.world.names() == BYSTANDERS | {SNAPSHOT, CONTENT}
        assert scene.world.handles == {HANDLE, "other"}
    else:
        assert_ended(scene, policy, handed_over=handed_over)


@by_end
async def test_a_snapshot_is_deleted_although_the_driver_did_not_answer_before(end: End) -> None:
    """The transfer fails by its timeout, or is canceled: the sidecar has not seen the backup content."""
    scene = BackupScene()
    scene.world.answers = False
    for _ in range(8):
        found = await ensure(scene)
        await scene.world.settle()
    assert found.message == "VolumeSnapshot velero/b1-q9txn is not ready yet"
    for answers in (False, True):
        scene.world.answers = answers
        with nullcontext() if answers else pytest.raises(AssertionError, match=r"^never "):
            await end(scene)
    assert_clean(scene)


@by_stage
async def test_a_source_content_that_another_client_deletes_leaves_the_snapshot_to_the_backup(stage: str) -> None:
    """It is terminating for as long as its VolumeSnapshot exists, which the handover deletes."""
    scene = BackupScene()
    await expose_until(scene, stage)
    await scene.world.delete(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, settle=True)
    await expose(scene)
    assert_exposed(scene)


@pytest.mark.parametrize("stage", ["shared", "with a snapshot"])
@by_end
async def test_a_retained_snapshot_stays_if_another_client_deletes_its_content(stage: str, end: End) -> None:
    """The handover has not begun to delete it: it is terminating, and its VolumeSnapshot exists."""
    scene = BackupScene(policy="Retain")
    await expose_until(scene, stage)
    await scene.world.delete(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, settle=True)
    await end(scene)
    assert scene.world.handles == {HANDLE, "other"}
    assert "VolumeSnapshotContent /b1-q9txn" not in scene.world.names()


async def test_a_content_whose_snapshot_alone_was_deleted_is_kept() -> None:
    """With Retain, its owner deletes the VolumeSnapshot in order to keep the content."""
    scene = BackupScene(policy="Retain")
    await expose_until(scene, "with a snapshot")
    await scene.world.delete(VOLUME_SNAPSHOTS, "app/velero-data-lwkc4", settle=True)
    await collect(scene)
    assert_retained(scene)


@by_policy
async def test_an_earlier_version_recorded_no_policy(policy: str) -> None:
    """Its handovers are finished and deleted, as that version does."""
    scene = BackupScene(policy=policy)
    await expose_until(scene, "set to Retain")
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS)
    recorded = content["metadata"]["annotations"][SOURCE_ANNOTATION].replace(f',"deletionPolicy":"{policy}"', "")
    assert "deletionPolicy" not in recorded
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, "b1-q9txn", annotations={SOURCE_ANNOTATION: recorded})
    await clean_up(scene)
    assert_clean(scene)


class AtOnce(Cut):
    """A transport after whose deletion of a VolumeSnapshot the controllers run before the next request."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kube)
        self._world = world

    async def request(self, request: Request) -> Response:
        response = await super().request(request)
        if request.method == "DELETE" and f"/{VOLUME_SNAPSHOTS.plural}/" in request.path:
            await self._world.settle()
        return response


@by_policy
@pytest.mark.parametrize("at", range(1, len(GUARDED) + 1))
async def test_an_expose_that_outlives_its_transfer_deletes_no_snapshot_that_is_not_its_own(
    policy: str, at: int
) -> None:
    """The cleanup of the transfer has already ended when a late agent creates the objects again."""
    scene = BackupScene(policy=policy)
    with pytest.raises(NotOwnerError):
        await expose(scene, AtOnce(scene.world), GuardAt(at, ended=True))
    handed_over = is_handed_over(scene)
    await scene.world.settle()
    assert "VolumeSnapshotContent /b1-q9txn" not in scene.world.names()
    if not handed_over and (policy == "Retain" or SNAPSHOT in scene.world.names()):
        assert scene.world.handles == {HANDLE, "other"}
        assert only(scene, VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)["spec"]["deletionPolicy"] == policy
    else:
        assert scene.world.handles == {"other"}


@by_policy
async def test_an_expose_that_outlives_its_transfer_deletes_no_source_that_another_agent_keeps(policy: str) -> None:
    """Content and snapshot exist already, so that nothing is created before the handover."""
    scene = BackupScene(policy=policy)
    await expose_until(scene, "with a snapshot")
    names, content = scene.world.names(), source_content(scene)
    with pytest.raises(NotOwnerError):
        await scene.exposer().ensure(scene.request, GuardAt(1, ended=False))
    assert (scene.world.names(), source_content(scene)) == (names, content)


OTHERS = {"namespace": "other", "name": "other", "uid": "uid-other"}


@pytest.mark.parametrize("field", OTHERS)
@pytest.mark.cause("snapshot-of-another")
async def test_a_content_of_another_snapshot_is_neither_used_nor_written_to(field: str) -> None:
    """A tenant may write the status of his VolumeSnapshot, and name any content in it."""
    scene = BackupScene(policy="Retain")
    reference = {"volumeSnapshotRef": {field: OTHERS[field]}}
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, spec=reference)
    before = source_content(scene)
    found = {"namespace": "app", "name": "velero-data-lwkc4", "uid": "uid-velero-data-lwkc4", field: OTHERS[field]}
    other = f"belongs to VolumeSnapshot {found['namespace']}/{found['name']} .UID {found['uid']}.$"
    message = f"^VolumeSnapshotContent {SOURCE_CONTENT} in the status of VolumeSnapshot app/velero-data-lwkc4 .*{other}"
    for step in (check, ensure):
        with pytest.raises(ExposeError, match=message):
            await step(scene)
    await scene.exposer().clean_up(scene.request)
    assert source_content(scene) == before


async def test_a_content_that_is_not_bound_yet_is_waited_for() -> None:
    """The UID of a content that an administrator created is set by the snapshot controller."""
    scene = BackupScene()
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, spec={"volumeSnapshotRef": {"uid": None}})
    text = f"VolumeSnapshot app/velero-data-lwkc4 is not bound to VolumeSnapshotContent {SOURCE_CONTENT} yet"
    assert await ensure(scene) == Pending("SnapshotNotReady", text)
    await scene.world.settle()
    await expose(scene)


@pytest.mark.cause("source-unknown")
async def test_a_source_without_class_or_volume_fails_at_once_and_is_named() -> None:
    scene = BackupScene(ready=False)
    unnamed = snapshot_request(storage_class="")
    with pytest.raises(ExposeError, match=r"^DataUpload velero/b1-q9txn has no csiSnapshot\.storageClass$"):
        await scene.exposer().check(unnamed, scene.world.client)
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app/data", spec={"volumeName": None})
    with pytest.raises(ExposeError, match=r"^PersistentVolumeClaim app/data has no PersistentVolume$"):
        await check(scene)
