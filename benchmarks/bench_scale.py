"""`python -m benchmarks.bench_scale`: many agents and many transfers before a real API server.

The last line, of figures, is printed whatever happened in the scenarios.
"""

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from benchmarks.figures import print_report, say
from benchmarks.scale.doors import Doors, open_doors
from benchmarks.scale.effort import QUEUE_LENGTH, Effort, Result
from benchmarks.scale.leaders import kill_leader, measure_leaders, pause_leader
from benchmarks.scale.many import measure_growth, measure_many
from benchmarks.scale.report import Report
from benchmarks.scale.scene import warm_up
from benchmarks.scale.waiting import measure_waiting

_SCENARIOS: Final = ("few", "many", "waiting", "growth", "kills", "pauses")
"""All scenarios in their order."""

_AGENTS_A_PROCESS: Final = 40
_LEAST_PROCESSES: Final = 4

_FEW_SHARE: Final = 5
"""Few agents show what one transfer costs with a fifth of the transfers."""

_KILLS_SHARE: Final = 0.6
"""The fraction of the transfers during which leaders are killed; they are paused during the others."""

_FEW_AGENTS: Final = 5
_LEADER_AGENTS: Final = 10


class Benchmark:
    """One pass over the chosen scenarios; `report` holds its results so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.report = Report()

    async def run(self, doors: Doors) -> bool:
        """Measure all that is wanted; return whether nothing is missing."""
        until = asyncio.get_running_loop().time() + self._arguments.minutes * 60
        await warm_up(doors)
        return all([await self._measure(doors, name, until) for name in self._arguments.scenario or _SCENARIOS])

    async def _measure(self, doors: Doors, name: str, until: float) -> bool:
        """Measure one scenario until then, by the loop's time; a failure of it is reported and affects no other."""
        say(f"-- {name}")
        try:
            async with asyncio.timeout_at(until):
                self.report.results[name] = await getattr(self, f"_{name}")(doors)
        except Exception:  # noqa: BLE001 - whatever it is, the other figures count
            say(f"{name}: {traceback.format_exc()}")
            return False
        return True

    async def _few(self, doors: Doors) -> Result:
        effort = self._effort(_FEW_AGENTS, self._arguments.transfers // _FEW_SHARE)
        return await measure_many(doors, "few", effort, log=say)

    async def _many(self, doors: Doors) -> Result:
        effort = self._effort(self._arguments.agents, self._arguments.transfers)
        return await measure_many(doors, "many", effort, log=say, idle=True)

    async def _waiting(self, doors: Doors) -> Result:
        return await measure_waiting(doors, "waiting", self._arguments.waiting, log=say)

    async def _growth(self, doors: Doors) -> Result:
        effort = Effort(1, self._arguments.transfers // 2, mover_seconds=0.2)
        return await measure_growth(doors, "growth", effort, log=say)

    async def _kills(self, doors: Doors) -> Result:
        disturbs = [kill_leader] * self._arguments.kills
        effort = self._effort(_LEADER_AGENTS, int(self._arguments.transfers * _KILLS_SHARE))
        return await measure_leaders(doors, "kills", effort, disturbs=disturbs, log=say)

    async def _pauses(self, doors: Doors) -> Result:
        disturbs = [pause_leader] * self._arguments.pauses
        transfers = self._arguments.transfers
        effort = self._effort(_LEADER_AGENTS, transfers - int(transfers * _KILLS_SHARE))
        return await measure_leaders(doors, "pauses", effort, disturbs=disturbs, log=say)

    def _effort(self, agents: int, transfers: int) -> Effort:
        """Return the effort of so many agents: with fewer slots movers are faster, so that pending times are equal."""
        return Effort(
            agents,
            transfers,
            mover_seconds=agents * 2 / self._arguments.rate,
            processes=max(_LEAST_PROCESSES, -(-agents // _AGENTS_A_PROCESS)),
            queue_length=self._arguments.queue_length,
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_scale", description="Many agents and many transfers.")
    scenario = "only this one; may be repeated (default: all)"
    parser.add_argument("--scenario", action="append", choices=_SCENARIOS, help=scenario)
    parser.add_argument("--agents", type=int, default=50, help="of the scenario many (default: 50)")
    parser.add_argument(
        "--transfers", type=int, default=2000, help="of the scenario many; others have a share of it (default: 2000)"
    )
    parser.add_argument("--waiting", type=int, default=10_000, help="pending transfers (default: 10000)")
    parser.add_argument("--rate", type=float, default=10.0, help="transfers a second that movers allow (default: 10)")
    parser.add_argument("--queue-length", type=int, default=QUEUE_LENGTH, help="admission quota (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="times a leader is killed (default: 20)")
    parser.add_argument("--pauses", type=int, default=10, help="times a leader is paused (default: 10)")
    limit = "how long it may take; what is not done then is null (default: 60)"
    parser.add_argument("--minutes", type=float, default=60.0, help=limit)
    parser.add_argument("--folder", type=Path, help="keep logs and what was seen there (default: they are removed)")
    return parser.parse_args()


def _measure(benchmark: Benchmark, folder: Path) -> bool:
    """Measure in `folder`; return whether nothing is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with open_doors(folder) as doors:
            return asyncio.run(benchmark.run(doors))
    except Exception:  # noqa: BLE001 - servers that do not start or end: what was measured counts
        say(traceback.format_exc())
        return False


def main() -> int:
    """Measure, and print the table and the summary; return 1 if anything of it is missing."""
    arguments = _parse()
    began = time.monotonic()
    benchmark = Benchmark(arguments)
    if arguments.folder:
        good = _measure(benchmark, arguments.folder)
    else:
        with tempfile.TemporaryDirectory(prefix="bench-scale-", ignore_cleanup_errors=True) as folder:
            good = _measure(benchmark, Path(folder))
    report = benchmark.report
    print_report(f"{time.monotonic() - began:.0f} s in all", report.lines(), report.summary())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
