"""Malformed objects that keep coming leave nothing in the agent's memory."""

import asyncio
import gc
import logging
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz.cases import Case, Round
from tests.fuzz.run import new_loop
from tests.fuzz.values import Raw
from tests.fuzz.world import World, open_world

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


def allocated() -> int:
    """Return the bytes that the product's modules have allocated."""
    gc.collect()
    filters = [
        tracemalloc.Filter(True, f"{_ROOT}/{package}/*")
        for package in ("core", "exposer", "nodeagent", "client", "datamover")
    ]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(filters).statistics("filename"))


async def _run(world: World, rounds: int) -> None:
    for _ in range(rounds):
        await world.endure(_ROUND)
        world.kube.requests.clear()


async def _measure() -> int:
    async with open_world() as world:
        await _run(world, 4)
        tracemalloc.start()
        try:
            await _run(world, 4)
            before = allocated()
            await _run(world, 8)
            return allocated() - before
        finally:
            tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_malformed_objects_that_keep_coming_cost_no_memory() -> None:
    logging.disable(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(_measure()) < _MOST_BYTES
    finally:
        logging.disable(logging.NOTSET)
