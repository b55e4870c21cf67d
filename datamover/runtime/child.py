"""One child process that never outlives its owner, and the sync of restored data through one.

A child is ended by KILL, because kopia saves an incomplete snapshot on any other signal. TERM, on request, lets it do
so. Data is synced by a child, because a thread that waits for a slow disk could not be ended by a cancel.
Source: Linux, syncfs(2), fsync(2); fs/sync.c (an error comes once to each descriptor that was open then).
"""

import asyncio
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import DataPathError
from datamover.runtime.cancellation import run_beside
from datamover.runtime.confinement import Confinement
from datamover.runtime.sandbox import LIBC
from datamover.runtime.work_dir import attempting

_PR_SET_PDEATHSIG: Final = 1
"""Source: linux/prctl.h."""

_KILL_TIMEOUT: Final = timedelta(seconds=1)
"""A killed process that still exists after this hangs in the kernel. A canceled transfer ends within 2 seconds."""

_KIB: Final = 1024
_PIECE_BYTES: Final = 65536
_LINE_END: Final = re.compile(rb"[\r\n]+")

WRITING: Final = "writing restored data to the disk"
"""The operation, for warnings that it takes long."""

_running: Final[set[int]] = set()
"""The children that have not exited, for a thread that cannot wait for the event loop."""

_SYNC: Final = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    """
import ctypes, os, sys
if getattr(ctypes.CDLL(None, use_errno=True), sys.argv[1])(int(sys.argv[2])):
    sys.exit(os.strerror(ctypes.get_errno()))
""",
)
"""The program `sync` would open the path once more, and the kernel gives a new descriptor no error that another got."""


@dataclass(frozen=True)
class ChildFiles:
    """Open files for a child, and what ends it.

    Without `stdin_fd` it has no input. Without `stdout_fd` its output is collected, or `on_output` gets the lines.
    `inherited_fd` stays open. It gets TERM once, when `terminate` is set.
    """

    stdin_fd: int | None = None
    stdout_fd: int | None = None
    terminate: asyncio.Event | None = None
    inherited_fd: int | None = None
    on_output: Callable[[str], None] | None = None


@dataclass(frozen=True)
class ChildCommand:
    """A program: `argv` with its name first, its whole environment; without `confinement` it may open any file."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    files: ChildFiles = field(default_factory=ChildFiles)
    confinement: Confinement | None = None


@dataclass(frozen=True)
class ChildExit:
    """The exit of a child; a negative code is the signal that killed it."""

    exit_code: int
    output: bytes


async def run_child(command: ChildCommand, on_line: Callable[[str], None]) -> ChildExit:
    """Run the program until it exits; `on_line` is called with each line of its standard error.

    A line ends with a line feed or a carriage return. Cancellation kills the child and waits for its exit. The kernel
    kills the child if this process is killed.

    Raises:
        DataPathError: the program cannot be started.
    """
    files = command.files
    with attempting(f"start {command.argv[0]}"):
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL if files.stdin_fd is None else files.stdin_fd,
            stdout=asyncio.subprocess.PIPE if files.stdout_fd is None else files.stdout_fd,
            stderr=asyncio.subprocess.PIPE,
            env=dict(command.environment),
            pass_fds=() if files.inherited_fd is None else (files.inherited_fd,),
            # A separate process group: an interrupt from the terminal reaches only this process.
            process_group=0,
            preexec_fn=_prepare(command, os.getpid()),
        )
    _running.add(process.pid)
    try:
        return await run_beside(
            lambda: _terminate(process, files.terminate),
            _collect(process, on_line, files.on_output),
            name="child-termination",
        )
    finally:
        await _end(process)
        if process.returncode is not None:
            _running.discard(process.pid)


def running_children() -> tuple[int, ...]:
    """Return the process IDs of all children of this process that have not exited."""
    return tuple(_running)


def kill_children() -> None:
    """Kill all children of this process at once, from any thread; their exit is not awaited."""
    for pid in running_children():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_peak_bytes() -> int:
    """Return the highest resident memory of this process, and of any child that has exited, together."""
    each = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(one).ru_maxrss for one in each) * _KIB


def _prepare(command: ChildCommand, parent: int) -> Callable[[], None]:
    """Return what the child runs before the program: it is killed when `parent` exits, and confines itself."""
    # Looked up before the fork: another thread may hold the loader's lock at that moment.
    prctl = LIBC.prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        if command.confinement is not None:
            command.confinement.enter(command.argv, command.environment)

    return in_child


async def _terminate(process: asyncio.subprocess.Process, requested: asyncio.Event | None) -> None:
    if requested is None:
        return
    await requested.wait()
    # `terminate` would reap a child that has just ended, and its exit code would be lost.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


async def _collect(
    process: asyncio.subprocess.Process, on_line: Callable[[str], None], on_output: Callable[[str], None] | None
) -> ChildExit:
    reading = read_all(process.stdout) if on_output is None else read_lines(process.stdout, on_output)
    async with asyncio.TaskGroup() as readers:
        output = readers.create_task(reading, name="child-output")
        readers.create_task(read_lines(process.stderr, on_line), name="child-errors")
    return ChildExit(await process.wait(), output.result())


async def read_all(stream: asyncio.StreamReader | None) -> bytes:
    """Return what the stream has until its end."""
    return b"" if stream is None else await stream.read()


async def read_lines(stream: asyncio.StreamReader | None, on_line: Callable[[str], None]) -> bytes:
    """Pass each line on, and return nothing of it."""
    rest = b""
    while stream is not None and (piece := await stream.read(_PIECE_BYTES)):
        *lines, last = _LINE_END.split(piece)
        for line in lines:
            on_line((rest + line).decode(errors="replace"))
            rest = b""
        rest += last
    if rest:
        on_line(rest.decode(errors="replace"))
    return b""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        await run_shielded(process.communicate, name="child-end", deadline=Deadline.after(SystemClock(), _KILL_TIMEOUT))


async def sync_file_system(fd: int, path: Path) -> None:
    """Write all cached data of the file system of the directory `path` to the disk.

    `fd` is open on it since before the first write, so that it gets each error of the disk since.

    Raises:
        DataPathError: a write failed.
    """
    await _sync("syncfs", fd, path)


async def sync_device(fd: int, path: Path) -> None:
    """Write all cached data of a device to the disk, as `sync_file_system`."""
    await _sync("fsync", fd, path)


async def _sync(function: str, fd: int, path: Path) -> None:
    lines: list[str] = []
    command = ChildCommand([*_SYNC, function, str(fd)], os.environ, ChildFiles(inherited_fd=fd))
    if code := (await run_child(command, lines.append)).exit_code:
        cause = " ".join(lines) or f"its child exited with code {code}"
        raise DataPathError(f"cannot write restored data of {path} to the disk: {cause}")
