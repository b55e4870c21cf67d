"""Restores in place in pod mode: from the flags and the custom resource to volume and termination message."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from core.contract import VolumeMode
from core.models.in_place import InPlace
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_FLAGS = {"DataDownload": "data-download", "PodVolumeRestore": "pod-volume-restore"}
_SETTINGS = {"DataDownload": "dataMoverConfig", "PodVolumeRestore": "uploaderSettings"}


def _put_restore(pod: MoverPod, kind: str, rule: InPlace) -> None:
    spec: dict[str, Any] = {
        "snapshotID": pod.result["snapshotID"],
        "restoreType": rule.restore_type,
        _SETTINGS[kind]: {"DeleteExtraFiles": str(rule.delete_extra_files).lower()},
    }
    pod.put_transfer(kind, **spec)


@pytest.mark.sample("DataDownload-True-True", "PodVolumeRestore-True-False", "PodVolumeRestore-False-True")
@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("kind", _FLAGS)
async def test_a_file_system_becomes_the_snapshot(
    pod: MoverPod, tree: Path, kind: str, *, incremental: bool, delete: bool
) -> None:
    before, rule = describe_tree(tree), InPlace(incremental=incremental, delete_extra_files=delete)
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0
    total_bytes = pod.result["totalBytes"]
    (tree / "setuid").write_text("changed")
    (tree / "extra").write_text("of mine")
    (tree / ".velero").mkdir()
    (tree / ".velero" / "uid-of-an-earlier-restore").touch()
    _put_restore(pod, kind, rule)
    assert await pod.run(_FLAGS[kind], tree, in_place=rule) == 0
    assert pod.result == {
        "target": {"byPath": str(tree), "volumeMode": "Filesystem"},
        "totalBytes": total_bytes,
        "incrementalBytes": 1 if incremental else total_bytes,
    }
    assert "Data-Path-Warning" not in pod.reasons()
    done = {"DataDownload": "uid-of-an-earlier-restore", "PodVolumeRestore": "uid-of-restore"}[kind]
    assert [path.name for path in (tree / ".velero").iterdir()] == [done]
    shutil.rmtree(tree / ".velero")
    assert (tree / "extra").exists() is not delete
    (tree / "extra").unlink(missing_ok=True)
    assert describe_tree(tree) == before


@pytest.mark.sample("True-True")
@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
async def test_a_device_is_written_as_a_whole(
    pod: MoverPod, tmp_path: Path, *, incremental: bool, delete: bool
) -> None:
    device, rule = tmp_path / "device", InPlace(incremental=incremental, delete_extra_files=delete)
    content = bytes(range(256)) * 4096
    device.write_bytes(content)
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", device, VolumeMode.BLOCK) == 0
    device.write_bytes(b"x" * len(content))
    _put_restore(pod, "DataDownload", rule)
    assert await pod.run("data-download", device, VolumeMode.BLOCK, in_place=rule) == 0
    expected: dict[str, Any] = {
        "target": {"byPath": str(device), "volumeMode": "Block"},
        "totalBytes": len(content),
    }
    assert pod.result == expected | ({"fallbackFull": True} if incremental else {})
    assert device.read_bytes() == content
