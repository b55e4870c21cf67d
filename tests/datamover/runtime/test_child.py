import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from core.contract import VolumeMode
from core.errors import DataPathError
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.runtime.child import ChildCommand, ChildExit, ChildFiles, kill_children, run_child, sync_file_system
from datamover.runtime.work_dir import open_root
from tests.datamover.support.data_paths import back_up_volume, restore_data_path, restore_parameters
from tests.datamover.support.loopdevice import make_ext4, mounted_image
from tests.datamover.support.mounts import mounted
from tests.support.tasks import until

pytestmark = pytest.mark.processes


def _shell(script: str, files: ChildFiles | None = None) -> ChildCommand:
    return ChildCommand(["sh", "-c", script], {"PATH": os.environ["PATH"]}, files or ChildFiles())


async def _start(script: str = "echo $$ >&2; exec sleep 1000") -> "tuple[asyncio.Task[ChildExit], int]":
    """Run a script that writes its process ID first; return its run, and that."""
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(run_child(_shell(script), lambda line: started.set_result(int(line))))
    return running, await started


def _gone(pid: int) -> bool:
    """Return whether the process has exited, including as a zombie, which another process reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while not _gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_output_and_exit_code_are_returned_and_lines_end_at_carriage_returns() -> None:
    lines: list[str] = []
    end = await run_child(_shell(r"printf 'out'; printf 'one\rtwo\nthree' >&2; exit 3"), lines.append)
    assert (end.exit_code, end.output) == (3, b"out")
    assert lines == ["one", "two", "three"]


async def test_large_output_on_both_pipes_does_not_block() -> None:
    lines: list[str] = []
    end = await run_child(_shell("for p in 1 2; do head -c 3000000 /dev/zero | tr '\\0' 'x' >&$p; done"), lines.append)
    assert len(end.output) == sum(map(len, lines)) == 3_000_000


async def test_a_child_that_is_asked_to_end_gets_sigterm_and_its_output_is_returned() -> None:
    terminate = asyncio.Event()
    script = "trap 'echo asked; exit 3' TERM; echo started >&2; while :; do :; done"
    end = await run_child(_shell(script, ChildFiles(terminate=terminate)), lambda _: terminate.set())
    assert (end.exit_code, end.output) == (3, b"asked\n")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="asyncio waits for children without a thread")
async def test_the_exit_code_of_a_child_that_has_just_ended_by_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    terminate, wait = asyncio.Event(), os.waitpid

    def wait_late(pid: int, options: int) -> tuple[int, int]:
        while not (_gone(pid) and terminate.is_set()):
            time.sleep(0.01)
        time.sleep(0.1)
        return wait(pid, options)

    monkeypatch.setattr(os, "waitpid", wait_late)
    command = _shell("echo ended >&2; exit 3", ChildFiles(terminate=terminate))

    def terminate_later(_: str) -> None:
        asyncio.get_running_loop().call_later(0.2, terminate.set)

    assert (await run_child(command, terminate_later)).exit_code == 3


async def test_cancellation_kills_a_child_that_ignores_signals() -> None:
    running, pid = await _start("trap '' TERM INT; echo $$ >&2; exec sleep 1000")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert _gone(pid)


async def test_a_killed_child_that_hangs_in_the_kernel_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    running, pid = await _start()
    abandoned: list[asyncio.subprocess.Process] = []

    def hang(process: asyncio.subprocess.Process) -> None:
        abandoned.append(process)

    with monkeypatch.context() as hangs:
        hangs.setattr("asyncio.subprocess.Process.kill", hang)
        running.cancel()
        async with asyncio.timeout(2):
            await asyncio.wait({running})
    assert running.cancelled()
    assert not _gone(pid)
    os.kill(pid, signal.SIGKILL)
    # The event loop would end without having seen its exit.
    await abandoned[0].wait()


async def test_a_thread_kills_all_children_without_the_event_loop() -> None:
    running, pid = await _start()
    killer = threading.Thread(target=kill_children)
    killer.start()
    # The event loop does not run meanwhile.
    killer.join()
    _wait_gone(pid)
    assert (await running).exit_code == -signal.SIGKILL
    kill_children()


async def test_a_missing_program_is_named() -> None:
    with pytest.raises(DataPathError, match=r"cannot start .*no-such-program: No such file"):
        await run_child(ChildCommand(["no-such-program"], {}), print)


_OWNER = """
import asyncio, os
from datamover.runtime.child import ChildCommand, ChildFiles, run_child
command = ChildCommand(["sh", "-c", "echo $$ >&2; exec sleep 1000"], os.environ)
asyncio.run(run_child(command, lambda line: print(line, flush=True)))
"""


async def test_the_child_is_killed_with_its_owner() -> None:
    argv = [sys.executable, "-c", _OWNER]
    owner = subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert owner.stdout is not None
    with owner.stdout:
        child = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _wait_gone(child)


def _put_sync(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the program that syncs by a script."""
    monkeypatch.setattr("datamover.runtime.child._SYNC", ("/bin/sh", "-c", script))


