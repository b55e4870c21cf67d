"""2,000 malformed objects and answers, in `make test` 500 of them; `make fuzz` runs 100,000. None is kept."""

import asyncio
import gc
import logging
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.cases import Case, Round
from tests.fuzz.run import fuzz, new_loop
from tests.fuzz.values import Raw
from tests.fuzz.world import World, open_world

_EXAMPLES = 250
_ROOT = Path(__file__).parents[2]
_MOST_BYTES = 64 * 1024
_ROUND = Round(
    (
        Case(("Pod", "velero", "moving"), ("status",), Raw(b'{"a":' * 3000 + b"1" + b"}" * 3000)),
        Case(("Event", "velero", "moving.1"), ("message",), Raw(b'"' + b"x" * 100_000 + b'"')),
        Case(("DataUpload", "velero", "upload"), ("spec", "operationTimeout"), "100000000000h"),
        Case(("DataUpload", "velero", "moving"), ("spec", "cancel"), "?"),
        Case(("PersistentVolumeClaim", "app3", "data"), ("spec",), 7),
    ),
    relist=True,
    plural="datadownloads",
    body=b"<html>",
)


@pytest.mark.timeout(1800)
@pytest.mark.sample("0", "6")  # the two that reach most
@pytest.mark.parametrize("seeded", range(8))
def test_no_object_stops_an_agent(seeded: int) -> None:
    assert fuzz(_EXAMPLES, seeded=seeded).examples >= _EXAMPLES


async def _allocated_after(world: World, rounds: int) -> int:
    """Return the bytes that the product's modules have allocated."""
    for _ in range(rounds):
        await world.endure(_ROUND)
        world.kube.requests.clear()
    gc.collect()
    packages = ("core", "exposer", "nodeagent", "client", "datamover")
    filters = [tracemalloc.Filter(True, f"{_ROOT}/{package}/*") for package in packages]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename"))


async def _grown_bytes() -> int:
    async with open_world() as world:
        for _ in range(4):
            await world.endure(_ROUND)
        tracemalloc.start()
        try:
            before = await _allocated_after(world, 4)
            return await _allocated_after(world, 8) - before
        finally:
            tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_malformed_objects_that_keep_coming_cost_no_memory() -> None:
    logging.disable(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(_grown_bytes()) < _MOST_BYTES
    finally:
        logging.disable(logging.NOTSET)
