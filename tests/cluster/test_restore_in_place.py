"""Restore into the volume that a PVC has, on a real kubelet and driver: as a person and as a server asks for it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, open_place, wait_released
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

    def back_up(self, *words: str) -> str:
        """Return the ID of the kopia snapshot."""
        words = (f"--storage-location={self.space}", "--method=csi-snapshot", *words, "--wait")
        self.bed.said("backup", "create", f"{self.space}-first", f"--pvc={self.space}/data", *words)
        names = self.bed.user.names(["datauploads"], "-n", NAMESPACE)
        (name,) = [one.rpartition("/")[2] for one in names if self.space in one]
        upload = self.bed.api.get(DATA_UPLOADS, NAMESPACE, name)
        assert upload is not None
        return str(upload["status"]["snapshotID"])

    def restore(self, *words: str) -> subprocess.CompletedProcess[str]:
        words = (f"--from-backup={self.space}-first", "--in-place", "--incremental", *words, "--yes", "--wait")
        return self.bed.command("restore", "create", self.name, *words)

    def claim(self) -> Any:
        return self.bed.api.get(PERSISTENT_VOLUME_CLAIMS, self.space, "data")

    def volume(self) -> Any:
        return self.bed.api.get(PERSISTENT_VOLUMES, "", self.claim()["spec"]["volumeName"])

    def set_policy(self, volume: str, policy: str) -> None:
        self.bed.api.patch(PERSISTENT_VOLUMES, {"spec": {"persistentVolumeReclaimPolicy": policy}}, name=volume)


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


def _expect_restored(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["folder", "link", "lost+found"]
    texts = {path.name: path.read_text() for path in (folder / "folder").iterdir()}
    assert texts == {str(number): f"as it was {number}" * 1000 for number in range(20)}


def test_a_volume_is_as_it_was_and_its_pvc_has_it_again(scene: _Scene) -> None:
    bed, space = scene.bed, scene.space
    bed.user.kubectl("label", "pvc", "data", "-n", space, "tier=db")
    scene.back_up()
    folder = Volume(bed, space).path()
    equal = _damage(folder)
    before, policy = scene.claim(), scene.volume()["spec"]["persistentVolumeReclaimPolicy"]
    pod = build_pod(space, "holder", claim="data", script=["-c", _HOLD], folders={})
    bed.user.apply(pod)
    bed.user.wait("pod/holder", "condition=Ready", namespace=space)
    refused = scene.restore("--delete-extra-files")
    assert refused.returncode == 1
    assert f"PVC {space}/data is used by pod {space}/holder" in refused.stderr
    bed.user.kubectl("delete", "pod", "holder", "-n", space, "--grace-period=1")
    done = scene.restore("--delete-extra-files")
    assert done.returncode == 0, done.stderr
    after, volume = scene.claim(), scene.volume()
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["metadata"]["labels"]["tier"] == "db"
    assert after["spec"]["volumeName"] == before["spec"]["volumeName"]
    assert after["status"]["phase"] == "Bound"
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == policy
    assert volume["spec"]["claimRef"]["uid"] == after["metadata"]["uid"]
    assert not [key for key in volume["metadata"].get("annotations", {}) if key.startswith("nodeagent.io/")]
    _expect_restored(folder)
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
    scene.set_policy(name, "Retain")
    scene.bed.user.kubectl("delete", "pvc", "data", "-n", scene.space)
    return str(name)


def _download(scene: _Scene, name: str, *, volume: str, snapshot_id: str, by_block: bool = False) -> Any:
    """Restore into the volume, and recreate the PVC as the server does; return the final DataDownload."""
    space = scene.space
    asked = Volume(scene.bed, space).download(name, snapshot_id=snapshot_id, location=space)
    asked["spec"]["targetVolume"] |= {"pvc": "data", "pv": volume}
    asked["spec"] |= {"restoreType": "full", "dataMoverConfig": {"DeleteExtraFiles": "true"}}
    asked["spec"] |= {"datamover": "velero-block"} if by_block else {}
    scene.bed.user.apply(asked, build_claim(space, "data", size="64Mi", restored_into=f"{space}.data.{name}"))
    last = wait_released(scene.bed, asked)
    scene.bed.user.wait("pvc/data", "jsonpath={.status.phase}=Bound", namespace=space)
    return last


def test_a_volume_that_a_server_has_released_is_bound_again_whether_it_is_restored_or_not(scene: _Scene) -> None:
    bed, space = scene.bed, scene.space
    snapshot_id = scene.back_up()
    folder = Volume(bed, space).path()
    _damage(folder)
    volume = _release(scene)
    failed = _download(scene, f"{space}-bad", volume=volume, snapshot_id="0" * 32)
    assert failed["status"]["phase"] == "Failed"
    assert f"PersistentVolume {volume} may have been restored in part, and is given back" in failed["status"]["message"]
    assert scene.volume()["metadata"]["name"] == volume
    assert (folder / "folder/0").read_text() == "changed"
    assert _release(scene) == volume
    done = _download(scene, f"{space}-good", volume=volume, snapshot_id=snapshot_id)
    assert done["status"]["phase"] == "Completed", done["status"]
    assert scene.volume()["metadata"]["name"] == volume
    _expect_restored(folder)
    scene.set_policy(volume, "Delete")


_CHECK = """\
import os
assert sorted(os.listdir("/data")) == ["folder", "link", "lost+found"]
for number in range(20):
    assert open(f"/data/folder/{number}").read() == f"as it was {number}" * 1000
