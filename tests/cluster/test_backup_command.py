"""`nodeagent backup` on a real kubelet: volumes reach the bucket while a terminal shows how, and can be canceled."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES, Gate
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import Volume, open_gated_place
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.cluster.workloads import Workload
from tests.support.golden import assert_golden_text
from tests.support.terminal import open_terminal
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_BYTES = 2 * HELD_BYTES
_FILL = f"""
import os
with open("/data/random", "wb") as file:
    file.write(os.urandom({_BYTES}))
"""


class _Scene:
    """A PVC with data behind a gate, and the command as a person runs it."""

    def __init__(self, bed: Bed, space: str, gate: Gate) -> None:
        self.bed, self.space, self.gate = bed, space, gate
        self.name = f"{space}-night"

    def create(self, *words: str) -> list[str]:
        claim, place = f"--pvc={self.space}/data", f"--storage-location={self.space}"
        return ["backup", "create", self.name, claim, place, *words]

    def show(self, command: str) -> str:
        """Return what a terminal shows of a command about the backup; what differs from run to run is replaced."""
        with open_terminal(["backup", command, self.name], environment=self.bed.env) as terminal:
            assert terminal.finish()[0] == 0, terminal.text
        text = terminal.text.replace(self.space, "SPACE")
        text = re.sub(r"night-[0-9a-f]{8}", "night-HASH", text)
        text = re.sub(r"[0-9-]+T[0-9:]+Z", "TIME", text)
        text = re.sub(r"\b\d+[smh]\b", "AGE", text)
        return re.sub(r" +", " ", text)


@pytest.fixture
def scene(agent: Bed, space: str) -> Iterator[_Scene]:
    Volume(agent, space).fill(_FILL, size="128Mi")
    with open_gated_place(agent, space) as (gate, _), relies_on(agent, Shared.AGENTS):
        scene = _Scene(agent, space, gate)
        yield scene
        kinds, label = "datauploads,podvolumebackups", f"nodeagent.io/backup={scene.name}"
        agent.user.kubectl("delete", kinds, "-n", NAMESPACE, "-l", label, "--wait=false")


def test_a_terminal_shows_a_volume_on_its_way_to_the_bucket(scene: _Scene) -> None:
    scene.gate.shut()
    with open_terminal(scene.create("--wait", "--ttl=48h"), environment=scene.bed.env) as terminal:
        terminal.read_until(rf"{scene.space}/data +InProgress +[1-9][0-9.]* MiB")
        scene.gate.open()
        assert terminal.finish()[0] == 0, terminal.text
    assert f"backup {scene.name} is Completed: 1/1 volumes, 48.0 MiB\n" in terminal.text
    assert "note: the backup has the data of volumes only: no manifests, and no hooks run\n" in terminal.text
    assert "\x1b[32mCompleted" in terminal.raw
    shown = scene.show("get") + scene.show("describe")
    assert_golden_text("cli/backup-cluster", shown)
    assert scene.bed.document(*scene.create())["volumes"][0]["phase"] == "Completed"


def test_the_snapshots_say_what_they_are_of(scene: _Scene) -> None:
    workload = Workload(scene.bed, scene.space, "writer", {"data": 1_000_000}, location=scene.space)
    workload.start()
    workload.wait_ready()
    done = scene.bed.command(*scene.create(f"--pvc={scene.space}/writer", "--method=fs-backup"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: PVC {scene.space}/data: no backup of files: no Running pod mounts it" in done.stderr
    words = ("backup", "create", scene.name, f"--pvc={scene.space}/writer", f"--storage-location={scene.space}")
    done = scene.bed.command(*words, "--method=fs-backup", "--wait")
    assert done.returncode == 0, done.stderr
    (volume,) = scene.bed.document("backup", "describe", scene.name)["volumes"]
    assert (volume["method"], volume["phase"], volume["attempt"]) == ("fs-backup", "Completed", 1)
    with open_kopia(scene.bed, scene.space, prefix=scene.space) as kopia:
        (listed,) = kopia.json("snapshot", "list", "--all")
    tags, cluster = listed["tags"], json.loads(scene.bed.user.kubectl("get", "namespace", "kube-system", "-o", "json"))
    assert listed["id"] == volume["snapshotId"]
    assert tags["tag:nodeagent.io/cluster"] == cluster["metadata"]["uid"]
    assert tags["tag:nodeagent.io/backup"] == scene.name
    assert json.loads(tags["tag:nodeagent.io/claim"]) == volume["saved"]
