"""On a command line, too, kopia is confined by what the kernel has, or the command fails."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import DataPathError
from tests.datamover.support.mounts import need_root
from tests.datamover.support.plainkopia import PASSWORD
from tests.support.attacks import describe
from tests.support.seccomp import CHROOT, LANDLOCK, MOUNTS, deny

pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a tenant's volume, with a file."""
    folder = tmp_path / "volume" / "a"
    folder.mkdir(parents=True)
    (folder / "sync").write_text("a program of the tenant")
    return folder


def _run(deny_before_exec: Callable[[], None], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "datamover", *arguments, "--json", "--log-level=info"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "KOPIA_PASSWORD": PASSWORD},
        preexec_fn=deny_before_exec,
        capture_output=True,
        text=True,
        check=False,
    )


def test_by_hand_on_a_kernel_without_landlock_a_jail_is_in_force(
    repository: Path, tmp_path: Path, folder: Path
) -> None:
    need_root("jails")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "sync").write_text("a program of the system")
    there = f"--repository={repository}"
    backup = _run(deny(LANDLOCK), "backup", f"--source={folder.parent}", there)
    assert "kopia is confined to its volume by a chroot jail" in backup.stderr.splitlines()[0]
    folder.rename(tmp_path / "away")
    folder.symlink_to(outside)
    before = describe(outside)
    snapshot = f"--snapshot={json.loads(backup.stdout)['snapshotID']}"
    restored = _run(deny(LANDLOCK), "restore", snapshot, f"--target={folder.parent}", "--overwrite", there)
    assert restored.returncode == 0, restored.stderr
    assert "replaced 1 links in the target by what the kopia snapshot has there, for example a" in restored.stderr
    assert describe(outside) == before
    assert (folder / "sync").read_text() == "a program of the tenant"


def test_by_hand_root_without_any_means_fails_with_the_reason(repository: Path, folder: Path) -> None:
    need_root("this")
    nothing = deny((*LANDLOCK, *MOUNTS, *CHROOT), errno.EPERM)
    failed = _run(nothing, "backup", f"--source={folder.parent}", f"--repository={repository}")
    assert failed.returncode == DataPathError.exit_code
    assert "kopia cannot be confined to its volume: no Landlock (Operation not permitted)" in failed.stderr
    assert "error: cannot confine kopia to its volume: no Landlock (Operation not permitted)" in failed.stderr
