"""The commands of docs/disaster-recovery.md, as they are written there, where nothing but bucket and password is left.

A new namespace with agents of its own stands for the empty cluster: it has no BackupRepository and no transfer, and the
namespace of the volumes is gone.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cluster.scenes import Place, Volume
from tests.testbed.demonstration.manifests import NAMESPACE, build_pod
from tests.testbed.layout import ROOT
from tests.testbed.settings import AGENT_IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(400)]

_PAGE = ROOT / "docs" / "disaster-recovery.md"
_VOLUMES = ("data", "files", "web")
_FILES, _FILE_BYTES = 12, 300_000
_DEFAULT_PASSWORD = "static-passw0rd"

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


def _digest(seed: str) -> str:
    rng, found = random.Random(seed), hashlib.sha256()
    for _ in range(_FILES):
        found.update(rng.randbytes(_FILE_BYTES))
    return found.hexdigest()


class _Shell:
    """Runs lines of the page in a folder, with the names of the page replaced by those of the test."""

    def __init__(self, bed: Bed, folder: Path, names: dict[str, str]) -> None:
        self.folder, self.names = folder, names
        self.env = {**bed.env, "VELERO_NAMESPACE": names["velero"]}

    def run(self, line: str) -> str:
        for old, new in self.names.items():
            line = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w/-])", new, line)
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture
def lost(agent: Bed) -> Iterator[str]:
    """The namespace and the prefix of three volumes that were backed up; all that named them is deleted."""
    bed, space = agent, f"test-{secrets.token_hex(4)}"
    place = Place(bed, space)
    bed.user.kubectl("create", "namespace", space)
    bed.user.apply(*place.build())
    for claim in _VOLUMES:
        Volume(bed, space, claim).fill(_FILL.replace("SEED", claim))
    words = ("backup", "create", space, "-n", space, "-l", "", "--storage-location", space, "--wait")
    argv = [sys.executable, "-m", "nodeagent", *words]
    done = subprocess.run(argv, cwd=ROOT, env=dict(bed.env), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    bed.user.kubectl("delete", "datauploads", "-n", NAMESPACE, "-l", f"nodeagent.io/backup={space}")
    left = [f"backuprepository/{space}-{space}-kopia", f"backupstoragelocation/{space}", f"secret/{space}-keys"]
    bed.user.kubectl("delete", *left, "-n", NAMESPACE)
    bed.user.kubectl("delete", "namespace", space, "--wait=true", "--timeout=120s")
    yield space
    bed.user.kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false")


def _lines() -> list[str]:
    """The commands of the page, which are in its only block of shell commands."""
    (block,) = re.findall(r"```sh\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for line in block.splitlines() if line.strip()]


def test_the_page_restores_three_volumes_by_at_most_five_commands(agent: Bed, lost: str, tmp_path: Path) -> None:
    env, space = agent.env, f"test-{secrets.token_hex(4)}"
    keys = f"aws_access_key_id = {env['BED_S3_ACCESS_KEY']}\naws_secret_access_key = {env['BED_S3_SECRET_KEY']}\n"
    (tmp_path / "credentials").write_text(f"[default]\n{keys}")
    (tmp_path / "password").write_text(_DEFAULT_PASSWORD)
    names = {
        "velero": space,
        "my-backups": env["BED_S3_BUCKET"],
        "my-prefix": lost,
        "night-1": lost,
        "region=us-east-1": f"region=us-east-1,s3ForcePathStyle=true,s3Url={env['BED_S3_URL']}",
        "registry.example.com/node-agent:0.1.0": AGENT_IMAGE,
    }
    shell, lines = _Shell(agent, tmp_path, names), _lines()
    assert len(lines) <= 5
    try:
        *_, listed, restored = [shell.run(line) for line in lines]
        for claim in _VOLUMES:
            assert f"{lost}/{claim}" in listed
        assert f"is Completed: {len(_VOLUMES)}/{len(_VOLUMES)} volumes" in restored
        for claim in _VOLUMES:
            script = ["-c", _CHECK.replace("DIGEST", _digest(claim))]
            agent.user.run_pod(build_pod(lost, f"read-{claim}", claim=claim, script=script, folders={}), seconds=120)
    finally:
        agent.user.kubectl("delete", "namespace", space, "--ignore-not-found", "--wait=false")
        clean = [
            name for name in agent.user.names(["clusterroles,clusterrolebindings,priorityclasses"]) if space in name
        ]
        if clean:
            agent.user.kubectl("delete", *clean, "--ignore-not-found")
