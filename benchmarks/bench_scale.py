"""`python -m benchmarks.bench_scale`: many agents and many transfers before a real API server.

Knows which scenarios there are, in which order, and how much time each has. Does not know
targets: the reader of the last line does. That line is printed whatever happened in the scenarios.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from benchmarks.figures import describe_machine
from benchmarks.processes import BenchmarkError
from benchmarks.scale.budget import Budget, usual_minutes
from benchmarks.scale.doors import Doors, open_doors
from benchmarks.scale.effort import Effort
from benchmarks.scale.growth import measure_growth
from benchmarks.scale.large import measure_large
from benchmarks.scale.leaders import kill_leader, measure_leaders, pause_leader
from benchmarks.scale.many import measure_many
from benchmarks.scale.report import Report
from benchmarks.scale.scene import warm_up
from benchmarks.scale.validation import Validation
from benchmarks.scale.waiting import measure_waiting

__all__ = ["main"]

_USUAL_SECONDS: Final = {"few": 70, "many": 470, "waiting": 280, "growth": 200, "kills": 210, "pauses": 170}
"""All scenarios in their order, and what each takes on four quiet cores, about."""

_LARGE: Final = "large"
"""A run of its own: 500 agents leave no time for anything else."""

_USUAL_EFFORT: Final = {"agents": 50, "transfers": 2000, "rate": 10.0, "minutes": usual_minutes()}
_LARGE_EFFORT: Final = {"agents": 500, "transfers": 10_000, "rate": 5.0, "minutes": 60.0}
_AGENTS_A_PROCESS: Final = 40
"""A process offers 50 ports (`benchmarks.scale.ports`)."""

_FEW_SHARE: Final = 5
"""Few agents show what one transfer costs with a fifth of the transfers."""

_KILLS_SHARE: Final = 0.6
"""The fraction of the transfers during which leaders are killed; they are paused during the others."""

_BLOCKED_SECONDS: Final = 60
"""So many seconds after the time limit even a call that blocks everything is interrupted."""

_FEW_AGENTS: Final = 5
_LEADER_AGENTS: Final = 10


class Benchmark:
    """One pass over the chosen scenarios; `report` holds its results so far, `validation` that of `large`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._budget = Budget(arguments.minutes)
        self.report = Report()
        self.validation = Validation()

    async def run(self, doors: Doors) -> bool:
        """Measure all that was asked for; return whether nothing is missing."""
        await warm_up(doors)
        names = self._arguments.scenario or list(_USUAL_SECONDS)
        good = [
            await self._measure(doors, name, self._budget.share([_USUAL_SECONDS[other] for other in names[n + 1 :]]))
            for n, name in enumerate(names)
        ]
        return all(good)

    async def _measure(self, doors: Doors, name: str, seconds: float) -> bool:
        """Measure one scenario in so many seconds; a failure of it is reported and affects no other."""
        _say(f"-- {name}, {seconds:.0f} s at most")
        try:
            async with asyncio.timeout(seconds):
                await getattr(self, f"_{name}")(doors)
        except TimeoutError:
            _say(f"{name}: not done in {seconds:.0f} s")
        except Exception:  # noqa: BLE001 - whatever it is, the other figures count
            _say(f"{name}: {traceback.format_exc()}")
        else:
            return True
        return False

    async def _few(self, doors: Doors) -> None:
        effort = self._effort(_FEW_AGENTS, self._arguments.transfers // _FEW_SHARE)
        self.report.few = await measure_many(doors, "few", effort, log=_say)

    async def _many(self, doors: Doors) -> None:
        effort = self._effort(self._arguments.agents, self._arguments.transfers)
        self.report.many = await measure_many(doors, "many", effort, log=_say, idle=self._arguments.idle)

    async def _waiting(self, doors: Doors) -> None:
        self.report.waiting = await measure_waiting(doors, "waiting", self._arguments.waiting, log=_say)

    async def _growth(self, doors: Doors) -> None:
        effort = Effort(1, self._arguments.transfers // 2, mover_seconds=0.2)
        self.report.growth = await measure_growth(doors, "growth", effort, log=_say)

    async def _kills(self, doors: Doors) -> None:
        disturbs = [kill_leader] * self._arguments.kills
        effort = self._effort(_LEADER_AGENTS, int(self._arguments.transfers * _KILLS_SHARE))
        self.report.kills = await measure_leaders(doors, "kills", effort, disturbs=disturbs, log=_say)

    async def _pauses(self, doors: Doors) -> None:
        disturbs = [pause_leader] * self._arguments.pauses
        transfers = self._arguments.transfers
        effort = self._effort(_LEADER_AGENTS, transfers - int(transfers * _KILLS_SHARE))
        self.report.pauses = await measure_leaders(doors, "pauses", effort, disturbs=disturbs, log=_say)

    async def _large(self, doors: Doors) -> None:
        effort = self._effort(self._arguments.agents, self._arguments.transfers)
        # Twice the slots of all nodes, as docs/scaling.md advises.
        effort = replace(effort, processes=-(-effort.agents // _AGENTS_A_PROCESS), queue_length=4 * effort.agents)
        self.validation.large = await measure_large(doors, _LARGE, effort, log=_say)

    def _effort(self, agents: int, transfers: int) -> Effort:
        """Return the effort of so many agents: with fewer slots movers are faster, so that pending times are equal."""
        return Effort(agents, transfers, mover_seconds=agents * 2 / self._arguments.rate)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_scale", description="Many agents and many transfers.")
    parser.add_argument(
        "--scenario",
        action="append",
        choices=[*_USUAL_SECONDS, _LARGE],
        help="only this one; may be repeated, except for large, which is a run of its own",
    )
    parser.add_argument("--agents", type=int, help="of the scenarios many (default: 50) and large (default: 500)")
    parser.add_argument(
        "--transfers",
        type=int,
        help="of the scenarios many (default: 2000) and large (default: 10000); others have a share of it",
    )
    parser.add_argument("--waiting", type=int, default=10_000, help="pending transfers (default: 10000)")
    parser.add_argument(
        "--rate", type=float, help="transfers a second that movers allow (default: 10; of the scenario large: 5)"
    )
    parser.add_argument("--kills", type=int, default=20, help="times a leader is killed (default: 20)")
    parser.add_argument("--pauses", type=int, default=10, help="times a leader is paused (default: 10)")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"how long it may take; what is not done then is null (default here: {usual_minutes():g}, of large: 60)",
    )
    parser.add_argument("--no-idle", dest="idle", action="store_false", help="leave out the minutes without a transfer")
    parser.add_argument("--folder", type=Path, help="keep logs and what was seen there (default: they are removed)")
    arguments = parser.parse_args()
    arguments.large = _LARGE in (arguments.scenario or ())
    if arguments.large and len(arguments.scenario) > 1:
        parser.error(f"the scenario {_LARGE} is a run of its own")
    for name, value in (_LARGE_EFFORT if arguments.large else _USUAL_EFFORT).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


@contextmanager
def _interrupting(minutes: float) -> Iterator[None]:
    """Interrupt the block soon after `minutes`, even a call that blocks the event loop."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise BenchmarkError(f"interrupted: not done within {minutes:g} minutes")

    before = signal.signal(signal.SIGALRM, stop)
    # And again, where the next scenario blocks as well.
    signal.setitimer(signal.ITIMER_REAL, minutes * 60 + _BLOCKED_SECONDS, _BLOCKED_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measure(benchmark: Benchmark, minutes: float, folder: Path) -> bool:
    """Measure in `folder`; return whether nothing is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _interrupting(minutes), open_doors(folder) as doors:
            return asyncio.run(benchmark.run(doors))
    except Exception:  # noqa: BLE001 - servers that do not start or end: what was measured counts
        _say(traceback.format_exc())
        return False


def main() -> int:
    """Measure, and print the table and the summary; return 1 if anything of it is missing."""
    arguments = _parse()
    began = time.monotonic()
    benchmark = Benchmark(arguments)
    if arguments.folder:
        good = _measure(benchmark, arguments.minutes, arguments.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="bench-scale-", ignore_cleanup_errors=True) as folder:
            good = _measure(benchmark, arguments.minutes, Path(folder))
    report = benchmark.validation if arguments.large else benchmark.report
    table = [f"{describe_machine()}; {time.monotonic() - began:.0f} s in all", "", *report.lines()]
    for line in (*table, "", *report.details(), ""):
        _print(line)
    _print(report.last_line())
    return 0 if good else 1


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
