"""The commands of docs/disaster-recovery.md as they are written there, and three volumes that they bring back."""

import hashlib
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.bed import Bed
from tests.cluster.scenes import Place, Volume
from tests.testbed.demonstration.manifests import build_pod
from tests.testbed.layout import ROOT
from tests.testbed.settings import AGENT_IMAGE

_PAGE = ROOT / "docs" / "disaster-recovery.md"
VOLUMES = ("data", "files", "web")
_FILES, _FILE_BYTES = 12, 300_000
_PASSWORD = "static-passw0rd"
"""The default one."""

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


def lose(bed: Bed, space: str, backup: str, prefix: str) -> None:
    """Back the volumes of a new namespace up, into a location of that name and prefix."""
    bed.user.kubectl("create", "namespace", space)
    bed.user.apply(*Place(bed, prefix).build())
    for claim in VOLUMES:
        Volume(bed, space, claim).fill(_FILL.replace("SEED", claim))
    words = ("backup", "create", backup, "-n", space, "-l", "", "--storage-location", prefix, "--wait")
    bed.said(*words)


@dataclass(frozen=True)
class Recovery:
    """The page, followed in a folder; `names` replace those of the page, such as `my-prefix`."""

    bed: Bed
    folder: Path
    names: dict[str, str]

    def follow(self, space: str) -> None:
        """Run the commands, and compare the checksums of the volumes, which were in the namespace `space`."""
        env = self.bed.env
        keys = f"aws_access_key_id = {env['BED_S3_ACCESS_KEY']}\naws_secret_access_key = {env['BED_S3_SECRET_KEY']}\n"
        (self.folder / "credentials").write_text(f"[default]\n{keys}")
        (self.folder / "password").write_text(_PASSWORD)
        lines = _lines()
        assert len(lines) <= 5
        *_, listed, restored = [self._run(line) for line in lines]
        for claim in VOLUMES:
            assert f"{space}/{claim}" in listed
        assert f"is Completed: {len(VOLUMES)}/{len(VOLUMES)} volumes" in restored
        for claim in VOLUMES:
            script = ["-c", _CHECK.replace("DIGEST", _digest(claim))]
            pod = build_pod(space, f"read-{claim}", claim=claim, script=script, folders={})
            self.bed.user.run_pod(pod)

    def _run(self, line: str) -> str:
        env = self.bed.env
        own = {
            "my-backups": env["BED_S3_BUCKET"],
            "region=us-east-1": f"region=us-east-1,s3ForcePathStyle=true,s3Url={env['BED_S3_URL']}",
            "registry.example.com/node-agent:0.1.0": AGENT_IMAGE,
        }
        for old, new in (self.names | own).items():
            line = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w/-])", new, line)
        variables = {**env, "VELERO_NAMESPACE": self.names.get("velero", "velero")}
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def _lines() -> list[str]:
    """The commands of the page, which are in its only block of shell commands."""
    (block,) = re.findall(r"```sh\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [line for line in block.splitlines() if line.strip()]
