"""Backups of devices, and by block: the volume is exposed as a device, and the driver asked what has changed of it."""

from dataclasses import replace

import pytest

from core.contract import SnapshotMetadata, TrackedSnapshot, VolumeMode
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    SNAPSHOT_METADATA_SERVICES,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from datamover.arguments import PodOptions, parse_arguments
from exposer.manifests import parse_source_annotation
from tests.exposer.support.scenes import HANDLE, SOURCE_CONTENT, BackupScene
from tests.exposer.support.steps import clean_up, expose
from tests.exposer.test_csi_snapshot import assert_clean, assert_exposed, only

_SPEC = {"address": "csi-snapshot-metadata.storage:6443", "audience": "driver", "caCert": "UEVN"}
_SERVICE = SnapshotMetadata(address="csi-snapshot-metadata.storage:6443", ca_cert="UEVN")
_TOKEN = {
    "name": "snapshot-metadata-token",
    "projected": {
        "sources": [{"serviceAccountToken": {"audience": "driver", "expirationSeconds": 600, "path": "token"}}]
    },
}


def _scene(*, by_block: bool = True) -> BackupScene:
    scene = BackupScene(mode="Block")
    scene.request = replace(scene.request, by_block=by_block)
    scene.world.put(SNAPSHOT_METADATA_SERVICES, "hostpath.csi.k8s.io", spec=_SPEC)
    return scene


async def _expose(scene: BackupScene) -> tuple[TrackedSnapshot | None, bool]:
    """Return what the mover reads from its arguments, and whether it has a token."""
    spec = (await expose(scene)).pod["spec"]
    (container,) = spec["containers"]
    options = parse_arguments(container["args"], {})
    assert isinstance(options, PodOptions)
    has_token = _TOKEN in spec["volumes"]
    mounts = [one for one in container["volumeMounts"] if one["name"] == _TOKEN["name"]]
    directory = "/var/run/secrets/nodeagent.io/snapshot-metadata"
    assert mounts == [{"name": _TOKEN["name"], "mountPath": directory, "readOnly": True}] * has_token
    return options.tracked, has_token


@pytest.mark.parametrize(
    ("mode", "by_block", "annotation"),
    [("Filesystem", True, "true"), ("Block", True, None), ("Block", False, None)],
    ids=["a file system by block", "a device by block", "a device"],
)
async def test_a_volume_of_either_mode_is_exposed_as_a_device(
    mode: str, by_block: bool, annotation: str | None
) -> None:
    """The provisioner must be told if the mode may change."""
    scene = BackupScene(mode=mode)
    scene.request = replace(scene.request, by_block=by_block)
    (container,) = (await expose(scene)).pod["spec"]["containers"]
    assert_exposed(scene)
    assert only(scene, PERSISTENT_VOLUME_CLAIMS)["spec"]["volumeMode"] == "Block"
    assert "--volume-mode=Block" in container["args"]
    assert "volumeDevices" in container
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS)
    key = "snapshot.storage.kubernetes.io/allow-volume-mode-change"
    assert content["metadata"]["annotations"].get(key) == annotation
    assert parse_source_annotation(content).volume_mode is VolumeMode(mode)
    await clean_up(scene)
    assert_clean(scene)


async def test_a_mover_gets_handles_service_and_token() -> None:
    assert await _expose(_scene()) == (TrackedSnapshot(HANDLE, "pvc-source", "b1-q9txn", _SERVICE), True)


async def test_another_data_mover_gets_nothing() -> None:
    assert await _expose(_scene(by_block=False)) == (None, False)


@pytest.mark.parametrize("forbidden", [False, True], ids=["absent", "forbidden"])
async def test_a_driver_without_the_service_is_known_by_its_handles(forbidden: bool) -> None:
    scene = _scene()
    if forbidden:
        scene.world.kube.fail_next("GET", "/snapshotmetadataservices/", 403)
    else:
        await scene.world.delete(SNAPSHOT_METADATA_SERVICES, "hostpath.csi.k8s.io")
    assert await _expose(scene) == (TrackedSnapshot(HANDLE, "pvc-source", "b1-q9txn"), False)


async def test_a_snapshot_of_no_known_volume_is_not_tracked() -> None:
    scene = _scene()
    await scene.world.patch(VOLUME_SNAPSHOT_CONTENTS, SOURCE_CONTENT, spec={"source": {"volumeHandle": None}})
    assert await _expose(scene) == (None, False)


@pytest.mark.parametrize(
    ("annotations", "tracked"),
    [
        pytest.param(
            {"csi.vsphere.volume/change-id": "52 1f/7", "csi.vsphere.volume/snapshot": "disk+snap"},
            TrackedSnapshot("52 1f/7", "disk", "b1-q9txn", _SERVICE),
            id="both",
        ),
        pytest.param({"csi.vsphere.volume/snapshot": "disk+snap"}, None, id="no change ID"),
        pytest.param(
            {"csi.vsphere.volume/change-id": "7", "csi.vsphere.volume/snapshot": "disk"}, None, id="no volume"
        ),
    ],
)
async def test_vsphere_has_names_of_its_own(annotations: dict[str, str], tracked: TrackedSnapshot | None) -> None:
    scene = _scene()
    await scene.world.patch(VOLUME_SNAPSHOTS, "app/velero-data-lwkc4", annotations=annotations)
    assert await _expose(scene) == (tracked, tracked is not None)
