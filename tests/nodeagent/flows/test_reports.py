"""Pending transfers and those beside them: what is reported, for how long, and what they do not delay."""

import asyncio

import pytest

from core.models.names import PENDING_REASON_ANNOTATION
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS, data_upload

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_request_that_is_never_answered_delays_its_own_transfer_only(kind: str, method: str) -> None:
    silent, quick = accepted(TRANSFERS[kind]("silent")), accepted(data_upload("quick"))
    async with open_world(silent, quick, mover=Mover(seconds=1)) as world:
        gate = Gate(world.kube, lambda one: one.method == method and "silent" in one.path + (one.body or b"").decode())
        async with world.agent(gate, slots=2):
            await world.until(lambda: gate.waiting > 0, seconds=60)
            await world.until(lambda: world.done(name="quick"), seconds=60)
            await asyncio.sleep(30)
            assert not world.done(kind, name="silent")
    assert world.phase(name="quick") == "Completed"


async def test_the_timeout_of_a_cancel_begins_again_with_a_restart_of_the_agent() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(stubborn=True)) as world:
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            await world.stop(world.transfer(), "cancel")
            await world.until(lambda: world.phase() == "Canceling")
        world.cluster.tick_seconds = 60.0
        async with world.agent():
            await asyncio.sleep(3500)
        assert world.phase() == "Canceling"
        began = asyncio.get_running_loop().time()
        async with world.agent():
            await world.until(world.done, seconds=3800, every=10)
        assert 3590 <= asyncio.get_running_loop().time() - began < 3700
    assert world.phase() == "Canceled"


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_no_pending_reason_is_left_on_a_completed_transfer(kind: str) -> None:
    """It is pending for its mover, for a slot and, where it has one, for its rebind, and each is reported."""
    cr = accepted(TRANSFERS[kind]())
    reported: list[str] = []

    def is_reported() -> bool:
        stored = world.transfer(kind)
        message = stored["status"].get("message", "")
        assert bool(message) == (PENDING_REASON_ANNOTATION in stored["metadata"].get("annotations", {}))
        if message and message not in reported:
            reported.append(message)
        return bool(message)

    async with open_world(cr, mover=Mover(starts=False, seconds=1)) as world:
        world.cluster.binds = False
        async with world.agent(slots=0):
            await world.until(is_reported, seconds=30)
            world.cluster.mover.starts = True
            await world.until(lambda: world.phase(kind) == "Prepared")
            await world.until(lambda: is_reported() and len(reported) > 1, seconds=30)
        async with world.agent():
            await world.until(lambda: world.phase(kind) == "InProgress")
            assert not is_reported()
            if kind == "DataDownload":
                await world.until(is_reported, seconds=60)
            world.cluster.binds = True
            await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Completed"
    assert "message" not in world.transfer(kind)["status"]
    assert not is_reported()
    assert len(reported) == (3 if kind == "DataDownload" else 2)
