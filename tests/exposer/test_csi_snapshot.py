"""Expose and cleanup of CSI snapshots."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from core.errors import ExposeError
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.types import NodeRequirement
from core.models.names import OWNER_UID_LABEL
from exposer.manifests import SOURCE_ANNOTATION
from exposer.model import Exposed, Pending
from exposer.settings import BackupPVCSettings, PlacementRule, PlacementRules
from tests.exposer.support.cuts import CUTS, Cut, cut_short, interruptions
from tests.exposer.support.inputs import snapshot_request, template
from tests.exposer.support.scenes import HANDLE, SOURCE_CONTENT, BackupScene
from tests.exposer.support.world import World, no_guard
from tests.support.objects import JsonDict

BYSTANDERS = {
    "PersistentVolumeClaim app/data",
    "VolumeSnapshot app/bystander",
    "VolumeSnapshotContent /snapcontent-bystander",
}
EXPOSE_OBJECTS = {
    "Pod velero/b1-q9txn",
    "PersistentVolumeClaim velero/b1-q9txn",
    "VolumeSnapshot velero/b1-q9txn",
    "VolumeSnapshotContent /b1-q9txn",
}


async def expose(scene: BackupScene, transport: Cut | None = None) -> Exposed:
    exposer = scene.exposer(transport)
    return await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))


async def clean_up(scene: BackupScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.clean_up(scene.request))


def only(scene: BackupScene, resource: Resource, name: str = "b1-q9txn") -> JsonDict:
    found: JsonDict = next(o for o in scene.world.kube.objects(resource) if o["metadata"]["name"] == name)
    return found


def assert_exposed(scene: BackupScene) -> None:
    """Assert that the snapshot was handed over, its volume is in the pod, and nothing else was changed."""
    volume = only(scene, PERSISTENT_VOLUME_CLAIMS)["spec"]["volumeName"]
    assert scene.world.names() == BYSTANDERS | EXPOSE_OBJECTS | {f"PersistentVolume /{volume}"}
    assert scene.world.handles == {HANDLE, "other"}
    assert scene.world.violations == []


def assert_clean(scene: BackupScene) -> None:
    """Assert that only other owners' objects are left, in the cluster and on its storage."""
    assert scene.world.names() == BYSTANDERS
    assert scene.world.handles == {"other"}
    assert scene.world.disks == set()
    assert scene.world.violations == []


async def test_a_snapshot_is_handed_over_and_exposed() -> None:
    scene = BackupScene()

    exposed = await expose(scene)

    assert_exposed(scene)
    assert exposed.pod["status"]["phase"] == "Running"
    claim = only(scene, PERSISTENT_VOLUME_CLAIMS)
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert claim["spec"]["dataSource"]["name"] == "b1-q9txn"
    assert only(scene, VOLUME_SNAPSHOT_CONTENTS)["spec"]["source"] == {"snapshotHandle": HANDLE}
    assert all(only(scene, r)["metadata"]["labels"][OWNER_UID_LABEL] == scene.request.owner.uid for r in (PODS,))


async def test_cleanup_keeps_the_next_snapshot_of_the_same_name() -> None:
    """A client may create it as soon as the transfer is Completed, before the cleanup has finished."""
    scene = BackupScene()
    requested_at = scene.request.requested_at
    assert requested_at is not None
    await expose(scene)
    scene.world.put(
        VOLUME_SNAPSHOTS,
        "velero-data-lwkc4",
        namespace="app",
        creationTimestamp=(requested_at + timedelta(seconds=1)).isoformat(),
        spec={"source": {"persistentVolumeClaimName": "data"}},
    )

    await clean_up(scene)

    assert scene.world.names() == BYSTANDERS | {"VolumeSnapshot app/velero-data-lwkc4"}


@pytest.mark.parametrize("written", [None, "garbage"], ids=["missing", "invalid"])
async def test_cleanup_works_without_the_recorded_source(written: str | None) -> None:
    scene = BackupScene()
    await expose(scene)
    note = {"metadata": {"annotations": {SOURCE_ANNOTATION: written}}}
    await scene.world.client.patch(VOLUME_SNAPSHOT_CONTENTS, "", "b1-q9txn", note)

    await clean_up(scene)

    assert_clean(scene)


@CUTS
async def test_an_expose_interrupted_at_any_request_continues(applied: bool) -> None:
    async for scene in interruptions(BackupScene, expose, applied=applied, least=15):
        await expose(scene)
        assert_exposed(scene)


