"""A kopia that is ended by a signal of another process: the transfer fails in a way that another attempt may avoid."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from core.errors import KopiaCrashError
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import children_of
from tests.datamover.support.trees import make_large_file
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_KILLED = "kopia was killed by signal 9"
_CRASHED = "kopia crashed: SIG"


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


async def _interrupt(pod: MoverPod, flag: str, volume: Path, number: signal.Signals) -> int:
    """Run the data mover; send the signal to its kopia, once that is about to move data, and return the exit code."""

    def moving() -> list[int]:
        return [
            one.pid
            for one in children_of(os.getpid())
            if " --progress " in one.arguments
            or (" mover-backup " in one.arguments and _reads(one.pid, "file"))
            or (" mover-restore " in one.arguments and any(volume.iterdir()))
        ]

    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run(flag, volume))
        await pod.wait_for(lambda: bool(moving()))
        # Go handles signals once its runtime has started.
        await pod.wait_for(lambda: bool(_caught(moving()[0]) & 1 << number - 1) or number is signal.SIGKILL)
        os.kill(moving()[0], number)
    return running.result()


def _reads(pid: int, name: str) -> bool:
    """Return whether a process has a file of that name open; kopia may be in a jail."""
    with suppress(OSError):
        return any(fd.readlink().name == name for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _caught(pid: int) -> int:
    """Return the mask of the signals that a process handles."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))


@pytest.mark.sample("9-*", "11-*")
@pytest.mark.parametrize(
    ("number", "shown"),
    [(signal.SIGKILL, _KILLED), (signal.SIGSEGV, _CRASHED), (signal.SIGBUS, _CRASHED)],
    ids=str,
)
async def test_a_backup_whose_kopia_crashes_says_so(
    pod: MoverPod, tmp_path: Path, number: signal.Signals, shown: str
) -> None:
    make_large_file(tmp_path / "volume" / "file", 100)
    pod.put_transfer("DataUpload")
    assert await _interrupt(pod, "data-upload", tmp_path / "volume", number) == KopiaCrashError.exit_code
    assert pod.message.startswith(f"back up {tmp_path / 'volume'}: {shown}")
    assert pod.reasons()[-2:] == ["Data-Path-Failed", "Data-Path-Stopped"]


async def test_a_restore_whose_kopia_is_killed_says_so(pod: MoverPod, tmp_path: Path) -> None:
    make_large_file(tmp_path / "volume" / "file", 100)
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tmp_path / "volume") == 0
    pod.put_transfer("DataDownload", snapshotID=pod.result["snapshotID"])
    (tmp_path / "target").mkdir()
    assert await _interrupt(pod, "data-download", tmp_path / "target", signal.SIGKILL) == KopiaCrashError.exit_code
    assert f"to {tmp_path / 'target'}: {_KILLED}" in pod.message
