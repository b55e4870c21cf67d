"""A pod with a read-only root: only scratch directory, termination log and the target are writable."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datamover.support.mounts import need_root
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[3]

_SEAL = """
set -e
beneath=$(stat -c %m "$POD")
mount --make-rprivate /
for kept; do mount --bind "$kept" "$kept"; done
for sealed in / "$beneath"; do mount -o remount,bind,ro "$sealed"; done
if (: >"$POD/probe") 2>/dev/null; then echo "$POD can be written to"; exit 99; fi
exec "$PYTHON" -c "$SCRIPT"
"""

_SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from tests.datamover.support.pods import MoverPod
from tests.support.fakekube import FakeKube

async def main():
    pod = MoverPod(FakeKube(), Path(os.environ["POD"]))
    pod.put_repository(phase="Ready")
    snapshot = os.environ["SNAPSHOT"]
    pod.put_transfer(os.environ["KIND"], **({"snapshotID": snapshot} if snapshot else {}))
    return await pod.run(os.environ["FLAG"], Path(os.environ["VOLUME"]))

sys.exit(asyncio.run(main()))
"""


class _SealedPod:
    """Runs transfers in a separate mount namespace, where `folder` and everything else is read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        self._log = folder / "termination-log"
        self._log.touch()

    def run(self, kind: str, volume: Path, *, writes: Path, snapshot: str = "") -> dict[str, str]:
        """Run a transfer that writes to `writes`, and return its result."""
        flag = "data-download" if snapshot else "data-upload"
        reported = {"POD": self.folder, "VOLUME": volume, "KIND": kind, "FLAG": flag, "SNAPSHOT": snapshot}
        own = {"VELERO_SCRATCH_DIR": self._scratch, "TMPDIR": self.folder, "PYTHON": sys.executable, "SCRIPT": _SCRIPT}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _SEAL, "sh", self._scratch, self._log, writes],
            cwd=_ROOT,
            env={**os.environ, **{name: str(value) for name, value in (reported | own).items()}},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self._log.read_text()}"
        return dict(json.loads(self._log.read_text()))


@pytest.fixture
def sealed(tmp_path: Path, _new_repository: Path) -> _SealedPod:
    need_root("mounts")
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    return _SealedPod(tmp_path)


def test_a_volume_is_backed_up_and_restored_in_a_read_only_container(
    sealed: _SealedPod, tree: Path, tmp_path: Path
) -> None:
    """A backup does not write to the volume, nor a restore to the repository.

    kopia creates a file next to a restore's target: so its parent directory must be writable.
    """
    backup = sealed.run("DataUpload", tree, writes=tmp_path / "backups")
    target = tmp_path / "root" / "target"
    target.mkdir(parents=True)
    sealed.run("DataDownload", target, writes=target.parent, snapshot=backup["snapshotID"])
    assert describe_tree(target) == describe_tree(tree)