@CUTS
async def test_an_expose_interrupted_at_any_request_is_cleaned_up(applied: bool) -> None:
    async for scene in interruptions(BackupScene, expose, applied=applied, least=15):
        await clean_up(scene)
        assert_clean(scene)


@CUTS
async def test_a_cleanup_interrupted_at_any_request_continues(applied: bool) -> None:
    retained = partial(BackupScene, reclaim="Retain")
    async for scene in interruptions(retained, clean_up, applied=applied, least=20, prepare=expose):
        await clean_up(scene)
        assert_clean(scene)


async def test_a_snapshot_that_is_not_ready_is_pending() -> None:
    scene = BackupScene(ready=False)

    assert await scene.exposer().ensure(scene.request, no_guard) == Pending(
        "SnapshotNotReady", "VolumeSnapshot app/velero-data-lwkc4 is not ready yet"
    )
    assert EXPOSE_OBJECTS.isdisjoint(scene.world.names())


@pytest.mark.parametrize(
    ("own", "taken"), [(True, False), (False, False), (True, True)], ids=["own", "another's", "snapshot taken"]
)
async def test_the_error_of_the_content_is_the_reason_if_the_snapshot_reports_none(*, own: bool, taken: bool) -> None:
    """Another's is not shown: a tenant may be able to name it in the status of the snapshot.

    Once the storage has taken the snapshot, the content is not read: that may be for hours.
    """
    scene = BackupScene(ready=False)
    status: JsonDict = {"status": {"boundVolumeSnapshotContentName": SOURCE_CONTENT}}
    status["status"] |= {"creationTime": "2026-11-21T12:00:00Z"} if taken else {}
    await scene.world.client.patch(VOLUME_SNAPSHOTS, "app", "velero-data-lwkc4", status)
    error: JsonDict = {"status": {"error": {"message": "rpc error:\n quota exceeded"}}}
    reference: JsonDict = {} if own else {"spec": {"volumeSnapshotRef": {"name": "other"}}}
    await scene.world.client.patch(VOLUME_SNAPSHOT_CONTENTS, "", SOURCE_CONTENT, error | reference)

    found = await scene.exposer().ensure(scene.request, no_guard)

    assert isinstance(found, Pending)
    place = "VolumeSnapshot app/velero-data-lwkc4 is not ready"
    assert found.message == (f"{place}: rpc error: quota exceeded" if own and not taken else f"{place} yet")


@pytest.mark.parametrize(
    ("resource", "namespace", "name"),
    [
        (VOLUME_SNAPSHOTS, "app", "velero-data-lwkc4"),
        (VOLUME_SNAPSHOT_CONTENTS, "", SOURCE_CONTENT),
        (PERSISTENT_VOLUME_CLAIMS, "app", "data"),
    ],
    ids=["snapshot", "content", "claim"],
)
async def test_a_missing_source_fails_the_expose(resource: Resource, namespace: str, name: str) -> None:
    scene = BackupScene()
    obj = only(scene, resource, name)
    await scene.world.client.patch(resource, namespace, name, {"metadata": {"finalizers": None}})
    await scene.world.client.delete(resource, namespace, name, uid=obj["metadata"]["uid"])

    exposer, client = scene.exposer(), scene.world.client
    for step in (exposer.check(scene.request, client), exposer.ensure(scene.request, no_guard)):
        with pytest.raises(ExposeError, match=rf"{resource.kind} .*{name} does not exist"):
            await step


async def test_a_ready_source_passes_the_check_before_and_after_it_was_taken_over() -> None:
    scene = BackupScene()

    assert await scene.exposer().check(scene.request, scene.world.client) is None
    await expose(scene)
    assert await scene.exposer().check(scene.request, scene.world.client) is None


@pytest.mark.parametrize(
    "resource", [VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, PERSISTENT_VOLUME_CLAIMS, PODS], ids=lambda r: r.kind
)
async def test_another_owners_object_of_the_name_is_reported_and_kept(resource: Resource) -> None:
    scene = BackupScene()
    namespace = {"namespace": "velero"} if resource.namespaced else {}
    source = {"source": {"volumeSnapshotContentName": "none"}, "volumeSnapshotRef": {}}
    scene.world.put(resource, "b1-q9txn", **namespace, uid="foreign", spec={"storageClassName": "none"} | source)

    with pytest.raises(ExposeError, match=f"{resource.kind} .*b1-q9txn already exists"):
        await expose(scene)
    await clean_up(scene)

    assert only(scene, resource)["metadata"]["uid"] == "foreign"


