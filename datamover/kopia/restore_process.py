"""kopia's process of a restore: `mover-restore` opens the repository once, and carries out one call after the other.

A call has the arguments of one of kopia's commands, or of `block-read`. Its output, its messages and a device are
descriptors that go beside it, so that nothing but the volume is open to the process by path.
Source: tools/kopia/program/calls.go; Linux, unix(7), SCM_RIGHTS.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

from core.aio import end_task, wait_for_answer
from core.models.base import JsonDict
from datamover.kopia.backup_process import parse_line
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles, Listener
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.child import ChildCommand, ChildExit, read_all, read_lines
from datamover.runtime.work_dir import opened

_VERBS: Final = frozenset({("manifest", "show"), ("content", "show"), ("show",), ("restore",), ("block-read",)})

_METRICS: Final = "--metrics-listen-addr="
_ARCHIVE: Final = "--mode=tar"


@asynccontextmanager
async def open_once(kopia: Kopia, volume: VolumeAccess) -> AsyncIterator[None]:
    """Have one process, confined to the volume, carry out the calls of `kopia` that a restore needs within the block.

    It starts with the first one. After it has ended, for whatever reason, the next one starts another.
    """
    server = _CallServer(kopia, volume)
    kopia.server = server
    try:
        yield
    finally:
        kopia.server = None
        await server.end()


class _CallServer(Listener):
    """Runs of `mover-restore`, one after the other; one call at a time."""

    def __init__(self, kopia: Kopia, volume: VolumeAccess) -> None:
        self._kopia = kopia
        self._volume = volume
        self._child: asyncio.Task[KopiaAnswer] | None = None
        self._socket: socket.socket | None = None
        self._answered = asyncio.Event()
        self._answer: JsonDict = {}
        self._on_line: Callable[[str], None] = lambda _: None

    def serves(self, arguments: Sequence[str]) -> bool:
        """Return whether the process knows the command."""
        words = tuple(one for one in arguments if not one.startswith("-"))
        return words[:1] in _VERBS or words[:2] in _VERBS

    async def carry_out(self, command: ChildCommand, on_line: Callable[[str], None]) -> tuple[ChildExit, str]:
        """Return the exit of a call, as of a process of its own, and kopia's metrics since the last one.

        Cancellation kills the process, with the call that it carries out.
        """
        try:
            if _ARCHIVE not in command.argv:
                return await self._carry_out(command, on_line, command.files.stdout_fd)
            # The process cannot open the file by its path.
            path = [one for one in command.argv if not one.startswith("-")][-1]
            with opened(path, os.O_WRONLY) as archive:
                return await self._carry_out(command, on_line, archive)
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """Kill the process if it runs."""
        child, self._child = self._child, None
        if child is not None:
            await end_task(child)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _carry_out(
        self, command: ChildCommand, on_line: Callable[[str], None], stdout_fd: int | None
    ) -> tuple[ChildExit, str]:
        if self._child is not None and self._child.done():
            await self.end()
        self._on_line = on_line
        self._answered.clear()
        child = self._child = self._child or self._start(command.argv)
        async with _open_pipe() as (messages, messages_fd), _open_pipe() as (output, output_fd):
            passed = [output_fd if stdout_fd is None else stdout_fd, messages_fd]
            if command.files.inherited_fd is not None:
                passed.append(command.files.inherited_fd)
            line = json.dumps({"arguments": list(command.argv)}).encode() + b"\n"
            send = partial(self._send, line, passed, (output_fd, messages_fd))
            on_output = command.files.on_output
            reading = read_all(output) if on_output is None else read_lines(output, on_output)
            collecting = asyncio.gather(reading, read_lines(messages, on_line))
            try:
                async with run_in_background(send, name="call"):
                    answered = await wait_for_answer(self._answered, child)
                exit_code = int(self._answer["exit_code"]) if answered else child.result().exit_code or 1
                counters = str(self._answer["counters"]) if answered else ""
                return ChildExit(exit_code, (await collecting)[0]), counters
            finally:
                collecting.cancel()
                with suppress(asyncio.CancelledError):
                    await collecting

    def _start(self, argv: Sequence[str]) -> "asyncio.Task[KopiaAnswer]":
        self._socket, theirs = socket.socketpair()
        files = KopiaFiles(stdin_fd=theirs.fileno(), volume=self._volume, on_output=self._take_output)
        # The meter of the call also measures how the repository is opened.
        measured = [one for one in argv if one.startswith(_METRICS)]
        call = self._kopia.move_data("open the repository", *measured, "mover-restore", files=files, listener=self)
        child = asyncio.create_task(call, name="mover-restore")
        # A call that it has not read fails then.
        child.add_done_callback(lambda _: theirs.close())
        return child

    def _send(self, line: bytes, passed: Sequence[int], own: Sequence[int], _: ShouldStop) -> None:
        try:
            # Its end says why it reads nothing.
            with suppress(OSError):
                if (to := self._socket) is not None:
                    sent = socket.send_fds(to, [line], passed)
                    to.sendall(line[sent:])
        finally:
            for fd in own:
                os.close(fd)

    def _take_output(self, line: str) -> None:
        key, value = parse_line(line)
        if key == "answer":
            self._answer = value
            self._answered.set()

    def take_progress(self, line: str) -> str:
        """Take a line of the process itself, such as why it cannot open the repository: it is the call's."""
        self._on_line(line)
        return ""


@asynccontextmanager
async def _open_pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Yield what reads from a new pipe, and its other end, which the caller closes."""
    reader = asyncio.StreamReader()
    reading, writing = os.pipe()
    file = os.fdopen(reading, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    try:
        yield reader, writing
    finally:
        transport.close()
