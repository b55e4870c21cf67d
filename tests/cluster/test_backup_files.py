"""`nodeagent backup ls` and `cp` on a real kubelet: files of a backup reach a person's machine as they were."""

import hashlib
import random
import subprocess
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(WITH_LOCKS)]

_FILL = """
import hashlib, os
os.makedirs("/data/etc/empty")
with open("/data/etc/big", "wb") as file:
    for seed in range(40):
        file.write(hashlib.sha256(str(seed).encode()).digest() * 32768)
with open("/data/etc/odd \\x1b[2J name", "w") as file:
    file.write("odd")
os.symlink("big", "/data/etc/link")
os.symlink("/etc/passwd", "/data/etc/out")
"""


def _expected() -> bytes:
    return b"".join(hashlib.sha256(str(seed).encode()).digest() * 32768 for seed in range(40))


def _remove(bed: Bed, backup: str) -> None:
    """Check that no Job is left, and delete the transfers."""
    jobs = bed.user.kubectl("get", "jobs", "-n", NAMESPACE, "-l", "nodeagent.io/snapshot-files", "-o", "name")
    assert jobs.strip() == ""
    bed.user.kubectl("delete", "datauploads", "-n", NAMESPACE, "-l", f"nodeagent.io/backup={backup}", "--wait=false")


@pytest.mark.parametrize("data_mover", ["fs", "block"])
def test_files_of_a_backup_are_listed_and_copied(agent: Bed, space: str, tmp_path: Path, data_mover: str) -> None:
    Volume(agent, space).fill(_FILL, size="128Mi")
    name = f"{space}-night"
    with relies_on(agent, Shared.AGENTS):
        agent.said("backup", "create", name, f"--pvc={space}/data", f"--data-mover={data_mover}", "--wait")
        found = agent.document("backup", "ls", name, "data/etc")
        entries = {one["name"]: one for one in found["entries"]}
        assert entries.keys() == {"big", "empty", "link", "odd \x1b[2J name", "out"}
        assert entries["big"]["sizeBytes"] == 40 << 20
        # It was mounted when its snapshot was taken.
        assert ["journal was not replayed" in note for note in found["notes"]] == [True] * (data_mover == "block")
        done = agent.command("backup", "cp", f"{name}:{space}/data/etc", str(tmp_path / "copied"))
        assert done.returncode == 1, done.stderr
        assert "note: out is not copied: it is a link to an absolute path" in done.stderr
        copied = tmp_path / "copied"
        assert sorted(path.name for path in copied.iterdir()) == ["big", "empty", "link", "odd \x1b[2J name"]
        assert (copied / "link").read_bytes() == _expected()
        agent.said("backup", "cp", f"{name}:data/etc/big", str(tmp_path / "one"))
        assert (tmp_path / "one").read_bytes() == _expected()
        done = agent.command("backup", "cp", f"{name}:data/ect", str(tmp_path / "none"))
        assert done.returncode == 1
        assert "the snapshot has no ect (did you mean etc?)" in done.stderr
    _remove(agent, name)


def test_a_device_is_copied_and_another_file_system_is_refused_by_name(agent: Bed, space: str, tmp_path: Path) -> None:
    disk, image = Volume(agent, space, "disk"), tmp_path / "disk.img"
    disk.fill("", size="300Mi", block=True)
    subprocess.run(["mkfs.xfs", "-q", "-f", disk.path()], check=True)
    with disk.path().open("r+b") as device:
        device.seek(-(5 << 20) - 512, 2)
        device.write(random.Random(2).randbytes(3 << 20))
    content = disk.path().read_bytes()
    name = f"{space}-night"
    with relies_on(agent, Shared.AGENTS):
        agent.said("backup", "create", name, f"--pvc={space}/disk", "--data-mover=block", "--wait")
        agent.said("backup", "cp", f"{name}:disk", str(image))
        assert image.read_bytes() == content
        assert image.stat().st_blocks * 512 < 16 << 20
        done = agent.command("backup", "ls", name, "disk/")
        assert done.returncode == 1
        assert "the device has xfs: only files in ext2, ext3 or ext4 can be read" in done.stderr
    _remove(agent, name)
