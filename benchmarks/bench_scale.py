"""`python -m benchmarks.bench_scale`: many agents and many loads before a real API server.

Knows which scenarios there are and in which order. Does not know targets: who reads the last
line does.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.figures import describe_machine
from benchmarks.pages import check_page, record
from benchmarks.processes import BenchmarkError
from benchmarks.scale.doors import Doors, open_doors
from benchmarks.scale.effort import Effort
from benchmarks.scale.growth import measure_growth
from benchmarks.scale.leaders import kill_leader, measure_leaders, pause_leader
from benchmarks.scale.many import measure_many
from benchmarks.scale.report import Report
from benchmarks.scale.scene import warm_up
from benchmarks.scale.waiting import measure_waiting

__all__ = ["main"]

_SCENARIOS: Final = ("few", "many", "waiting", "growth", "kills", "pauses")
_FIGURES: Final = "figures of scale"
_FEW_AGENTS: Final = 5
_LEADER_AGENTS: Final = 10


class Benchmark:
    """One pass over the chosen scenarios."""

    def __init__(self, doors: Doors, arguments: argparse.Namespace) -> None:
        self._doors = doors
        self._arguments = arguments
        self._report = Report()

    async def run(self) -> Report:
        """Measure all that was asked for and return what came of it."""
        await warm_up(self._doors)
        for scenario in self._arguments.scenario or _SCENARIOS:
            _say(f"-- {scenario}")
            await getattr(self, f"_{scenario}")()
        return self._report

    async def _few(self) -> None:
        self._report.few = await measure_many(self._doors, "few", self._effort(_FEW_AGENTS), log=_say)

    async def _many(self) -> None:
        effort = self._effort(self._arguments.agents)
        self._report.many = await measure_many(self._doors, "many", effort, log=_say, idle=self._arguments.idle)

    async def _waiting(self) -> None:
        self._report.waiting = await measure_waiting(self._doors, "waiting", self._arguments.waiting, log=_say)

    async def _growth(self) -> None:
        effort = Effort(1, self._arguments.loads // 2, mover_seconds=0.2)
        self._report.growth = await measure_growth(self._doors, "growth", effort, log=_say)

    async def _kills(self) -> None:
        disturbs = [kill_leader] * self._arguments.kills
        effort = self._effort(_LEADER_AGENTS)
        self._report.kills = await measure_leaders(self._doors, "kills", effort, disturbs=disturbs, log=_say)

    async def _pauses(self) -> None:
        disturbs = [pause_leader] * self._arguments.pauses
        effort = self._effort(_LEADER_AGENTS)
        self._report.pauses = await measure_leaders(self._doors, "pauses", effort, disturbs=disturbs, log=_say)

    def _effort(self, agents: int) -> Effort:
        """Return the effort of all agents: with fewer slots movers are faster, so that loads wait as long."""
        rate = self._arguments.rate
        return Effort(agents, self._arguments.loads, mover_seconds=agents * 2 / rate)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_scale", description="Many agents and many loads.")
    parser.add_argument("--scenario", action="append", choices=_SCENARIOS, help="only this one; may be repeated")
    parser.add_argument("--agents", type=int, default=50, help="of the scenario many (default: 50)")
    parser.add_argument("--loads", type=int, default=2000, help="of each scenario but waiting (default: 2000)")
    parser.add_argument("--waiting", type=int, default=10_000, help="loads that wait (default: 10000)")
    parser.add_argument("--rate", type=float, default=10.0, help="loads a second that movers allow (default: 10)")
    parser.add_argument("--kills", type=int, default=20, help="times a leader is killed (default: 20)")
    parser.add_argument("--pauses", type=int, default=10, help="times a leader is paused (default: 10)")
    parser.add_argument("--no-idle", dest="idle", action="store_false", help="leave out the minutes without a load")
    parser.add_argument(
        "--record", type=Path, metavar="PAGE", help="write the figures into this page, such as docs/benchmarks.md"
    )
    parser.add_argument("--folder", type=Path, help="keep logs and what was seen there (default: they are removed)")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    with open_doors(folder) as doors:
        return asyncio.run(Benchmark(doors, arguments).run())


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    arguments = _parse()
    began = time.monotonic()
    try:
        if arguments.record:
            check_page(arguments.record, _FIGURES)
        if arguments.folder:
            report = _measure(arguments, arguments.folder)
        else:
            with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
                report = _measure(arguments, Path(folder))
    except BenchmarkError as e:
        _say(str(e))
        return 1
    table = [f"{describe_machine()}; {time.monotonic() - began:.0f} s in all", "", *report.lines()]
    for line in (*table, "", *report.details(), ""):
        _print(line)
    if arguments.record:
        record(arguments.record, _FIGURES, [*table, "", "```json", report.last_line(), "```"])
    _print(report.last_line())
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