assert os.stat("/data/folder/2").st_mode & 0o777 == 0o644
assert os.stat("/data/folder/0").st_nlink == 1
open("/data/folder/new", "w").write("it is writable")
"""


def test_a_file_system_is_written_by_block_where_it_is_and_its_pod_starts_again(scene: _Scene) -> None:
    bed, space = scene.bed, scene.space
    snapshot_id = scene.back_up("--data-mover=block")
    expected = _restore_device(scene, snapshot_id)
    _damage(Volume(bed, space).path())
    before, name = scene.volume(), _release(scene)
    failed = _download(scene, f"{space}-bad", volume=name, snapshot_id="0" * 32, by_block=True)
    assert failed["status"]["phase"] == "Failed"
    given = scene.volume()
    assert (given["metadata"]["uid"], given["spec"]["volumeMode"]) == (before["metadata"]["uid"], "Filesystem")
    check = "assert open('/data/folder/0').read() == 'changed'"
    bed.user.run_pod(build_pod(space, "damaged", claim="data", script=["-c", check], folders={}))
    done = scene.restore()
    assert done.returncode == 0, done.stderr
    given, downloads = scene.volume(), bed.api.objects(DATA_DOWNLOADS, NAMESPACE)
    (status,) = [one["status"] for one in downloads if one["metadata"]["name"].startswith(scene.name)]
    assert 0 < status["incrementalBytes"] < status["progress"]["totalBytes"] // 2
    assert (given["metadata"]["uid"], given["spec"]["csi"]) == (before["metadata"]["uid"], before["spec"]["csi"])
    assert given["spec"]["volumeMode"] == "Filesystem"
    assert given["spec"]["claimRef"]["uid"] == scene.claim()["metadata"]["uid"]
    assert bed.api.get(PERSISTENT_VOLUMES, "", f"{name}-block") is None
    device = Volume(bed, space).path()
    assert device.is_block_device()
    assert device.read_bytes() == expected
    bed.user.run_pod(build_pod(space, "again", claim="data", script=["-c", _CHECK], folders={}))
    scene.set_policy(name, "Delete")


def _restore_device(scene: _Scene, snapshot_id: str) -> bytes:
    """Restore a backup by block into a new device, and return its content."""
    volume, name = Volume(scene.bed, scene.space), f"{scene.space}-device"
    target = volume.target(name, block=True)
    last = volume.restore(target, snapshot_id=snapshot_id, location=scene.space, datamover="velero-block")
    assert last["status"]["phase"] == "Completed", last["status"]
    return Volume(scene.bed, scene.space, name).path().read_bytes()