@pytest.fixture(params=list(VolumeMode), ids=str)
async def wanted(request: pytest.FixtureRequest, mover_repository: Repository, tmp_path: Path) -> RestoreParameters:
    """The parameters of a restore of what was backed up."""
    volume, target, mode = tmp_path / "volume", tmp_path / "target", request.param
    if mode is VolumeMode.BLOCK:
        volume.write_bytes(b"x" * 100_000)
        target.write_bytes(bytes(100_000))
    else:
        volume.mkdir()
    return restore_parameters(
        (await back_up_volume(mover_repository, volume, mode=mode)).snapshot_id, target, mode=mode
    )


async def test_a_restore_is_not_complete_before_its_data_is_on_the_disk(
    mover_repository: Repository, wanted: RestoreParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "held")
    _put_sync(f"touch {tmp_path}/started; read line <{tmp_path}/held", monkeypatch)
    running = asyncio.create_task(restore(mover_repository, wanted, restore_data_path()))
    await until((tmp_path / "started").exists, seconds=30, every=0.01)
    assert wanted.target.exists()
    assert not running.done()
    # The script reads from it, so this opens immediately.
    (tmp_path / "held").write_text("go on\n")
    await running


async def test_a_restore_fails_for_an_error_of_the_disk(
    mover_repository: Repository, wanted: RestoreParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put_sync("echo 'Input/output error' >&2; exit 1", monkeypatch)
    with pytest.raises(DataPathError, match=r"cannot write restored data of .*target to the disk: Input/output error$"):
        await restore(mover_repository, wanted, restore_data_path())


async def test_a_sync_that_was_killed_fails_the_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_sync("kill -9 $$", monkeypatch)
    with open_root(tmp_path) as fd, pytest.raises(DataPathError, match=r"its child exited with code -9$"):
        await sync_file_system(fd, tmp_path)


async def test_a_disk_error_that_another_program_was_told_is_told_again(tmp_path: Path) -> None:
    """The disk is larger than what it is kept in."""
    with mounted(tmp_path / "small", "size=2m") as small:
        image = small / "image"
        make_ext4(image, 64 << 20, "-O", "^has_journal")
        with mounted_image(image, tmp_path / "volume") as volume, open_root(volume) as held, open_root(volume) as other:
            (volume / "file").write_bytes(os.urandom(4 << 20))
            with pytest.raises(DataPathError, match="cannot write restored data of"):
                await sync_file_system(other, volume)
            with open_root(volume) as opened_later:
                await sync_file_system(opened_later, volume)
            with pytest.raises(DataPathError, match="cannot write restored data of"):
                await sync_file_system(held, volume)


def _open_on(path: Path) -> set[int]:
    links = list(Path("/proc/self/fd").iterdir())
    return {int(link.name) for link in links if link.is_symlink() and link.readlink() == path}


async def test_a_restore_syncs_by_a_descriptor_from_before_its_first_write(
    mover_repository: Repository, wanted: RestoreParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, synced, run = set[int](), list[int](), DataPath.run

    async def run_kopia(*arguments: Any, **options: Any) -> KopiaAnswer:
        before.update(_open_on(wanted.target))
        return await run(*arguments, **options)

    async def sync(fd: int, _: Path) -> None:
        synced.append(fd)

    monkeypatch.setattr(DataPath, "run", run_kopia)
    monkeypatch.setattr("datamover.data_path.restore.sync_file_system", sync)
    monkeypatch.setattr("datamover.data_path.block.sync_device", sync)
    await restore(mover_repository, wanted, restore_data_path())
    assert len(synced) == 1
    assert before.issuperset(synced)
