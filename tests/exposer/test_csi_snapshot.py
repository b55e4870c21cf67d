"""Expose, withdrawal and cleanup of CSI snapshots; objects of a finished transfer are not left behind."""

import json
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
from core.models.base import parse_time
from core.models.phases import Interruption, InterruptionCause
from exposer.causes import CauseFinder
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.manifests import SOURCE_ANNOTATION
from exposer.model import NotOwnerError, Pending
from exposer.settings import BackupPVCSettings, PlacementRule, PlacementRules
from tests.exposer.support.cuts import CUTS, Cut, cut_short, interruptions
from tests.exposer.support.inputs import snapshot_request, template
from tests.exposer.support.scenes import HANDLE, SOURCE_CONTENT, BackupScene, RestoreScene
from tests.exposer.support.steps import AnyScene, GuardAt, check, clean_up, ensure, expose
from tests.exposer.support.steps import assert_clean as assert_clean_restore
from tests.exposer.support.world import World, no_guard
from tests.nodeagent.support.hand_clock import HandClock
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


def only(scene: BackupScene, resource: Resource, name: str = "b1-q9txn") -> JsonDict:
    return scene.world.find(resource, name)


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


async def test_cleanup_keeps_the_next_snapshot_of_the_same_name() -> None:
    """A client may create it as soon as the transfer is Completed, before the cleanup has finished."""
    scene = BackupScene()
    requested_at = scene.request.requested_at
    assert requested_at is not None
    await expose(scene)
    stamp = (requested_at + timedelta(seconds=1)).isoformat()
    spec = {"source": {"persistentVolumeClaimName": "data"}}
    scene.world.put(VOLUME_SNAPSHOTS, "velero-data-lwkc4", namespace="app", creationTimestamp=stamp, spec=spec)
    await clean_up(scene)
    assert scene.world.names() == BYSTANDERS | {"VolumeSnapshot app/velero-data-lwkc4"}


@pytest.mark.parametrize("written", [None, "garbage"], ids=["missing", "invalid"])
async def test_cleanup_works_without_the_recorded_source(written: str | None) -> None:
    scene = BackupScene()
    await expose(scene)
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, "b1-q9txn", annotations={SOURCE_ANNOTATION: written})
    await clean_up(scene)
    assert_clean(scene)


@CUTS
async def test_an_expose_interrupted_at_any_request_continues(applied: bool) -> None:
    async for scene in interruptions(BackupScene, expose, applied=applied, least=15):
        await expose(scene)
        assert_exposed(scene)


@CUTS
async def test_a_source_in_the_agents_namespace_may_have_the_name_of_its_transfer(applied: bool) -> None:
    own = partial(BackupScene, source=("velero", "b1-q9txn"))
    async for scene in interruptions(own, expose, applied=applied, least=15):
        await expose(scene)
        assert scene.world.handles == {HANDLE, "other"}
        assert scene.world.names() >= EXPOSE_OBJECTS
        await clean_up(scene)
        assert scene.world.handles == {"other"}
        assert EXPOSE_OBJECTS.isdisjoint(scene.world.names())
        assert scene.world.violations == []


@CUTS
async def test_a_cleanup_interrupted_at_any_request_continues(applied: bool) -> None:
    retained = partial(BackupScene, reclaim="Retain")
    async for scene in interruptions(retained, clean_up, applied=applied, least=20, prepare=expose):
        await clean_up(scene)
        assert_clean(scene)


