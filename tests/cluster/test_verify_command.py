"""`nodeagent backup verify` on a real kubelet: volumes are read back, restored and compared, and damage is found."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import Volume, open_place
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim, build_pod
from tests.testbed.install import AGENT_LABEL, METRICS_PORT
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_FILES = """\
import os, pathlib
folder = pathlib.Path("/data/folder")
folder.mkdir(mode=0o750)
for number in range(4):
    file = folder / f"file-{number}"
    file.write_bytes(os.urandom(300_000))
    file.chmod(0o600 + number)
    os.chown(file, number, 100 + number)
(folder / "link").symlink_to("file-0")
os.link(folder / "file-0", folder / "same")
"""
_DEVICE = "import os; open('/data', 'r+b').write(os.urandom(500_000))"


class _Scene:
    """A backup of volumes of a namespace, and the command as a person runs it."""

    def __init__(self, bed: Bed, space: str) -> None:
        self.bed, self.space = bed, space
        self.name = f"{space}-night"

    def back_up(self, *claims: str) -> None:
        words = [f"--pvc={self.space}/{claim}" for claim in claims]
        self.bed.said("backup", "create", self.name, *words, f"--storage-location={self.space}", "--wait")

    def verify(self, *words: str, fails: bool = False) -> dict[str, dict[str, Any]]:
        """Return what came of each volume, by the name of its PVC."""
        done = self.bed.command("backup", "verify", self.name, *words, "-o", "json")
        assert done.returncode == int(fails), done.stderr
        return {one["claim"]: one for one in json.loads(done.stdout)["volumes"]}

    def recorded(self) -> dict[str, str]:
        """Return the outcome in the annotation of each transfer, by the name of its PVC."""
        label = ("-l", f"nodeagent.io/backup={self.name}")
        text = self.bed.user.kubectl("get", "datauploads", "-n", NAMESPACE, *label, "-o", "json")
        found = {one["spec"]["sourcePVC"]: one["metadata"]["annotations"] for one in json.loads(text)["items"]}
        return {claim: json.loads(one["nodeagent.io/verification"])["outcome"] for claim, one in found.items()}

    def wait_metric(self, claim: str, value: str) -> None:
        """Wait until the leader shows this result of the last verification of a PVC."""

        def read() -> list[str]:
            lines = self.bed.user.metrics(NAMESPACE, AGENT_LABEL, port=METRICS_PORT)
            shown = [line for line in lines if line.startswith("nodeagent_volume_last_verification_ok{")]
            own = [line for line in shown if f'"{self.space}"' in line and f'claim="{claim}"' in line]
            return [line.rsplit(" ", 1)[1] for line in own]

        wait_for(lambda: f"{value}, not {read()}", lambda: read() == [value], pause_seconds=0.5)

    def left(self) -> list[str]:
        """Return what verifications have left."""
        kinds = ["persistentvolumeclaims", "datadownloads"]
        found = [name for name in self.bed.user.names(kinds, "-n", NAMESPACE) if "nodeagent-verify-" in name]
        return found + self.bed.user.names(
            ["jobs"], "-n", NAMESPACE, "-l", f"nodeagent.io/snapshot-verification={self.space}-{self.space}-kopia"
        )


@pytest.fixture
def scene(agent: Bed, space: str) -> Iterator[_Scene]:
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield _Scene(agent, space)


def test_a_backup_is_read_back_and_damage_of_the_bucket_is_found(scene: _Scene) -> None:
    Volume(scene.bed, scene.space).fill(_FILES)
    scene.back_up("data")
    (found,) = scene.verify().values()
    # Both names of a file have the same content, which kopia reads once.
    assert (found["outcome"], found["files"], found["bytes"]) == ("passed", 5, 1_200_006)
    assert scene.recorded() == {"data": "passed"}
    scene.wait_metric("data", "1.0")
    with open_kopia(scene.bed, scene.space, prefix=scene.space) as kopia:
        packs = kopia.json("blob", "list", "--prefix=p")
        largest = max(packs, key=lambda one: one["length"])["id"]
        kopia.run("blob", "delete", largest, "--dangerous-commands=enabled")
    (found,) = scene.verify("--percent=1", fails=True).values()
    assert found["outcome"] == "failed"
    assert f"is backed by missing blob {largest}" in found["message"]
    assert scene.recorded() == {"data": "failed"}
    scene.wait_metric("data", "0.0")
    reasons = scene.bed.user.kubectl("get", "events", "-n", NAMESPACE, "--field-selector=reason=VerificationFailed")
    assert found["transfer"] in reasons
    # The restore fails too, and says that the data is the cause.
    (found,) = scene.verify("--restore", fails=True).values()
    assert (found["outcome"], found["restored"]) == ("failed", True)
    assert scene.left() == []


def test_a_device_and_files_with_late_binding_are_restored_compared_and_removed(scene: _Scene) -> None:
    Volume(scene.bed, scene.space, "disk").fill(_DEVICE, size="8Mi", block=True)
    late = build_claim(scene.space, "late", size="64Mi")
    late["spec"]["storageClassName"] = "bed-wait"
    scene.bed.user.apply(late)
    pod = build_pod(scene.space, "fill-late", claim="late", script=["-c", _FILES], folders={})
    scene.bed.user.run_pod(pod)
    scene.back_up("disk", "late")
    found = scene.verify("--restore")
    assert {claim: one["outcome"] for claim, one in found.items()} == dict.fromkeys(("disk", "late"), "passed")
    assert [found[claim]["files"] for claim in ("disk", "late")] == [1, 6]
    assert found["disk"]["bytes"] == 8 << 20
    assert scene.recorded() == dict.fromkeys(("disk", "late"), "passed")
    assert scene.left() == []
