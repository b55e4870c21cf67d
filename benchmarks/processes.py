"""Programs, run one after another and measured: time, processor time, and memory of each and of their group.

Source: proc(5): VmHWM is the largest resident set a process ever had; `execve` resets it.
"""

import asyncio
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.groups import MemoryGroup
from datamover.runtime.sandbox import no_flushes

_SAMPLE_SECONDS: Final = 0.02
_PEAK: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_BYTES_A_KIB: Final = 1024
_KIB_A_MIB: Final = 1024
_SHOWN_BYTES: Final = 4000
_LIMIT_SECONDS: Final = 3600.0
"""Far more than any command takes; kopia alone goes on for a quarter of an hour when its storage was removed."""


class BenchmarkError(Exception):
    """Something that is measured failed, or had a wrong result."""


@dataclass(frozen=True)
class Command:
    """What to run; `log` takes both outputs, `group` is the control group to run in, if any.

    Without `flushes`, what it writes need not be on the disk when it has flushed it.
    """

    argv: Sequence[str | Path]
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    group: MemoryGroup | None = None
    flushes: bool = True

    @property
    def whole(self) -> list[str]:
        """`argv`, entering the group first: so all it does is accounted there."""
        argv = [str(word) for word in self.argv]
        if self.group is None:
            return argv
        return ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group.folder), *argv]


@dataclass(frozen=True)
class Measured:
    """Some commands, run: when they began and ended (Unix time, ns), their processor time, and peaks in MiB.

    `own_mib` is the largest peak among the commands, without their children. `working_set_mib` is the most that the
    commands' group had 50 times per second; None without a group.
    """

    began_ns: int
    ended_ns: int
    own_mib: float
    cpu_seconds: float = 0.0
    working_set_mib: float | None = None

    @property
    def seconds(self) -> float:
        """How long all of it took."""
        return (self.ended_ns - self.began_ns) / 1e9


async def measure(*commands: Command) -> Measured:
    """Run the commands one after the other and return what they took; raises BenchmarkError."""
    peaks = _Peaks()
    spent_seconds = _cpu_seconds()
    began_ns = time.time_ns()
    for command in commands:
        with command.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command.whole, env=dict(command.environment), stdout=log, stderr=log, preexec_fn=_before_exec(command)
            )
            sampling = asyncio.create_task(_sample(process.pid, command.group, peaks), name="sampling")
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
    group_mib = peaks.working_set / _KIB_A_MIB if any(command.group for command in commands) else None
    return Measured(began_ns, ended_ns, peaks.own / _KIB_A_MIB, _cpu_seconds() - spent_seconds, group_mib)


def _before_exec(command: Command) -> Callable[[], None] | None:
    """Return what the new process does before it becomes the program."""
    if command.flushes:
        return None
    steps = no_flushes()

    def take_steps() -> None:
        for _, step in steps:
            step()

    return take_steps


def _cpu_seconds() -> float:
    """Return the processor time of all children that have ended; no others end while one is measured."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _last_output(command: Command) -> str:
    return command.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")


def read_peak(pid: int) -> int:
    """Return the largest resident memory that a process ever had, in KiB; 0 once it has ended."""
    found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


@dataclass
class _Peaks:
    """The largest so far, in KiB."""

    own: int = 0
    working_set: int = 0

    def sample(self, pid: int, group: MemoryGroup | None) -> None:
        """Take in what a process had so far, and what its group has."""
        if group is not None:
            self.working_set = max(self.working_set, group.working_set_bytes // _BYTES_A_KIB)
        # A process that ended meanwhile reports no more.
        with suppress(OSError):
            self.own = max(self.own, read_peak(pid))


async def _sample(pid: int, group: MemoryGroup | None, peaks: _Peaks) -> None:
    """Keep the peaks of a process and its group up to date; what grows in the last 20 ms is missed."""
    while True:
        peaks.sample(pid, group)
        await asyncio.sleep(_SAMPLE_SECONDS)
