"""The settings of the next attempt, and what an expose copies of tenants' annotations and labels."""

import logging
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS
from core.models.names import ATTEMPTS_ANNOTATION, OWNER_KIND_ANNOTATION
from core.models.phases import Attempts, Interruption, InterruptionCause, RetryRules
from core.models.transfers import DataUpload
from core.models.units import parse_quantity
from exposer.settings import DEFAULT_EXCLUDED, BackupPVCSettings, ExposeSettings, PodSettings
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import restore_request, snapshot_request
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.steps import claim, expose
from tests.exposer.test_csi_snapshot import only
from tests.exposer.test_sources_handover import expose_until
from tests.nodeagent.support.transfers import data_upload
from tests.support.objects import JsonDict

_OOM = InterruptionCause.OUT_OF_MEMORY


def _upload(*causes: InterruptionCause) -> DataUpload:
    attempts = Attempts()
    for cause in causes:
        attempts = attempts.interrupt(Interruption(at=datetime(2026, 1, 2, tzinfo=UTC), cause=cause))
    marks = {ATTEMPTS_ANNOTATION: attempts.to_json()} if causes else {}
    return DataUpload.parse(data_upload(status={"phase": "InProgress"}, annotations=marks))


def _resources(resources: JsonDict, rules: RetryRules, *causes: InterruptionCause) -> JsonDict:
    retries = {"DataUpload": rules, "DataDownload": RetryRules(oom_memory_factor=9)}
    settings = ExposeSettings(AgentTemplate("mover:1"), PodSettings(resources=resources), retries=retries)
    return settings.for_attempt(_upload(*causes)).pod.resources


