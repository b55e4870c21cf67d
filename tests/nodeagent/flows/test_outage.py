"""After an outage of the API server, transfers continue at once, not when their back-off ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from core.kube.client import KubeClient
from core.kube.errors import UnreachableError
from core.kube.transport import Request, Response, Retry, Transport
from exposer.template import AgentTemplate
from nodeagent.app import Agent, build_agent
from nodeagent.config.parse import parse_config
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentSpec
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.harness import Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.repository_scene import RECORDED
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support.clock import LoopClock
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


@dataclass
class Line(Transport):
    """The way to an API server that does not answer while it is `down`, or never about what is in `broken`.

    For an answer about what is in `silent`, a client waits in vain.
    """

    inner: Transport
    down: bool = False
    broken: str = " "
    silent: str = " "
    failed_at: list[float] = field(default_factory=list)

    async def request(self, request: Request) -> Response:
        self._check(request)
        if self.silent in request.path:
            await asyncio.sleep(request.timeout_seconds)
            raise UnreachableError(f"{request.method} {request.path}: timed out")
        return await self.inner.request(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        self._check(request)
        return self.inner.stream(request)

    async def close(self) -> None:
        pass

    def _check(self, request: Request) -> None:
        if self.down or self.broken in request.path:
            self.failed_at.append(asyncio.get_running_loop().time())
            raise UnreachableError("connection refused")


@asynccontextmanager
async def _running(world: World, line: Line) -> AsyncIterator[Agent]:
    world.kube.put(cluster_node(NODE))
    world.kube.put(agent_pod(NODE))
    settings = Settings(NODE, namespace=NAMESPACE)
    spec = AgentSpec(settings, NAMESPACE, parse_config("{}"), AgentTemplate("mover:1"))
    agent = build_agent(KubeClient(line, Retry(LoopClock())), LoopClock(), spec)
    async with running(agent.run()):
        yield agent


def _seconds_until_retry(agent: Agent) -> float:
    """Return when the first of the keys that back off is due."""
    queue = agent.node.reconciler._queue
    due = [queue._due[key] for key in queue._failures if key in queue._due]
    return min(due, default=0.0) - asyncio.get_running_loop().time()


async def test_a_transfer_continues_within_a_minute_after_a_long_outage() -> None:
    """Its operation times out after ten minutes, but the agent has not observed all of them."""
    async with open_world(accepted(data_upload())) as world:
        world.cluster.snapshots_become_ready = False
        line = Line(world.kube)
        async with _running(world, line) as agent:
            await asyncio.sleep(30)
            line.down = True
            await asyncio.sleep(700)
            await world.until(lambda: _seconds_until_retry(agent) > 120, seconds=3600)
            line.down = False
            await asyncio.sleep(30)
            world.cluster.snapshots_become_ready = True
            await world.until(lambda: world.phase() == "Completed", seconds=60)


async def test_events_that_are_not_answered_delay_no_transfer() -> None:
    async with open_world(accepted(data_upload())) as world, _running(world, Line(world.kube, silent="/events")):
        await world.until(lambda: world.phase() == "Completed", seconds=90)


@pytest.mark.parametrize("phase", ["Prepared", "InProgress", "Completed"])
async def test_a_phase_whose_answer_was_lost_is_recorded_and_counted_once(phase: str) -> None:
    metrics = Metrics(NODE)
    text = f'"phase":"{phase}"'.encode()

    def moves(request: Request) -> bool:
        return request.method == "PATCH" and text in (request.body or b"").replace(b" ", b"")

    async with open_world(accepted(data_upload())) as world:
        fuse = Fuse(world.kube, counts=moves, at=0, fault=Fault.LOST_APPLIED)
        async with world.agent(fuse, metrics=metrics):
            await world.until(world.done)
            await asyncio.sleep(30)
        assert fuse.blown.is_set()
        assert world.phase() == "Completed"
        assert [world.reasons().count(reason) for reason in ("Prepared", "Started", "Completed")] == [1, 1, 1]
    shown = metrics.render().decode()
    counted = ("nodeagent_expose_seconds_count{kind", "nodeagent_wait_seconds_count{kind")
    assert [shown.count(f'{name}="DataUpload",node="node-a"}} 1.0') for name in counted] == [1, 1]
    assert 'podVolume_data_upload_success_total{node="node-a"} 1.0' in shown


async def test_the_leader_retries_a_repository_soon_while_other_requests_succeed() -> None:
    async with open_world() as world:
        world.kube.put(json.loads(RECORDED.read_text())[0]["object"])
        line = Line(world.kube, broken="/backuprepositories/")
        async with _running(world, line):
            await asyncio.sleep(1500)
        assert len(line.failed_at) > 10
        assert max(later - earlier for earlier, later in pairwise(line.failed_at)) < 90
