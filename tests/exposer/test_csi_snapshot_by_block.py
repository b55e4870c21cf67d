"""Backups by block of a volume with a file system: it is exposed as a device."""

from dataclasses import replace

import pytest

from core.contract import VolumeMode
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS
from exposer.manifests import parse_source_annotation
from tests.exposer.support.scenes import BackupScene
from tests.exposer.test_csi_snapshot import assert_clean, assert_exposed, clean_up, expose, only


@pytest.mark.parametrize(("mode", "annotation"), [("Filesystem", "true"), ("Block", None)])
async def test_a_volume_of_either_mode_is_exposed_as_a_device(mode: str, annotation: str | None) -> None:
    """The provisioner must be told if the mode may change."""
    scene = BackupScene(mode=mode)
    scene.request = replace(scene.request, by_block=True)

    exposed = await expose(scene)

    assert_exposed(scene)
    assert only(scene, PERSISTENT_VOLUME_CLAIMS)["spec"]["volumeMode"] == "Block"
    assert "--volume-mode=Block" in exposed.pod["spec"]["containers"][0]["args"]
    content = only(scene, VOLUME_SNAPSHOT_CONTENTS)
    key = "snapshot.storage.kubernetes.io/allow-volume-mode-change"
    assert content["metadata"]["annotations"].get(key) == annotation
    assert parse_source_annotation(content).volume_mode is VolumeMode(mode)
    await clean_up(scene)
    assert_clean(scene)