_HALF = {"limits": {"cpu": "2", "memory": "2Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}


@pytest.mark.parametrize(
    ("rules", "causes", "expected"),
    [
        pytest.param({}, [], ("2Gi", "1Gi"), id="none"),
        pytest.param({}, [InterruptionCause.KILLED], ("2Gi", "1Gi"), id="killed"),
        pytest.param({}, [InterruptionCause.EVICTED] * 3, ("2Gi", "1Gi"), id="evicted"),
        pytest.param({}, [_OOM], ("3072Mi", "1536Mi"), id="once"),
        pytest.param({}, [_OOM, _OOM, InterruptionCause.KILLED], ("4608Mi", "2304Mi"), id="twice"),
        pytest.param({}, [_OOM] * 3, ("6912Mi", "3456Mi"), id="three times"),
        pytest.param({}, [_OOM] * 4, ("8192Mi", "4096Mi"), id="four times the limit at most"),
        pytest.param({}, [_OOM] * 9, ("8192Mi", "4096Mi"), id="again and again"),
        pytest.param({"oom_memory_factor": 1}, [_OOM] * 2, ("2Gi", "1Gi"), id="a factor of one"),
    ],
)
def test_memory_grows_with_each_data_mover_that_ran_out_of_it(
    rules: JsonDict, causes: list[InterruptionCause], expected: tuple[str, str]
) -> None:
    limit, request = expected
    grown = {"limits": {"cpu": "2", "memory": limit}, "requests": {"cpu": "1", "memory": request}}
    assert _resources(_HALF, RetryRules(**rules), *causes) == grown


@pytest.mark.parametrize(
    ("most", "expected"),
    [("3Gi", "3072Mi"), ("20Gi", "20480Mi"), ("4G", "3814Mi"), ("1Gi", "2Gi"), ("2Gi", "2Gi"), ("2000Gi", "204800Mi")],
)
def test_the_configured_maximum_replaces_the_default_one(most: str, expected: str) -> None:
    rules = RetryRules(oom_memory_factor=10, oom_memory_limit_max=most)
    assert _resources(_HALF, rules, _OOM, _OOM)["limits"]["memory"] == expected


def test_only_a_limit_that_is_set_grows() -> None:
    for resources in ({}, {"requests": {"memory": "1Gi"}}, {"limits": {"cpu": "1"}}):
        assert _resources(resources, RetryRules(), _OOM) == resources
    resources = {"limits": {"memory": "512Mi", "ephemeral-storage": "8Gi"}, "requests": {"cpu": "1"}}
    grown = {"limits": {"memory": "768Mi", "ephemeral-storage": "8Gi"}, "requests": {"cpu": "1"}}
    assert _resources(resources, RetryRules(), _OOM) == grown


@given(
    limit=st.integers(1, 2**45),
    share=st.floats(0, 1),
    factor=st.floats(1, 10),
    most=st.integers(1, 2**45) | st.none(),
    times=st.integers(1, 10),
)
def test_a_grown_limit_covers_its_request_and_keeps_to_its_maximum(
    limit: int, share: float, factor: float, most: int | None, times: int
) -> None:
    request = int(limit * share)
    resources = {"limits": {"memory": str(limit)}, "requests": {"memory": str(request)}}
    rules = RetryRules(oom_memory_factor=factor, oom_memory_limit_max="" if most is None else str(most))
    grown = _resources(resources, rules, *[_OOM] * times)
    after, needed = (parse_quantity(grown[part]["memory"]) for part in ("limits", "requests"))
    assert needed <= after <= max(Decimal(limit), Decimal(most or 4 * limit))
    # Whole MiB.
    assert after > limit - 2**20


DENIED = {
    "trident.netapp.io/cloneFromPVC": "another-transfer",
    "trident.netapp.io/cloneFromSnapshot": "another",
    "trident.netapp.io/importOriginalName": "volume",
    "trident.netapp.io/notManaged": "true",
    "trident.netapp.io/shareFromPVC": "velero/other",
    "cdi.kubevirt.io/storage.import.endpoint": "http://storage",
    "k8s.io/CloneRequest": "velero/other",
    "cleanup.kyverno.io/ttl": "1h",
    "janitor/ttl": "1h",
    "app.kubernetes.io/instance": "app",
    "applyset.kubernetes.io/part-of": "set",
    "argocd.argoproj.io/tracking-id": "app",
    "kapp.k14s.io/app": "1",
    "objectset.rio.cattle.io/hash": "h",
    "meta.helm.sh/release-name": "app",
    "kubectl.kubernetes.io/last-applied-configuration": "{}",
    "nodeagent.io/snapshot-volume": "pv",
}
KEPT = {
    "trident.netapp.io/unixPermissions": "777",
    "trident.netapp.io/snapshotDirectory": "true",
    "volume.beta.kubernetes.io/storage-class": "hostpath",
    "app": "data",
}
CONTROLLERS = {
    "snapshot.storage.kubernetes.io/volumesnapshot-being-created": "yes",
    "groupsnapshot.storage.kubernetes.io/volumeGroupSnapshotHandle": "h",
}
BINDING = {"pv.kubernetes.io/bind-completed": "yes", "volume.kubernetes.io/storage-provisioner": "of the target"}
PROVISIONED = {"volume.kubernetes.io/storage-provisioner": "csi"}


async def restored_claim(scene: RestoreScene) -> JsonDict:
    meta: JsonDict = {"annotations": DENIED | KEPT | BINDING, "labels": DENIED | KEPT}
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", **meta)
    await expose(scene)
    found: JsonDict = claim(scene, "velero", "r2-9nft8")["metadata"]
    return found


async def backup_snapshot(scene: BackupScene) -> JsonDict:
    annotations = DENIED | KEPT | CONTROLLERS
    await scene.world.patch(VOLUME_SNAPSHOTS, "app/velero-data-lwkc4", annotations=annotations)
    await expose(scene)
    found: JsonDict = only(scene, VOLUME_SNAPSHOTS)["metadata"]
    return found


async def test_a_restore_pvc_has_what_shapes_the_volume_and_nothing_that_is_acted_upon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [entry for entry in DEFAULT_EXCLUDED if not any(key.startswith(entry) for key in DENIED)] == []
    scene = RestoreScene()
    with caplog.at_level(logging.DEBUG, logger="exposer.settings"):
        meta = await restored_claim(scene)
    assert meta["annotations"] == KEPT | PROVISIONED | {OWNER_KIND_ANNOTATION: "DataDownload"}
    assert meta["labels"] == KEPT | {"velero.io/restore-name": "r2"} | scene.request.owner.temporary_labels
    line = "did not copy labels of PersistentVolumeClaim app3/data: " + ", ".join(sorted(DENIED))
    assert line in caplog.messages


async def test_a_backup_snapshot_has_the_annotations_of_its_source_less_those_of_controllers() -> None:
    scene = BackupScene()
    meta = await backup_snapshot(scene)
    assert meta["annotations"] == KEPT
    assert meta["labels"] == scene.request.owner.temporary_labels


async def test_the_configured_list_replaces_the_default() -> None:
    excluded = ("trident.netapp.io/unix",)
    kept = {key: value for key, value in (DENIED | KEPT).items() if key != "trident.netapp.io/unixPermissions"}
    restore, backup = RestoreScene(), BackupScene()
    restore.request = restore_request(excluded_metadata=excluded)
    backup.request = snapshot_request(excluded_metadata=excluded)
    claimed = (await restored_claim(restore))["annotations"]
    assert claimed == kept | PROVISIONED | {OWNER_KIND_ANNOTATION: "DataDownload"}
    assert (await backup_snapshot(backup))["annotations"] == kept


async def test_a_backup_snapshot_without_its_source_has_no_annotations() -> None:
    """Its owner may delete the source once its content is shared."""
    scene = BackupScene(policy="Retain")
    await expose_until(scene, "shared")
    await scene.world.delete(VOLUME_SNAPSHOTS, "app/velero-data-lwkc4", settle=True)
    await expose(scene)
    assert "annotations" not in only(scene, VOLUME_SNAPSHOTS)["metadata"]


async def test_annotations_of_the_administrator_are_never_left_out() -> None:
    scene = BackupScene()
    settings = BackupPVCSettings(annotations=DENIED | KEPT)
    scene.request = snapshot_request(backup_pvcs={"hostpath": settings})
    await expose(scene)
    annotations = only(scene, PERSISTENT_VOLUME_CLAIMS)["metadata"]["annotations"]
    assert annotations == DENIED | KEPT | PROVISIONED | {OWNER_KIND_ANNOTATION: "DataUpload"}
