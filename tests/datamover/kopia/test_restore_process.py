"""The dialogue with `kopia mover-restore`, which a coroutine plays."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataPathError, KopiaCrashError
from core.redact import Redactor
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles, Listener
from datamover.kopia.restore_process import open_once

_SECRET = "abcdefgh"


class _Program(Kopia):
    """A kopia whose process of a restore answers calls by `carry_out`; `started` has the arguments of each process.

    It ends with an exit code in the place of an answer, and cannot be started if it is to raise an error.
    """

    def __init__(self, carry_out: Callable[[list[str], list[int]], int | None]) -> None:
        super().__init__({}, Redactor([_SECRET]), program="/bin/false")
        self.carry_out = carry_out
        self.error: Exception | None = None
        self.started: list[tuple[str, ...]] = []

    async def move_data(self, attempted: str, *arguments: str, files: KopiaFiles, listener: Any) -> KopiaAnswer:
        if "mover-restore" not in arguments:
            return await super().move_data(attempted, *arguments, files=files, listener=listener)
        self.started.append(arguments)
        if self.error is not None:
            raise self.error
        assert files.stdin_fd is not None
        with socket.socket(fileno=os.dup(files.stdin_fd)) as calls:
            while True:
                exit_code = await asyncio.to_thread(self._serve, calls, files.on_output)
                if exit_code is not None:
                    listener.take_progress(f"ERROR it ends with {_SECRET}")
                    return KopiaAnswer(attempted, exit_code, b"")

    def _serve(self, calls: socket.socket, write: Any) -> int | None:
        line, passed, *_ = socket.recv_fds(calls, 1 << 20, 4)
        while not line.endswith(b"\n"):
            line += calls.recv(1 << 20)
        try:
            exit_code = self.carry_out(json.loads(line)["arguments"], passed)
        finally:
            for fd in passed:
                os.close(fd)
        if exit_code is None or exit_code < 0:
            return exit_code or -signal.SIGKILL
        write(json.dumps({"progress": {}}))
        write(json.dumps({"answer": {"exit_code": exit_code, "counters": "a_counter 1\n"}}))
        return None


def _echo(arguments: list[str], passed: list[int]) -> int:
    os.write(passed[0], json.dumps(arguments[:2]).encode())
    os.write(passed[1], f"a line\n{_SECRET}\n".encode())
    return 1 if "fails" in arguments else 0


async def test_one_process_carries_out_all_calls(tmp_path: Path) -> None:
    program = _Program(_echo)
    lines: list[str] = []
    async with open_once(program, VolumeAccess()):
        shown = await program.call("show", "--metrics-listen-addr=a:1", "manifest", "show", "x")
        failed = await program.call("show", "show", "fails")
        with (tmp_path / "out").open("w+b") as file:
            await program.call("show", "content", "show", *["k" * 64] * 5000, output_fd=file.fileno())
            assert json.loads((tmp_path / "out").read_bytes()) == ["content", "show"]
            files = KopiaFiles(inherited_fd=file.fileno(), on_output=lines.append)
            await program.move_data("read", "block-read", "--device-fd=3", files=files, listener=Listener())
        # An archive goes where the process cannot.
        (tmp_path / "archive").touch()
        await program.call("compare", "restore", "id", str(tmp_path / "archive"), "--mode=tar")
    assert json.loads((tmp_path / "archive").read_bytes()) == ["restore", "id"]
    assert shown.json() == ["--metrics-listen-addr=a:1", "manifest"]
    assert (shown.lines, shown.counters) == (["a line", "***"], "a_counter 1\n")
    assert (failed.exit_code, failed.json()) == (1, ["show", "fails"])
    assert lines == ['["block-read", "--device-fd=3"]']
    assert program.started == [("--metrics-listen-addr=a:1", "mover-restore")]
    assert program.server is None


async def test_other_calls_have_a_process_of_their_own() -> None:
    """The guard of the tests refuses it here."""
    program, other = _Program(_echo), {"KOPIA_CONFIG_PATH": "/other"}
    async with open_once(program, VolumeAccess()):
        for arguments, more in (("repository", "connect"), None), (("snapshot", "list"), None), (("show", "x"), other):
            with pytest.raises(RuntimeError, match="starts a process"):
                await program.call("other", *arguments, more=more)
        program.error = DataPathError("cannot confine kopia")
        with pytest.raises(DataPathError, match="cannot confine kopia"):
            await program.call("show", "show", "x")


@pytest.mark.parametrize("exit_code", [None, -signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
async def test_a_process_that_ends_is_the_end_of_its_call_and_another_one_follows(exit_code: int | None) -> None:
    program = _Program(lambda arguments, passed: exit_code if "ends" in arguments else _echo(arguments, passed))
    async with open_once(program, VolumeAccess()):
        ended = await program.call("show", "show", "ends", "x" * (1 << 20))
        assert ended.exit_code == (exit_code or -signal.SIGKILL)
        assert (ended.lines, ended.counters) == (["ERROR it ends with ***"], "")
        assert isinstance(ended.error(), KopiaCrashError) is (exit_code is None)
        assert (await program.call("show", "show", "y")).succeeded
    assert len(program.started) == 2


async def test_a_call_that_is_canceled_ends_its_process() -> None:
    waiting, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(_: list[str], __: list[int]) -> int:
        loop.call_soon_threadsafe(waiting.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return 0

    program = _Program(wait)
    async with open_once(program, VolumeAccess()):
        calling = asyncio.create_task(program.call("show", "show", "x"))
        await waiting.wait()
        calling.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        program.carry_out = _echo
        assert (await program.call("show", "show", "y")).succeeded
    assert len(program.started) == 2
