import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime.child import ChildCommand, ChildExit, ChildFiles, kill_children, run_child

pytestmark = pytest.mark.processes


def _shell(script: str, stdin_fd: int | None = None, stdout_fd: int | None = None) -> ChildCommand:
    return ChildCommand(["sh", "-c", script], {"PATH": os.environ["PATH"]}, ChildFiles(stdin_fd, stdout_fd))


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
    assert len(end.output) == 3_000_000
    assert sum(map(len, lines)) == 3_000_000


async def test_standard_input_and_output_may_be_open_files(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from a file")
    with (tmp_path / "in").open() as given, (tmp_path / "out").open("w") as output:
        await run_child(_shell("cat", stdin_fd=given.fileno(), stdout_fd=output.fileno()), print)
    assert (tmp_path / "out").read_text() == "from a file"


async def test_a_child_that_is_asked_to_end_gets_sigterm_and_its_output_is_returned() -> None:
    terminate = asyncio.Event()
    script = "trap 'echo asked; exit 3' TERM; echo started >&2; while :; do :; done"
    command = replace(_shell(script), files=ChildFiles(terminate=terminate))
    end = await run_child(command, lambda _: terminate.set())
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
    command = replace(_shell("echo ended >&2; exit 3"), files=ChildFiles(terminate=terminate))

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
    with monkeypatch.context() as hangs:
        hangs.setattr("asyncio.subprocess.Process.kill", lambda _: None)
        running.cancel()
        async with asyncio.timeout(2):
            await asyncio.wait({running})
    assert running.cancelled()
    assert not _gone(pid)
    os.kill(pid, signal.SIGKILL)
    _wait_gone(pid)


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
