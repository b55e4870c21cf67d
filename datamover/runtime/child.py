"""One child process that never outlives its owner.

Knows how a program is started, its pipes drained, and its end made certain: by KILL, because
kopia saves an incomplete snapshot on any gentler signal. Does not know what the program does.

Restored data reaches the disk before anybody says so.

Knows the program that asks the kernel for it. A child does it, because a thread that waits
for a slow disk could not be left when the load is canceled.
Source: GNU coreutils 9.1, sync(1).
"""

import asyncio
import ctypes
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import DataPathError

__all__ = ["WRITING", "ChildCommand", "ChildEnd", "run_child", "sync_device", "sync_file_system"]


_PR_SET_PDEATHSIG: Final = 1
"""Source: linux/prctl.h."""


_KILL_TIME: Final = timedelta(seconds=1)
"""A killed process that is still there after this hangs in the kernel, on a disk that does not answer.

It ends when the kernel lets it; nobody waits for it longer: a canceled load ends within 2 seconds."""


_PIECE_BYTES: Final = 65536


_LINE_END: Final = re.compile(rb"[\r\n]+")


@dataclass(frozen=True)
class ChildCommand:
    """What to run: `argv` with the program first, the whole environment, files for input and output.

    Without `stdin_fd` the child reads nothing; without `stdout_fd` its output is collected.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    stdin_fd: int | None = None
    stdout_fd: int | None = None


@dataclass(frozen=True)
class ChildEnd:
    """How the child ended: a negative code is the signal that ended it."""

    exit_code: int
    output: bytes


async def run_child(command: ChildCommand, on_line: Callable[[str], None]) -> ChildEnd:
    """Run the program to its end; `on_line` gets each line of its standard error.

    A line ends with a line feed or a carriage return. Cancellation kills the child and waits
    for its end before it goes on. The child dies too if this process is killed.

    Raises:
        DataPathError: the program cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL if command.stdin_fd is None else command.stdin_fd,
            stdout=asyncio.subprocess.PIPE if command.stdout_fd is None else command.stdout_fd,
            stderr=asyncio.subprocess.PIPE,
            env=dict(command.environment),
            # A group of its own: an interrupt typed at the terminal reaches this process alone.
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
        )
    except OSError as e:
        raise DataPathError(f"{command.argv[0]} cannot be started: {e.strerror}") from e
    try:
        async with asyncio.TaskGroup() as readers:
            output = readers.create_task(_read_all(process.stdout), name="child-output")
            readers.create_task(_read_lines(process.stderr, on_line), name="child-errors")
        return ChildEnd(await process.wait(), output.result())
    finally:
        await _end(process)


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Return what the child runs before the program: the kernel shall kill it when `parent` dies."""
    # PyDLL keeps the interpreter's lock, which nobody could hand back between fork and exec.
    prctl = ctypes.PyDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child


async def _read_all(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()


async def _read_lines(stream: asyncio.StreamReader | None, on_line: Callable[[str], None]) -> None:
    rest = b""
    while stream is not None and (piece := await stream.read(_PIECE_BYTES)):
        *lines, last = _LINE_END.split(piece)
        for line in lines:
            on_line((rest + line).decode(errors="replace"))
            rest = b""
        rest += last
    if rest:
        on_line(rest.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the child if it is still there and wait until it is gone."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        await run_shielded(process.communicate, name="child-end", deadline=Deadline.after(SystemClock(), _KILL_TIME))


WRITING: Final = "writing what was restored to the disk"
"""What takes so long, for whoever asks."""


async def sync_file_system(path: Path) -> None:
    """Write out everything on the file system that holds `path`.

    Raises:
        DataPathError: the disk did not take it.
    """
    await _sync("--file-system", path)


async def sync_device(path: Path) -> None:
    """Write out everything that was written to the device.

    Raises:
        DataPathError: the disk did not take it.
    """
    await _sync(str(path))


async def _sync(*arguments: str | Path) -> None:
    lines: list[str] = []
    end = await run_child(ChildCommand(["sync", *map(str, arguments)], os.environ), lines.append)
    if end.exit_code:
        raise DataPathError(f"what was restored to {arguments[-1]} did not reach the disk: {' '.join(lines)}")