@pytest.mark.parametrize(
    ("own", "taken"), [(True, False), (False, False), (True, True)], ids=["own", "another's", "snapshot taken"]
)
async def test_the_error_of_the_content_is_the_reason_if_the_snapshot_reports_none(*, own: bool, taken: bool) -> None:
    """Another's is not shown: a tenant may be able to name it in the status of the snapshot.

    Once the storage has taken the snapshot, the content is not read: that may be for hours.
    """
    scene = BackupScene(ready=False)
    status = {"boundVolumeSnapshotContentName": SOURCE_CONTENT}
    status |= {"creationTime": "2026-11-21T12:00:00Z"} if taken else {}
    await scene.world.patch(VOLUME_SNAPSHOTS, "app/velero-data-lwkc4", status=status)
    reference: JsonDict = {} if own else {"volumeSnapshotRef": {"name": "other"}}
    error = {"error": {"message": "rpc error:\n quota exceeded"}}
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, status=error, spec=reference)
    found = await ensure(scene)
    place, shown = "VolumeSnapshot app/velero-data-lwkc4 is not ready", own and not taken
    assert found.reason == ("SnapshotError" if shown else "SnapshotNotReady")
    assert found.message == (f"{place}: rpc error: quota exceeded" if shown else f"{place} yet")
    assert EXPOSE_OBJECTS.isdisjoint(scene.world.names())


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
    scene, place = BackupScene(), f"{namespace}/{name}"
    await scene.world.patch(resource, place, finalizers=None)
    await scene.world.delete(resource, place)
    for step in (check, ensure):
        with pytest.raises(ExposeError, match=rf"{resource.kind} .*{name} does not exist"):
            await step(scene)


async def test_a_ready_source_passes_the_check_before_and_after_it_was_taken_over() -> None:
    scene = BackupScene()
    assert await check(scene) is None
    await expose(scene)
    assert await check(scene) is None


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


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_pod_matches_its_pvc_when_the_configuration_changes_in_between(read_only: bool) -> None:
    """A ReadOnlyMany PVC can only be mounted read-only."""
    scene = BackupScene()
    scene.request = snapshot_request(backup_pvcs={"hostpath": BackupPVCSettings(read_only=read_only)})
    scene.world.kube.fail_next("POST", "/pods", "lost")
    assert await cut_short(expose(scene))
    scene.request = snapshot_request(backup_pvcs={"hostpath": BackupPVCSettings(read_only=not read_only)})
    pod = (await expose(scene)).pod["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"].get("readOnly", False) is read_only
    assert pod["containers"][0]["volumeMounts"][-1].get("readOnly", False) is read_only


async def test_a_backup_runs_where_rules_and_the_sources_zone_match() -> None:
    scene = BackupScene(binding="WaitForFirstConsumer")
    zone, pool = (NodeRequirement(key=key, operator="In", values=["a"]) for key in ("zone", "pool"))
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    scene.world.put(PERSISTENT_VOLUMES, "pvc-source", spec={"nodeAffinity": {"required": required}})
    scene.request = snapshot_request(nodes=PlacementRules((PlacementRule((pool,)),)))
    affinity = (await expose(scene)).pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][:2] == [zone, pool]


async def test_a_source_content_that_stays_is_named_with_its_reason() -> None:
    scene = BackupScene()
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)
    await expose(scene)
    content["status"]["error"] = {"message": "the driver\nrefuses"}
    scene.world.kube.put(content)
    await scene.world.delete(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT)
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


GUARDED = [*["from the cache"] * 2, *["with a read"] * 2, *["from the cache"] * 2, "with a read"]
"""Content and snapshot, handover in two runs; PVC and pod."""


@pytest.mark.parametrize(
    ("build", "at"), [*((BackupScene, at + 1) for at in range(len(GUARDED))), *((RestoreScene, at) for at in (1, 2, 3))]
)
async def test_objects_of_a_finished_transfer_are_deleted(build: type[AnyScene], at: int) -> None:
    scene = build()
    with pytest.raises(NotOwnerError):
        await expose(scene, guard=GuardAt(at, ended=True))
    await scene.world.settle()
    if isinstance(scene, RestoreScene):
        assert_clean_restore(scene)
    else:
        assert EXPOSE_OBJECTS.isdisjoint(scene.world.names())


@pytest.mark.parametrize("at", range(1, len(GUARDED) + 1))
async def test_another_agent_continues_with_the_objects(at: int) -> None:
    scene = BackupScene()
    with pytest.raises(NotOwnerError):
        await expose(scene, guard=GuardAt(at, ended=False))
    await expose(scene)
    assert_exposed(scene)


