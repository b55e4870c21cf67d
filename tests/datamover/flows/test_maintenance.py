"""The commands of docs/repositories.md for the maintenance of a repository, run as they are written there."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from datamover.storage.providers import FileStorage
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.repositories import opened

pytestmark = pytest.mark.processes

_FULL_ONLY = "snapshot-gc"
"""The task that finds what only deleted snapshots held. Source: kopia 0.23.1, snapshot/snapshotmaintenance."""

_PAGE = Path(__file__).parents[3] / "docs" / "repositories.md"


def _commands() -> list[str]:
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("      kopia ")]


def _run(command: str, kopia: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{kopia.parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "KOPIA_PASSWORD": PASSWORD,
        "KOPIA_CHECK_FOR_UPDATES": "false",
    }
    storage = f"filesystem --path={folder / 'r'}"
    words = shlex.split(command.replace("STORAGE", storage))
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
async def ours(tmp_path: Path) -> Path:
    """A folder with a repository `r`, as the init pod creates it."""
    with opened(FileStorage(tmp_path / "r"), PASSWORD) as repository:
        await repository.ensure()
    return tmp_path


async def test_these_lines_run_full_maintenance(ours: Path, kopia_program: Path) -> None:
    connect, maintain = _commands()
    for command in (connect, maintain):
        done = _run(command, kopia_program, ours)
        assert done.returncode == 0, done.stderr
    info = json.loads(_run("kopia maintenance info --json", kopia_program, ours).stdout)
    assert info["owner"] == "default@default"
    runs = info["schedule"]["runs"]
    assert _FULL_ONLY in runs
    assert all(run["success"] for task in runs.values() for run in task)


async def test_each_word_of_them_is_needed(ours: Path, kopia_program: Path) -> None:
    connect, maintain = _commands()
    assert _run(connect.partition(" --override")[0], kopia_program, ours).returncode == 0
    assert _run(maintain, kopia_program, ours).returncode != 0, "another identity does not own the maintenance"
    assert _run(connect, kopia_program, ours).returncode == 0
    assert _run(maintain.removesuffix(" --full"), kopia_program, ours).returncode == 0
    info = json.loads(_run("kopia maintenance info --json", kopia_program, ours).stdout)
    assert _FULL_ONLY not in info["schedule"].get("runs", {})
