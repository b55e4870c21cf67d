"""A dispatcher that is paused for twice the lease duration, at each of its requests, harms nothing."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Request, Response, Retry, Transport
from nodeagent.leader.election import LeaderElection
from tests.nodeagent.support.dispatching import RESOURCES, Scene, ScriptedKind, most_held, open_scene
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

LEASE_SECONDS = 3.0
FOLLOWING = {"Accepted": "Prepared", "Prepared": "InProgress", "InProgress": "Completed"}


@dataclass
class Pause(Transport):
    """The way to the server of a process that is paused before its request number `at`.

    Nothing reaches it or leaves it until `over` is set; then everything continues.
    """

    inner: Transport
    at: int
    asked: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def request(self, request: Request) -> Response:
        self.asked += 1
        if self.asked >= self.at:
            self.stopped.set()
        await self._wait()
        response = await self.inner.request(request)
        await self._wait()
        return response

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        await self._wait()
        async with self.inner.stream(request) as lines:
            yield self._lines(lines)

    async def close(self) -> None:
        pass

    async def _lines(self, lines: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for line in lines:
            await self._wait()
            yield line

    async def _wait(self) -> None:
        if self.stopped.is_set():
            await self.over.wait()


@asynccontextmanager
async def agent(scene: Scene, transport: Transport, identity: str) -> AsyncIterator[LeaderElection]:
    """Run what of an agent leads: an election, and the dispatcher while it is the leader."""
    clock = LoopClock()
    election = LeaderElection(
        KubeClient(transport, Retry(clock)),
        clock,
        namespace="velero",
        identity=identity,
        duration=timedelta(seconds=LEASE_SECONDS),
    )
    task = asyncio.create_task(election.run(scene.dispatcher(transport, election.check).run), name=identity)
    try:
        yield election
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def carry(scene: Scene) -> None:
    """Bring accepted transfers on, as their agents would."""
    while True:
        for name, phase in scene.phases().items():
            if phase in FOLLOWING:
                scene.set_status(name, phase=FOLLOWING[phase])
        await asyncio.sleep(0.7)


def admissions(scene: Scene) -> Counter[str]:
    """Return how often each transfer became Accepted, over all history."""
    found: Counter[str] = Counter()
    for happening in scene.kube._store.history:
        if happening.resource in RESOURCES.values() and happening.after is not None:
            before = (happening.before or {}).get("status", {}).get("phase", "")
            if happening.after["status"].get("phase") == "Accepted" and before != "Accepted":
                found[happening.after["metadata"]["name"]] += 1
    return found


async def run_with_pause(at: int, *, comes_back: bool) -> Scene:
    """Return a scene whose first leader was paused at its request number `at`, once all transfers are done."""
    scene = open_scene("node-a", "node-b", limit=2)
    scene.others += [ScriptedKind(model) for model in RESOURCES if model is not scene.kind.model]
    for number in range(8):
        scene.add_kind(list(RESOURCES)[number % 4], f"transfer-{number}", queue=f"ns-{number % 3}")
    pause = Pause(scene.kube, at)
    carrying = asyncio.create_task(carry(scene))
    async with agent(scene, pause, "a") as paused:
        async with asyncio.timeout(60):
            await pause.stopped.wait()
        async with agent(scene, scene.kube, "b") as other:
            await asyncio.sleep(2 * LEASE_SECONDS)
            if comes_back:
                pause.over.set()
            await scene.until(lambda: set(scene.phases().values()) == {"Completed"}, seconds=100)
            assert not (paused.may_write and other.may_write)
        pause.over.set()
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    return scene


@pytest.mark.parametrize("first", range(5, 45, 8))
async def test_a_leader_paused_at_any_request_admits_nothing_twice_and_never_too_many(first: int) -> None:
    for at in range(first, first + 8):
        scene = await run_with_pause(at, comes_back=True)
        assert most_held(scene.kube) <= 2, at
        assert admissions(scene) == {f"transfer-{number}": 1 for number in range(8)}, at


@pytest.mark.parametrize("at", range(5, 45, 5))
async def test_a_leader_killed_at_any_request_loses_nothing(at: int) -> None:
    scene = await run_with_pause(at, comes_back=False)
    assert most_held(scene.kube) <= 2
    assert admissions(scene) == {f"transfer-{number}": 1 for number in range(8)}
