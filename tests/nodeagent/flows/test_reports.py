"""Pending transfers and those beside them: what is reported, for how long, and what they do not delay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest

from core.kube.transport import Request, Response, Transport
from core.models.names import PENDING_REASON_ANNOTATION
from tests.nodeagent.support.harness import accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS, data_upload

pytestmark = pytest.mark.looptime


@dataclass
class Silence(Transport):
    """A transport on which requests of one method about `name` are never answered."""

    inner: Transport
    method: str
    name: str
    swallowed: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, request: Request) -> Response:
        if request.method == self.method and self.name in request.path + (request.body or b"").decode():
            self.swallowed.set()
            await asyncio.Event().wait()
        return await self.inner.request(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.inner.stream(request)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_request_that_is_never_answered_delays_its_own_transfer_only(kind: str, method: str) -> None:
    silent, quick = accepted(TRANSFERS[kind]("silent")), accepted(data_upload("quick"))
    async with open_world(silent, quick, mover=Mover(seconds=1)) as world:
        silence = Silence(world.kube, method, "silent")
        async with world.agent(silence, slots=2):
            await asyncio.wait_for(silence.swallowed.wait(), 60)
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
