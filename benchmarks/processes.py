"""Programs, run one after another and measured: time, processor time, and memory of each process.

Knows how a process's peak is read, and what several processes had at one time. Does not know
what is run.
Source: proc(5): VmHWM is the largest resident set a process ever had; `execve` resets it,
and so does a 5 written to `clear_refs`.
"""

import asyncio
import re
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["BenchmarkError", "Command", "Measured", "measure"]

_SAMPLE_SECONDS: Final = 0.02
_PEAK: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_KIB_A_MIB: Final = 1024
_SHOWN_BYTES: Final = 4000
_LIMIT_SECONDS: Final = 600.0
"""Far more than any command takes; kopia alone goes on for a quarter of an hour when its storage was removed."""


class BenchmarkError(Exception):
    """Something that is measured failed, or had a wrong result."""


@dataclass(frozen=True)
class Command:
    """What to run; `log` takes both outputs, `group` is the control group to run in, if any."""

    argv: Sequence[str | Path]
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    group: Path | None = None

    @property
    def whole(self) -> list[str]:
        """`argv`, entering the group first: so all it does is accounted there."""
        argv = [str(word) for word in self.argv]
        if self.group is None:
            return argv
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group), *argv]


@dataclass(frozen=True)
class Measured:
    """Some commands, run: when they began and ended (Unix time, ns), their processor time, and peaks in MiB.

    `own_mib` is the largest peak among the commands themselves, `children_mib` the largest
    among their children, whenever each was. `together_mib` is the most that a command and all
    its children had within one 50th of a second: each one's peak in that time, added.
    """

    began_ns: int
    ended_ns: int
    own_mib: float
    children_mib: float
    together_mib: float
    cpu_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        return (self.ended_ns - self.began_ns) / 1e9

    @property
    def added_mib(self) -> float:
        """The commands' and their children's largest peaks, although they need not have been at one time."""
        return self.own_mib + self.children_mib


async def measure(*commands: Command) -> Measured:
    """Run the commands one after the other and return what they took.

    Raises:
        BenchmarkError: one of them failed, or did not end.
    """
    peaks = _Peaks()
    spent_seconds = _cpu_seconds()
    began_ns = time.time_ns()
    for command in commands:
        with command.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command.whole, env=dict(command.environment), stdout=log, stderr=log
            )
            sampling = asyncio.create_task(_sample(process.pid, peaks), name="sampling")
            try:
                async with asyncio.timeout(_LIMIT_SECONDS):
                    code = await process.wait()
                ended_ns = time.time_ns()
            except TimeoutError as e:
                process.kill()
                await process.wait()
                raise BenchmarkError(f"{' '.join(map(str, command.argv))} did not end: {_last_output(command)}") from e
            finally:
                sampling.cancel()
                await asyncio.wait({sampling})
        if code:
            raise BenchmarkError(f"{' '.join(map(str, command.argv))} ended with {code}: {_last_output(command)}")
    own, children, together = (kib / _KIB_A_MIB for kib in (peaks.own, peaks.children, peaks.together))
    return Measured(began_ns, ended_ns, own, children, together, _cpu_seconds() - spent_seconds)


def _cpu_seconds() -> float:
    """Return the processor time of all children that have ended; no others end while one is measured."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _last_output(command: Command) -> str:
    return command.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")


@dataclass
class _Peaks:
    """The largest so far, in KiB."""

    own: int = 0
    children: int = 0
    together: int = 0

    def sample(self, pid: int) -> None:
        """Take in what a process and its children had since the last sample."""
        own = _take_peak(pid)
        children: list[int] = []
        # A process that ended meanwhile reports no more.
        with suppress(OSError):
            pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            children += [_take_peak(int(child)) for child in pids]
        self.own = max(self.own, own)
        self.children = max(self.children, *children, 0)
        self.together = max(self.together, own + sum(children))


async def _sample(pid: int, peaks: _Peaks) -> None:
    """Keep the peaks of a process and its children up to date; what grows in the last 20 ms is missed."""
    while True:
        peaks.sample(pid)
        await asyncio.sleep(_SAMPLE_SECONDS)


def _take_peak(pid: int) -> int:
    """Return a process's peak since this was last asked, in KiB.

    Only a peak between its reading and its reset, microseconds later, is missed.
    Where the kernel has no `clear_refs` it is the peak since the beginning, which is never less.
    """
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        if found := _PEAK.search(status):
            return int(found[1])
    return 0
