"""A restore in place is killed: each file is the old or the new one, and the next restore needs no repair.

What an agent does that is killed meanwhile is in `tests/nodeagent/flows/test_crash_matrix.py`: the mover runs on.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import back_up_volume
from tests.datamover.support.processes import children_of
from tests.datamover.support.thorough import KILLS, TIMEOUT_SECONDS
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_FILES = 300
_STAGE = ".nodeagent-restore-files"
_ROOT = Path(__file__).parents[3]

_RESTORE = """
import asyncio, sys
from pathlib import Path
from core.models.transfer_settings import InPlace
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import restore_volume
from tests.datamover.support.repositories import opened

repository, snapshot, volume, incremental = sys.argv[1:]
rule = InPlace(incremental=incremental == "True", delete_extra_files=True)
with opened(FileStorage(Path(repository))) as found:
    asyncio.run(restore_volume(found, snapshot, Path(volume), in_place=rule))
"""


def _fill(volume: Path, text: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        (volume / str(number % 5)).mkdir(parents=True, exist_ok=True)
        (volume / str(number % 5) / str(number)).write_text(f"{text} {number}" * 200)


def _change(volume: Path) -> None:
    """Change and delete files and a directory, and add some."""
    _fill(volume, "old", range(0, _FILES, 2))
    shutil.rmtree(volume / "4")
    (volume / "extra" / "below").mkdir(parents=True)
    _fill(volume / "extra", "extra", range(50))


def _progress(volume: Path) -> int:
    """Return how much was done, in files that are written or moved: two steps for each."""
    staged = 0
    with suppress(FileNotFoundError):
        staged = sum(path.suffix != ".kopia-entry" for path in (volume / _STAGE / "new").iterdir())
    changed = [volume / str(number % 5) / str(number) for number in range(0, _FILES, 2) if number % 5 != 4]
    return staged + 2 * sum(not path.read_text().startswith("old") for path in changed)


_VICTIMS = {"mover": (True, False), "node": (True, True), "kopia": (False, True)}
"""Whether the mover and its kopia are killed. A mover whose kopia is killed ends by itself, and its kopia with it."""


async def _kill(process: "subprocess.Popen[bytes]", volume: Path, who: str, steps: int) -> bool:
    """Kill after so many steps, and return once nothing of it runs; return whether it was still running."""
    mover, kopia = _VICTIMS[who]
    kopias: list[int] = []
    while process.poll() is None:
        kopias = [child.pid for child in children_of(process.pid)]
        if _progress(volume) > steps and (mover or kopias):
            break
        await asyncio.sleep(0.001)
    for pid in [*([process.pid] if mover else []), *(kopias if kopia else [])]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = process.wait(timeout=120)
    async with asyncio.timeout(10):
        while any(Path(f"/proc/{pid}/exe").exists() for pid in kopias):
            await asyncio.sleep(0.01)
    return code != 0


@pytest.mark.sample("incremental")
@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_a_kill_at_any_moment_leaves_old_or_new_files_and_the_next_restore_is_right(
    mover_repository: Repository, repository: Path, tmp_path: Path, incremental: bool
) -> None:
    source, during = tmp_path / "source", 0
    _fill(source, "new", range(_FILES))
    snapshot_id = (await back_up_volume(mover_repository, source)).snapshot_id
    for moment in range(KILLS):
        volume = tmp_path / f"volume {moment}"
        shutil.copytree(source, volume, copy_function=shutil.copy2)
        _change(volume)
        before = {path: path.read_text() for path in volume.rglob("*") if path.is_file() and "extra" not in path.parts}
        argv = [sys.executable, "-c", _RESTORE, str(repository), snapshot_id, str(volume), str(incremental)]
        who, steps = list(_VICTIMS)[moment % len(_VICTIMS)], _FILES * moment // KILLS
        with subprocess.Popen(argv, cwd=_ROOT) as process:
            during += await _kill(process, volume, who, steps)
        for path, old in before.items():
            assert path.read_text() in {old, (source / path.relative_to(volume)).read_text()}
        subprocess.run(argv, cwd=_ROOT, check=True, timeout=120)
        assert describe_tree(volume) == describe_tree(source)
        shutil.rmtree(volume)
    assert during >= KILLS / 2
