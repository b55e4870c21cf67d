"""Two agents on one node, as during a rolling update with maxSurge."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from core.models.base import JsonDict
from core.models.phases import RetryRules
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS

pytestmark = pytest.mark.looptime

RUNNING = {"InProgress", "Canceling"}


def running(world: World, kind: str) -> int:
    return sum(world.phase(kind, name) in RUNNING for name in ("first", "second"))


@pytest.mark.parametrize("interrupted", [0, 1], ids=["", "retried"])
@pytest.mark.parametrize("end", ["Completed", "Failed", "Canceled"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_two_agents_of_one_node_run_a_transfer_once(kind: str, end: str, interrupted: int) -> None:
    broken = {"exit_code": 11, "message": "no space left"} if end == "Failed" else {}
    mover = Mover(seconds=3, interrupted=interrupted, **broken)  # type: ignore[arg-type] # values of two types
    retries = RetryRules(initial_backoff=timedelta(seconds=1), deadline=None)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(open_world(accepted(TRANSFERS[kind]()), mover=mover))
        world.cluster.grants = True
        for _ in range(2):
            await stack.enter_async_context(world.agent(retries=retries))
        before = world.everything()
        if end == "Canceled":
            await world.until(
                lambda: world.reasons().count("Retried") == interrupted and world.phase(kind) == "InProgress"
            )
            mover.seconds = 1000
            await world.stop(world.transfer(kind), "cancel")
        await world.until(lambda: world.done(kind))
        await asyncio.sleep(20)
        assert world.phase(kind) == end
        created = [name for name in world.everything() if name not in before]
        assert created == (["PersistentVolume /pvc-*"] if (kind, end) == ("DataDownload", "Completed") else [])
        assert len([reason for reason in world.reasons() if reason == end]) == 1
        assert world.reasons().count("Interrupted") == interrupted


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_two_agents_of_one_node_share_its_slots(kind: str) -> None:
    transfers: list[JsonDict] = [accepted(TRANSFERS[kind](name)) for name in ("first", "second")]
    for transfer in transfers:
        ref = transfer["spec"].get("pod") or transfer["spec"].get("targetVolume") or transfer["spec"]["csiSnapshot"]
        key = "volumeSnapshot" if "volumeSnapshot" in ref else "pvc" if "pvc" in ref else "name"
        ref[key] = f"{ref[key]}-{transfer['metadata']['name']}"
    most = 0
    async with open_world(*transfers) as world, world.agent(slots=1), world.agent(slots=1):
        async with asyncio.timeout(300):
            while not (world.done(kind, "first") and world.done(kind, "second")):
                most = max(most, running(world, kind))
                await asyncio.sleep(0.01)
        assert [world.phase(kind, name) for name in ("first", "second")] == ["Completed", "Completed"]
    assert most == 1
