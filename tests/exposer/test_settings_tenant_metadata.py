"""What an expose copies of tenants' annotations and labels, and what it leaves out."""

import logging

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS
from core.models.base import JsonDict
from core.models.names import OWNER_KIND_ANNOTATION
from exposer.settings import DEFAULT_EXCLUDED, BackupPVCSettings
from tests.exposer.support.inputs import restore_request, snapshot_request
from tests.exposer.support.restore_steps import claim
from tests.exposer.support.restore_steps import expose as expose_restore
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.test_csi_snapshot import expose, only
from tests.exposer.test_sources_handover import expose_until

DENIED = {
    "trident.netapp.io/cloneFromPVC": "another-transfer",
    "trident.netapp.io/cloneFromSnapshot": "another",
    "trident.netapp.io/importOriginalName": "volume",
    "trident.netapp.io/notManaged": "true",
    "trident.netapp.io/shareFromPVC": "velero/other",
    "cdi.kubevirt.io/storage.import.endpoint": "http://storage",
    "k8s.io/CloneRequest": "velero/other",
    "argocd.argoproj.io/tracking-id": "app",
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
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", {"metadata": meta})
    await expose_restore(scene)
    found: JsonDict = claim(scene, "velero", "r2-9nft8")["metadata"]
    return found


async def backup_snapshot(scene: BackupScene) -> JsonDict:
    meta: JsonDict = {"annotations": DENIED | KEPT | CONTROLLERS}
    await scene.world.client.patch(VOLUME_SNAPSHOTS, "app", "velero-data-lwkc4", {"metadata": meta})
    await expose(scene)
    found: JsonDict = only(scene, VOLUME_SNAPSHOTS)["metadata"]
    return found


def test_every_default_entry_is_tried() -> None:
    assert [entry for entry in DEFAULT_EXCLUDED if not any(key.startswith(entry) for key in DENIED)] == []


async def test_a_restore_pvc_has_what_shapes_the_volume_and_nothing_that_is_acted_upon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = RestoreScene()
    with caplog.at_level(logging.DEBUG, logger="exposer.settings"):
        meta = await restored_claim(scene)

    assert meta["annotations"] == KEPT | PROVISIONED | {OWNER_KIND_ANNOTATION: "DataDownload"}
    assert meta["labels"] == KEPT | {"velero.io/restore-name": "r2"} | scene.request.owner.labels
    line = "did not copy labels of PersistentVolumeClaim app3/data: " + ", ".join(sorted(DENIED))
    assert line in caplog.messages


async def test_a_backup_snapshot_has_the_annotations_of_its_source_less_those_of_controllers() -> None:
    scene = BackupScene()
    meta = await backup_snapshot(scene)

    assert meta["annotations"] == KEPT
    assert meta["labels"] == scene.request.owner.labels


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
    await scene.world.client.delete(VOLUME_SNAPSHOTS, "app", "velero-data-lwkc4")
    await scene.world.settle()

    await expose(scene)

    assert "annotations" not in only(scene, VOLUME_SNAPSHOTS)["metadata"]


async def test_annotations_of_the_administrator_are_never_left_out() -> None:
    scene = BackupScene()
    settings = BackupPVCSettings(annotations=DENIED | KEPT)
    scene.request = snapshot_request(backup_pvcs={"hostpath": settings})

    await expose(scene)

    annotations = only(scene, PERSISTENT_VOLUME_CLAIMS)["metadata"]["annotations"]
    assert annotations == DENIED | KEPT | PROVISIONED | {OWNER_KIND_ANNOTATION: "DataUpload"}
