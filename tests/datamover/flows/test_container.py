"""The container of a mover pod: its root is read-only, and its capabilities move files of any owner and mode."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from exposer.pod_manifest import MOVER_CAPABILITIES
from tests.datamover.support.mounts import need_root
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import FLAGS
from tests.datamover.support.trees import describe_tree, make_tree

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

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


def _run_sealed(folder: Path, kind: str, volume: Path, *, writes: Path, snapshot: str = "") -> str:
    """Run a transfer in a mount namespace where all but `writes`, and what a pod may write to, is read-only.

    Return the ID of the kopia snapshot in its result, if it has one.
    """
    scratch, log = folder / "scratch", folder / "termination-log"
    scratch.mkdir(exist_ok=True)
    log.touch()
    given = {
        "POD": folder,
        "VOLUME": volume,
        "KIND": kind,
        "FLAG": FLAGS[kind],
        "SNAPSHOT": snapshot,
        "SCRIPT": _SCRIPT,
    }
    own = {"VELERO_SCRATCH_DIR": scratch, "TMPDIR": folder, "PYTHON": sys.executable}
    environment = {**os.environ, **{name: str(value) for name, value in (given | own).items()}}
    argv: list[str | Path] = ["unshare", "--mount", "sh", "-c", _SEAL, "sh", scratch, log, writes]
    done = subprocess.run(argv, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{log.read_text()}"
    return str(json.loads(log.read_text()).get("snapshotID"))


def test_a_volume_is_backed_up_and_restored_in_a_read_only_container(
    tree: Path, tmp_path: Path, repository: Path
) -> None:
    """A backup does not write to the volume, nor a restore to the repository.

    kopia creates a file next to a restore's target: so its parent directory must be writable.
    """
    need_root("mounts")
    shutil.copytree(repository, tmp_path / "backups" / "kopia" / "app")
    snapshot = _run_sealed(tmp_path, "DataUpload", tree, writes=tmp_path / "backups")
    target = tmp_path / "root" / "target"
    target.mkdir(parents=True)
    _run_sealed(tmp_path, "DataDownload", target, writes=target.parent, snapshot=snapshot)
    assert describe_tree(target) == describe_tree(tree)


_FOREIGN, _GROUP = 4321, 8765
_FOR_FILES = tuple(name for name in MOVER_CAPABILITIES if name != "SYS_CHROOT")
"""The last one is for a confined kopia, which has tests of its own."""


def _run(folder: Path, capabilities: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a data mover in local mode as root with these capabilities, as a container runtime does."""
    allowed = ",".join(["-all", *(f"+{name.lower()}" for name in capabilities)])
    bounded = ["setpriv", f"--bounding-set={allowed}", "--inh-caps=-all", "--clear-groups", "--no-new-privs"]
    argv = [*bounded, sys.executable, "-m", "datamover", *arguments, f"--repository={folder / 'repository'}", "--json"]
    environment = os.environ | {"KOPIA_PASSWORD": PASSWORD}
    return subprocess.run(argv, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)


def _move(
    folder: Path, backup: Sequence[str], restore: Sequence[str]
) -> tuple[dict[str, tuple[object, ...]], subprocess.CompletedProcess[str]]:
    """Return the tree as far as it is restored, empty where the backup fails, and the mover that ran last."""
    done = _run(folder, backup, "backup", f"--source={folder / 'volume'}")
    if done.returncode:
        return {}, done
    target, snapshot = folder / "target", json.loads(done.stdout)["snapshotID"]
    done = _run(folder, restore, "restore", f"--target={target}", f"--snapshot={snapshot}")
    return describe_tree(target), done


@pytest.fixture
def folder(repository: Path) -> Path:
    """A folder with a volume of files of foreign owners, which only their owners may read, and a repository."""
    need_root("owners")
    volume = make_tree(repository.with_name("volume"))
    private = volume / "private"
    private.mkdir()
    (private / "file").write_text("of another user")
    (private / "file").chmod(0o600)
    (private / "shared").write_text("setgid")
    for path in (private / "file", private / "shared", private):
        os.chown(path, _FOREIGN, _GROUP)
    (private / "shared").chmod(0o2755)
    private.chmod(0o1700)
    return repository.parent


def test_owners_and_modes_come_back_with_the_capabilities_of_a_mover_pod(folder: Path) -> None:
    found, done = _move(folder, _FOR_FILES, _FOR_FILES)
    assert (found, done.returncode, done.stderr) == (describe_tree(folder / "volume"), 0, "")


_UNSET = {"CHOWN": "owner", "FOWNER": "mode", "FSETID": "mode"}
"""What the target refuses without a capability."""


@pytest.mark.sample("CHOWN", "DAC_OVERRIDE")
@pytest.mark.parametrize("missing", _FOR_FILES)
def test_each_capability_is_needed_and_what_lacks_without_it_is_reported(folder: Path, missing: str) -> None:
    fewer = [name for name in _FOR_FILES if name != missing]
    backup = _FOR_FILES if missing != "DAC_OVERRIDE" else fewer
    found, done = _move(folder, backup, fewer)
    assert found != describe_tree(folder / "volume")
    if missing in _UNSET:
        result = json.loads(done.stdout)
        assert (done.returncode, result["unset"] > 0) == (19, True)
        assert result["note"].startswith("the target did not take the ")
        assert f"the {_UNSET[missing]} of " in result["note"]
        assert result["note"] in done.stderr.replace('\\"', '"')
