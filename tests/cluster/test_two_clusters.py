"""A cluster is lost, and another one gets a copy of its bucket: `make test-recovery`, each in a test bed of its own.

Three volumes come back by the commands of docs/disaster-recovery.md, as they are written there.
"""

import hashlib
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from core.kube.resources import NAMESPACES
from tests.cluster.bed import Bed
from tests.cluster.handkopia import PASSWORD
from tests.cluster.scenes import Place, Volume
from tests.testbed.demonstration.manifests import build_location, build_pod
from tests.testbed.layout import ROOT, Layout
from tests.testbed.settings import AGENT_IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SPACE, _PREFIX = "shop", "my-prefix"
_BUCKET, _CLUSTER = "bucket", "cluster"
_PAGE = ROOT / "docs" / "disaster-recovery.md"
_VOLUMES = ("data", "files", "web")
_FILES, _FILE_BYTES = 12, 300_000

_FILL = f"""\
import pathlib, random
rng, root = random.Random("SEED"), pathlib.Path("/data")
for number in range({_FILES}):
    file = root / f"folder-{{number % 3}}" / f"file-{{number:02}}"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(rng.randbytes({_FILE_BYTES}))
"""
_CHECK = """\
import hashlib, pathlib, sys
found = hashlib.sha256()
for file in sorted(pathlib.Path("/data").rglob("file-*"), key=lambda file: file.name):
    found.update(file.read_bytes())
sys.exit(f"the checksum is {found.hexdigest()}" if found.hexdigest() != "DIGEST" else 0)
"""


@pytest.fixture
def kept() -> Path:
    """The folder that outlives a cluster."""
    return Path(os.environ["RECOVERY_FOLDER"])


def _cluster(bed: Bed) -> str:
    found = bed.api.get(NAMESPACES, "", "kube-system")
    assert found is not None
    return str(found["metadata"]["uid"])


def _bucket(bed: Bed) -> Path:
    return Layout(bed.folder).s3 / bed.env["BED_S3_BUCKET"]


def _digest(seed: str) -> str:
    rng, found = random.Random(seed), hashlib.sha256()
    for _ in range(_FILES):
        found.update(rng.randbytes(_FILE_BYTES))
    return found.hexdigest()


def test_first_the_volumes_of_a_cluster_are_backed_up(agent: Bed, kept: Path) -> None:
    agent.user.kubectl("create", "namespace", _SPACE)
    agent.user.apply(*Place(agent, _PREFIX).build())
    for claim in _VOLUMES:
        Volume(agent, _SPACE, claim).fill(_FILL.replace("SEED", claim))
    agent.said("backup", "create", "night-1", "-n", _SPACE, "-l", "", "--storage-location", _PREFIX, "--wait")
    shutil.copytree(_bucket(agent), kept / _BUCKET)
    (kept / _CLUSTER).write_text(_cluster(agent))


def test_then_an_empty_cluster_restores_them_by_the_commands_of_the_page(bed: Bed, kept: Path, tmp_path: Path) -> None:
    assert _cluster(bed) != (kept / _CLUSTER).read_text()
    assert "velero" not in bed.user.names(["namespaces"])
    assert "velero.io" not in bed.user.kubectl("get", "crd", "-o", "name")
    shutil.copytree(kept / _BUCKET, _bucket(bed), dirs_exist_ok=True)
    (tmp_path / "credentials").write_text(build_location(bed.env)[0]["stringData"]["cloud"])
    (tmp_path / "password").write_text(PASSWORD)
    # The commands of the page are in its only block of shell commands.
    (block,) = re.findall(r"```sh\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 5
    *_, listed, restored = [_run(bed, line, tmp_path) for line in lines]
    for claim in _VOLUMES:
        assert f"{_SPACE}/{claim}" in listed
    assert f"is Completed: {len(_VOLUMES)}/{len(_VOLUMES)} volumes" in restored
    for claim in _VOLUMES:
        script = ["-c", _CHECK.replace("DIGEST", _digest(claim))]
        bed.user.run_pod(build_pod(_SPACE, f"read-{claim}", claim=claim, script=script, folders={}))


def _run(bed: Bed, line: str, folder: Path) -> str:
    """Run a command of the page, with the names of the test bed instead of the example's."""
    own = {
        "my-backups": bed.env["BED_S3_BUCKET"],
        "region=us-east-1": f"region=us-east-1,s3ForcePathStyle=true,s3Url={bed.env['BED_S3_URL']}",
        "registry.example.com/node-agent:0.1.0": AGENT_IMAGE,
    }
    for old, new in own.items():
        line = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w/-])", new, line)
    variables = {**bed.env, "VELERO_NAMESPACE": "velero"}
    done = subprocess.run(line, shell=True, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
