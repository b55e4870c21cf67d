"""Rounds of cases in new worlds, by hypothesis."""

import asyncio
from dataclasses import dataclass

import looptime
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.cases import CASES_PER_ROUND, Round, rounds
from tests.fuzz.world import open_world

_ROUNDS_PER_WORLD = 4


@dataclass
class Count:
    """What was run so far."""

    worlds: int = 0
    examples: int = 0


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop in virtual time. Nothing outside of it can wake it, so it does not poll before time moves."""
    return looptime.new_event_loop(noop_cycles=0)


def fuzz(examples: int, *, seeded: int) -> Count:
    """Run at least that many examples, and return their number; the same ones for the same seed.

    Raises:
        AssertionError: an example ended the agent, or raised an unexpected exception.
    """
    count = Count()

    @seed(seeded)
    @settings(
        max_examples=-(-examples // (_ROUNDS_PER_WORLD * CASES_PER_ROUND)),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(rounds(_ROUNDS_PER_WORLD))
    def run_world(drawn: list[Round]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_run(drawn))
        count.worlds += 1
        count.examples += sum(one.examples for one in drawn)

    run_world()
    return count


async def _run(drawn: list[Round]) -> None:
    async with open_world() as world:
        for one in drawn:
            await world.endure(one)
        await world.check_canaries()
