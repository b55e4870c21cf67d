"""kopia or the mover is killed during a data path: the next one continues without repair."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pytest

from core.errors import KopiaError
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.backup_movers import BACKUP_VERB, WANTED
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.thorough import KILLS, TIMEOUT_SECONDS
from tests.datamover.support.trees import describe_tree, make_large_file

pytestmark = pytest.mark.processes

_SIZE_MIB = 64
_ROOT = Path(__file__).parents[3]


def _stored(repository: Path) -> int:
    """Return how many bytes of data are in the repository."""
    total = 0
    for path in repository.glob("p*/**/*.f"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@asynccontextmanager
async def _running_kopia(volume: Path, repository: Path) -> AsyncIterator[Callable[[], int]]:
    """Back up in this process; yield a function that finds the process to kill."""
    backing_up = asyncio.create_task(build_local_mover(str(repository)).back_up(volume, "", None))
    yield lambda: next((one.pid for one in running_kopia(BACKUP_VERB)), 0)
    try:
        await backing_up
    except KopiaError as e:
        assert "kopia was killed by signal 9" in str(e)  # noqa: PT017 - it may also have ended well before


@asynccontextmanager
async def _running_mover(volume: Path, repository: Path) -> AsyncIterator[Callable[[], int]]:
    """Back up in a separate process; yield a function that finds it once its kopia is running."""
    what: list[str | Path] = ["backup", "--source", volume, "--repository", repository, f"--mover={WANTED}", "--json"]
    environment = {**os.environ, "KOPIA_PASSWORD": PASSWORD}
    argv, null = [sys.executable, "-m", "datamover", *what], subprocess.DEVNULL
    kopias = []
    with subprocess.Popen(argv, cwd=_ROOT, env=environment, stdout=null, stderr=null) as mover:

        def find() -> int:
            kopias.extend(running_kopia(BACKUP_VERB, mover.pid))
            return mover.pid if kopias else 0

        yield find
        mover.kill()
    async with asyncio.timeout(10):
        while any(Path(f"/proc/{one.pid}/exe").exists() for one in kopias):
            await asyncio.sleep(0.01)


@pytest.mark.sample("kopia")
@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("run", [_running_kopia, _running_mover], ids=["kopia", "the mover"])
async def test_a_kill_at_any_moment_needs_no_repair(
    run: Callable[[Path, Path], AbstractAsyncContextManager[Callable[[], int]]],
    repository: Path,
    tmp_path: Path,
    kopia: PlainKopia,
) -> None:
    during = 0
    for number in range(KILLS):
        volume = make_large_file(tmp_path / f"volume {number}" / "file", _SIZE_MIB).parent
        before = _stored(repository)
        # With few kills, the last one waits for the second of three packs: after the third kopia has almost ended.
        wanted = (number + 0.1) / (KILLS + 0.5) * (_SIZE_MIB << 20)
        async with run(volume, repository) as find, asyncio.timeout(60):
            while not (pid := find()):
                await asyncio.sleep(0.001)
            process = os.pidfd_open(pid)
            while (sent := _stored(repository) - before) < wanted:
                await asyncio.sleep(0.001)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        snapshots = kopia.snapshots()
        during += sent > 0 and len(snapshots) <= number
        assert all("incomplete" not in one for one in snapshots)
        for one in snapshots[number:]:
            kopia.run("snapshot", "delete", one["id"], "--delete")
        backup = await build_local_mover(str(repository)).back_up(volume, "", None)
        await build_local_mover(str(repository)).restore(backup.snapshot_id, tmp_path / "out", None)
        assert describe_tree(tmp_path / "out") == describe_tree(volume)
        for folder in (tmp_path / "out", volume):
            shutil.rmtree(folder)
    kopia.run("snapshot", "verify", "--verify-files-percent=100")
    assert during >= KILLS * 3 / 4
