"""`nodeagent backup ls` and `cp` on a real kubelet: files of a backup reach a person's machine as they were."""

import hashlib
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


def test_files_of_a_backup_are_listed_and_copied(agent: Bed, space: str, tmp_path: Path) -> None:
    Volume(agent, space).fill(_FILL, size="128Mi")
    name = f"{space}-night"
    with relies_on(agent, Shared.AGENTS):
        agent.said("backup", "create", name, f"--pvc={space}/data", "--wait")
        entries = {one["name"]: one for one in agent.document("backup", "ls", name, "data/etc")["entries"]}
        assert entries.keys() == {"big", "empty", "link", "odd \x1b[2J name", "out"}
        assert entries["big"]["sizeBytes"] == 40 << 20
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
    jobs = agent.user.kubectl("get", "jobs", "-n", NAMESPACE, "-l", "nodeagent.io/snapshot-files", "-o", "name")
    assert jobs.strip() == ""
    agent.user.kubectl("delete", "datauploads", "-n", NAMESPACE, "-l", f"nodeagent.io/backup={name}", "--wait=false")