async def test_an_object_of_an_earlier_transfer_is_pending() -> None:
    scene = BackupScene()
    spec = {"storageClassName": "none"}
    labels = {OWNER_UID_LABEL: "earlier"}
    scene.world.put(PERSISTENT_VOLUME_CLAIMS, "b1-q9txn", namespace="velero", labels=labels, spec=spec)

    for _ in range(5):
        found = await scene.exposer().ensure(scene.request, no_guard)
        await scene.world.settle()

    assert isinstance(found, Pending)
    assert found.reason == "NameTaken"
    await scene.world.client.delete(PERSISTENT_VOLUME_CLAIMS, "velero", "b1-q9txn")
    await scene.world.settle()
    await expose(scene)


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_pod_matches_its_pvc_when_the_configuration_changes_in_between(read_only: bool) -> None:
    """A ReadOnlyMany PVC can only be mounted read-only."""
    scene = BackupScene()
    settings = BackupPVCSettings(read_only=read_only)
    scene.request = snapshot_request(backup_pvcs={"hostpath": settings})
    cut = Cut(scene.world.kube)
    await expose(scene, cut)
    position = cut.calls.index("POST /api/v1/namespaces/velero/pods") + 1

    scene = BackupScene()
    scene.request = snapshot_request(backup_pvcs={"hostpath": settings})
    assert await cut_short(expose(scene, Cut(scene.world.kube, position)))
    scene.request = snapshot_request(backup_pvcs={"hostpath": BackupPVCSettings(read_only=not read_only)})
    exposed = await expose(scene)

    pod = exposed.pod["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"].get("readOnly", False) is read_only
    assert pod["containers"][0]["volumeMounts"][-1].get("readOnly", False) is read_only


async def test_a_backup_runs_where_rules_and_the_sources_zone_match() -> None:
    scene = BackupScene(binding="WaitForFirstConsumer")
    zone, pool = (NodeRequirement(key=key, operator="In", values=["a"]) for key in ("zone", "pool"))
    terms = [{"matchExpressions": [zone]}]
    spec = {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}
    scene.world.put(PERSISTENT_VOLUMES, "pvc-source", spec=spec)
    scene.request = snapshot_request(nodes=PlacementRules((PlacementRule((pool,)),)))

    exposed = await expose(scene)

    affinity = exposed.pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][:2] == [zone, pool]


async def test_the_volume_is_deleted_before_the_snapshot() -> None:
    """While the volume is being reclaimed, the cleanup is pending and names it."""
    scene = BackupScene()
    await expose(scene)
    volume = only(scene, PERSISTENT_VOLUME_CLAIMS)["spec"]["volumeName"]
    messages: list[str] = []

    async def step() -> Pending | None:
        found = await scene.exposer().clean_up(scene.request)
        if found is not None:
            messages.append(found.message)
        return found

    scene.world.reclaims = False
    failed: JsonDict = {"status": {"phase": "Failed", "message": "it is\nin use"}}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", volume, failed)
    for _ in range(4):
        await step()
        await scene.world.settle()
    left = scene.world.names()
    scene.world.reclaims = True
    await scene.world.until_none(step)

    assert messages[3] == f"PersistentVolume {volume} of the snapshot is being deleted: it is in use"
    assert {"VolumeSnapshot velero/b1-q9txn", f"PersistentVolume /{volume}"} <= left
    assert_clean(scene)


async def test_a_source_content_that_stays_is_named_with_its_reason() -> None:
    scene = BackupScene()
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)
    await expose(scene)
    content["status"]["error"] = {"message": "the driver\nrefuses"}
    scene.world.kube.put(content)
    await scene.world.client.delete(VOLUME_SNAPSHOT_CONTENTS, "", SOURCE_CONTENT)

    for _ in range(10):
        pending = await scene.exposer().clean_up(scene.request)
        await scene.world.settle()

    assert pending is not None
    place, (finalizer,) = f"VolumeSnapshotContent {SOURCE_CONTENT}", content["metadata"]["finalizers"]
    assert pending.message == f"{place} is being deleted (finalizers: {finalizer}): the driver refuses"


async def test_a_check_sends_no_request_beside_its_reader() -> None:
    """It is repeated for each pending transfer, and the reader shares the attachments of the whole cluster."""
    scene = BackupScene()
    scene.request = snapshot_request(template=replace(template(), windows=True))
    client, reader = Cut(scene.world.kube), Cut(scene.world.kube)

    assert await scene.exposer(client).check(scene.request, World.client_over(reader)) is None

    assert not client.calls
    assert any(call.endswith("/volumeattachments") for call in reader.calls)