async def test_the_guard_is_called_before_each_write_and_with_a_read_before_each_deletion() -> None:
    guard = GuardAt(99, ended=True)
    await expose(BackupScene(), guard=guard)
    assert guard.calls == GUARDED


_AT = parse_time("2026-11-21T12:00:00Z")


def grace_of_deleted_pods(scene: BackupScene) -> list[int | None]:
    deletions = [one for one in scene.world.kube.requests if one.method == "DELETE" and "/pods/" in one.path]
    return [json.loads(one.body or b"").get("gracePeriodSeconds") for one in deletions]


async def withdraw(scene: BackupScene, interruption: Interruption) -> None:
    await scene.world.until_none(lambda: scene.exposer().withdraw(scene.request, interruption, no_guard))


@pytest.mark.parametrize(
    ("cause", "terminated", "forced", "same"),
    [
        pytest.param(InterruptionCause.KILLED, True, False, True, id="only the mover ended"),
        pytest.param(InterruptionCause.EVICTED, True, False, False, id="it was evicted"),
        pytest.param(InterruptionCause.NODE_LOST, False, True, False, id="its node is lost"),
    ],
)
async def test_a_backup_is_withdrawn_and_exposed_again(
    cause: InterruptionCause, terminated: bool, forced: bool, same: bool
) -> None:
    scene = BackupScene()
    await expose(scene)
    claim = only(scene, PERSISTENT_VOLUME_CLAIMS)
    await withdraw(scene, Interruption(at=_AT, cause=cause, terminated=terminated))
    assert scene.world.kube.objects(PODS) == []
    assert grace_of_deleted_pods(scene) == [0 if forced else None]
    left = [one["metadata"]["uid"] for one in scene.world.kube.objects(PERSISTENT_VOLUME_CLAIMS)]
    assert (claim["metadata"]["uid"] in left) is same
    await expose(scene)
    await scene.world.settle()
    assert_exposed(scene)


async def test_a_pod_that_its_kubelet_does_not_end_holds_no_backup() -> None:
    scene, clock = BackupScene(), HandClock()
    exposer = CSISnapshotExposer(scene.world.client, CauseFinder(scene.world.client, clock))
    await expose(scene)
    pod = only(scene, PODS)
    await scene.world.delete(PODS, "velero/b1-q9txn")
    for clock.seconds in (0.0, 119.0, 120.0):
        assert isinstance(await exposer.ensure(scene.request, GuardAt(99, ended=False)), Pending)
    assert grace_of_deleted_pods(scene) == [None, 0]
    await expose(scene)
    assert pod["metadata"]["uid"] != only(scene, PODS)["metadata"]["uid"]


async def test_the_snapshot_is_deleted_after_the_volumes_of_all_attempts() -> None:
    """A volume can be deleted only once it is detached from the lost node."""
    scene = BackupScene()
    await expose(scene)
    scene.world.reclaims = False
    await withdraw(scene, Interruption(at=_AT, cause=InterruptionCause.NODE_LOST, terminated=False))
    await expose(scene)
    await scene.world.settle()
    (first, second) = [one["metadata"]["name"] for one in scene.world.kube.objects(PERSISTENT_VOLUMES)]
    await scene.world.patch(PERSISTENT_VOLUMES, first, status={"phase": "Failed", "message": "it is\nin use"})
    for _ in range(4):
        pending = await scene.exposer().clean_up(scene.request)
        await scene.world.settle()
    assert pending == Pending("CleaningUp", f"PersistentVolume {first} of the snapshot is being deleted: it is in use")
    assert "VolumeSnapshot velero/b1-q9txn" in scene.world.names()
    assert scene.world.violations == []
    assert second in scene.world.disks
    scene.world.reclaims = True
    await clean_up(scene)
    assert_clean(scene)
