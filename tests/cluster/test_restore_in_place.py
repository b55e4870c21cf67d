"""Restore into the volume that a PVC has, on a real kubelet and driver: as a person and as a server asks for it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, follow, open_place, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim, build_pod

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_FILL = """\
import os
os.mkdir("/data/folder", 0o700)
for number in range(20):
    open(f"/data/folder/{number}", "w").write(f"as it was {number}" * 1000)
os.symlink("folder/3", "/data/link")
"""
_HOLD = "import time; time.sleep(600)"


class _Scene:
    def __init__(self, bed: Bed, space: str) -> None:
        self.bed, self.space = bed, space
        self.name = f"{space}-back"

    def back_up(self) -> None:
        words = (f"--pvc={self.space}/data", f"--storage-location={self.space}", "--method=csi-snapshot", "--wait")
        self.bed.said("backup", "create", f"{self.space}-first", *words)

    def restore(self) -> subprocess.CompletedProcess[str]:
        words = (f"--from-backup={self.space}-first", "--in-place", "--incremental", "--delete-extra-files", "--yes")
        return self.bed.command("restore", "create", self.name, *words, "--wait")

    def claim(self) -> Any:
        return self.bed.api.get(PERSISTENT_VOLUME_CLAIMS, self.space, "data")

    def volume(self) -> Any:
        return self.bed.api.get(PERSISTENT_VOLUMES, "", self.claim()["spec"]["volumeName"])


@pytest.fixture
def scene(agent: Bed, space: str) -> Iterator[_Scene]:
    Volume(agent, space).fill(_FILL)
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield _Scene(agent, space)
    agent.user.kubectl("delete", "volumesnapshots", "--all", "-n", space, "--ignore-not-found")


def _damage(folder: Path) -> dict[str, tuple[int, int]]:
    """Change a volume; return inode and time of the files that stay equal."""
    (folder / "folder/0").write_text("changed")
    (folder / "folder/1").unlink()
    (folder / "folder/2").chmod(0o604)
    (folder / "extra").mkdir()
    (folder / "extra/file").write_text("nobody backed it up")
    (folder / "link").unlink()
    (folder / "link").symlink_to("elsewhere")
    names = [f"folder/{number}" for number in range(3, 20)]
    return {name: ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in names}


def test_a_volume_is_as_it_was_and_its_pvc_has_it_again(scene: _Scene) -> None:
    bed, space = scene.bed, scene.space
    bed.user.kubectl("label", "pvc", "data", "-n", space, "tier=db")
    scene.back_up()
    folder = Volume(bed, space).path()
    equal = _damage(folder)
    before, policy = scene.claim(), scene.volume()["spec"]["persistentVolumeReclaimPolicy"]

    pod = build_pod(space, "holder", claim="data", script=["-c", _HOLD], folders={})
    bed.user.apply(pod)
    bed.user.wait("pod/holder", "condition=Ready", namespace=space, seconds=120)
    refused = scene.restore()
    assert refused.returncode == 1
    assert f"PVC {space}/data is used by pod {space}/holder" in refused.stderr
    bed.user.kubectl("delete", "pod", "holder", "-n", space, "--grace-period=1")

    done = scene.restore()

    assert done.returncode == 0, done.stderr
    after, volume = scene.claim(), scene.volume()
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["metadata"]["labels"]["tier"] == "db"
    assert after["spec"]["volumeName"] == before["spec"]["volumeName"]
    assert after["status"]["phase"] == "Bound"
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == policy
    assert volume["spec"]["claimRef"]["uid"] == after["metadata"]["uid"]
    assert not [key for key in volume["metadata"].get("annotations", {}) if key.startswith("nodeagent.io/")]
    assert sorted(path.name for path in folder.iterdir()) == ["folder", "link", "lost+found"]
    texts = {path.name: path.read_text() for path in (folder / "folder").iterdir()}
    assert texts == {str(number): f"as it was {number}" * 1000 for number in range(20)}
    assert (folder / "folder/2").stat().st_mode & 0o777 == 0o644
    assert str((folder / "link").readlink()) == "folder/3"
    stats = {name: (folder / name).stat() for name in equal}
    assert {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()} == equal
    assert [name for name in bed.user.names(["volumesnapshots"], "-n", space) if name.endswith("-before")]


def _release(scene: _Scene) -> str:
    """Retain the volume and delete its PVC, as the server does before it creates the DataDownload; return its name.

    Source: Velero main at 4a7db86f17d3, pkg/restore/actions/csi/pvc_action.go (deleteExistingPVC).
    """
    name = scene.volume()["metadata"]["name"]
    retain = json.dumps({"spec": {"persistentVolumeReclaimPolicy": "Retain"}})
    scene.bed.user.kubectl("patch", "pv", name, "--type=merge", "-p", retain)
    scene.bed.user.kubectl("delete", "pvc", "data", "-n", scene.space)
    return str(name)


def _download(scene: _Scene, name: str, *, volume: str, snapshot_id: str) -> Any:
    """Restore into the volume, and recreate the PVC as the server does; return the final DataDownload."""
    space = scene.space
    asked = Volume(scene.bed, space).download(name, snapshot_id=snapshot_id, location=space)
    asked["spec"]["targetVolume"] |= {"pvc": "data", "pv": volume}
    asked["spec"] |= {"restoreType": "full", "dataMoverConfig": {"DeleteExtraFiles": "true"}}
    scene.bed.user.apply(asked, build_claim(space, "data", size="64Mi", restored_into=f"{space}.data.{name}"))
    *_, last = follow(scene.bed, DATA_DOWNLOADS, [name], seconds=180)
    wait_released(scene.bed, DATA_DOWNLOADS, [name])
    scene.bed.user.wait("pvc/data", "jsonpath={.status.phase}=Bound", namespace=space)
    return last


def test_a_volume_that_a_server_has_released_is_bound_again_whether_it_is_restored_or_not(scene: _Scene) -> None:
    bed, space = scene.bed, scene.space
    scene.back_up()
    (name,) = [one.rpartition("/")[2] for one in bed.user.names(["datauploads"], "-n", NAMESPACE) if space in one]
    upload = bed.api.get(DATA_UPLOADS, NAMESPACE, name)
    assert upload is not None
    folder = Volume(bed, space).path()
    _damage(folder)
    volume = _release(scene)

    failed = _download(scene, f"{space}-bad", volume=volume, snapshot_id="0" * 32)

    assert failed["status"]["phase"] == "Failed"
    assert f"PersistentVolume {volume} may have been restored in part, and is given back" in failed["status"]["message"]
    assert scene.volume()["metadata"]["name"] == volume
    assert (folder / "folder/0").read_text() == "changed"
    assert _release(scene) == volume

    done = _download(scene, f"{space}-good", volume=volume, snapshot_id=upload["status"]["snapshotID"])

    assert done["status"]["phase"] == "Completed", done["status"]
    assert scene.volume()["metadata"]["name"] == volume
    assert sorted(path.name for path in folder.iterdir()) == ["folder", "link", "lost+found"]
    texts = {path.name: path.read_text() for path in (folder / "folder").iterdir()}
    assert texts == {str(number): f"as it was {number}" * 1000 for number in range(20)}
    bed.user.kubectl("patch", "pv", volume, "--type=merge", "-p", '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}')
