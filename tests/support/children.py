"""Python programs of this repository as children: started, waited for, measured, ended.

Knows processes. Does not know what the programs do.
Source: proc(5): utime and stime of /proc/PID/stat in clock ticks, VmRSS of /proc/PID/status.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

_ROOT: Final = Path(__file__).parents[2]
_RSS: Final = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)
_KIB_A_MIB: Final = 1024
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_UTIME: Final = 11
_SHOWN_BYTES: Final = 3000
_END_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.1
_OK: Final = 200


class ChildError(Exception):
    """A program ended, or was not ready in time; the message has its last output."""


@dataclass
class Child:
    """A running program; its output is written to `log`, except the line that reports readiness."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def memory_mib(self) -> float:
        """Its resident set now."""
        found = _RSS.search(Path(f"/proc/{self.process.pid}/status").read_text())
        if found is None:
            raise self.failed("has no memory any more")
        return int(found[1]) / _KIB_A_MIB

    @property
    def cpu_seconds(self) -> float:
        """The time it has computed for."""
        parts = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[_UTIME]) + int(parts[_UTIME + 1])) / _TICKS_A_SECOND

    def check(self) -> None:
        """Raise ChildError if it has ended."""
        if self.process.returncode is not None:
            raise self.failed(f"ended with {self.process.returncode}")

    def failed(self, what: str) -> ChildError:
        """Return the error with `what` and the last output of the program."""
        output = self.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
        return ChildError(f"{self.name} {what}: {output}")

    def pause(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it continue."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        """Terminate it and wait for its end; kill it after a time."""
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.process.wait()
        except TimeoutError:
            await self.kill()

    async def wait_ready(self, seconds: float) -> None:
        """Return once it printed its first line."""
        if self.process.stdout is None:
            raise self.failed("has no standard output")
        try:
            async with asyncio.timeout(seconds):
                line = await self.process.stdout.readline()
        except TimeoutError as e:
            raise self.failed(f"was not ready within {seconds:.0f} s") from e
        if not line:
            await self.process.wait()
            raise self.failed(f"ended with {self.process.returncode}")


async def start_child(
    module: str, arguments: Sequence[str], *, name: str, log: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Start `python -m module arguments` of this repository; it dies with us."""
    argv = [sys.executable, "-m", module, *arguments]
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            "setpriv",
            "--pdeathsig",
            "KILL",
            *argv,
            cwd=_ROOT,
            env=os.environ | dict(environment or {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
        )
    return Child(name, process, log)


async def wait_until_ready(port: int) -> None:
    """Return once the agent that listens there reports that it is ready."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == _OK:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(_POLL_SECONDS)
