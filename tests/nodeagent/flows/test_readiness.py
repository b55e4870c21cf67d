"""An agent that cannot accept transfers is not ready, and says why; after an outage transfers continue at once.

They do not wait for the end of their back-off; a short outage changes nothing.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import UnreachableError
from core.kube.resources import DATA_UPLOADS, NODES
from core.kube.transport import Request, Response, Retry
from exposer.template import AgentTemplate
from nodeagent.app import Agent, build_agent, serve
from nodeagent.config.parse import parse_config
from nodeagent.metrics import Metrics
from nodeagent.node.wiring import Node, build_node
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentSpec
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.harness import Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.parts import fake_parts
from tests.nodeagent.support.repository_scene import RECORDED
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_upload
from tests.support import fakekube
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.fakeobjects import merge_patch
from tests.support.scripted import ScriptedTransport, answer, rejection
from tests.support.tasks import running
from tests.support.transports import Around

pytestmark = pytest.mark.looptime

_ALWAYS = 100_000
_ALL = ("DataUploads", "DataDownloads", "PodVolumeBackups", "PodVolumeRestores", "mover pods")
_RULES = '{"loadConcurrency": {"perNodeConfig": [{"nodeSelector": {"matchLabels": {"a": "b"}}, "number": 2}]}}'


@dataclass
class _Scene:
    """A running agent, whose connections break when an outage begins."""

    kube: FakeKube
    node: Node

    def begin(self, path: str, what: Any) -> None:
        for method in ("GET", "WATCH"):
            self.kube.fail_next(method, path, what, times=_ALWAYS)
        self.kube.watches.cut()

    async def seconds_until(self, *, ready: bool, limit: int = 1000) -> int:
        """Return after how many seconds the agent is ready, or is not."""
        for second in range(limit):
            if (self.node.not_ready() == []) is ready:
                return second
            await asyncio.sleep(1)
        raise AssertionError(self.node.not_ready())


@asynccontextmanager
async def _running() -> AsyncIterator[_Scene]:
    kube = FakeKube()
    node = build_node(fake_parts(kube))
    async with running(node.run(), lead_seconds=5):
        assert node.not_ready() == []
        yield _Scene(kube, node)


def _delete_definition(scene: _Scene) -> None:
    scene.kube.unserved.add(DATA_UPLOADS)
    scene.kube.watches.cut()


_OUTAGES: dict[str, tuple[Callable[[_Scene], None], int, tuple[str, ...], str]] = {
    "no answer": (lambda scene: scene.begin("/", "lost"), 300, _ALL, "no answer"),
    "errors of the server": (lambda scene: scene.begin("/", 503), 300, _ALL, "503 Injected"),
    "throttled": (lambda scene: scene.begin("/", 429), 300, _ALL, "429 Injected"),
    "credentials rejected": (lambda scene: scene.begin("/", 401), 60, _ALL, "401 Injected"),
    "permission revoked": (lambda scene: scene.begin("/datauploads", 403), 60, ("DataUploads",), "403 Injected"),
    "definition deleted": (_delete_definition, 60, ("DataUploads",), "404"),
    "path unknown to a proxy": (
        lambda scene: scene.begin("/datauploads", Response(404, b"404 page not found")),
        300,
        ("DataUploads",),
        "404",
    ),
}


@pytest.mark.parametrize("name", _OUTAGES)
async def test_an_agent_without_its_watches_is_not_ready_after_a_while_and_ready_soon_after(name: str) -> None:
    begin, seconds, collections, answered = _OUTAGES[name]
    async with _running() as scene:
        begin(scene)
        assert await scene.seconds_until(ready=False) in {seconds, seconds + 1}
        reasons = scene.node.not_ready()
        assert [reason.split(":")[0] for reason in reasons] == list(collections)
        assert all(reason.endswith(f" s: {answered}") for reason in reasons)
        scene.kube.fulfill()
        scene.kube.unserved.clear()
        assert await scene.seconds_until(ready=True) <= 40


async def test_an_agent_is_not_ready_before_the_first_lists() -> None:
    kube = FakeKube()
    kube.fail_next("GET", "/podvolumebackups", "lost", times=_ALWAYS)
    node = build_node(fake_parts(kube))
    before = node.not_ready()
    async with running(node.run(), lead_seconds=600):
        assert before == [f"not synced: {', '.join(_ALL)}"]
        assert node.not_ready() == ["not synced: PodVolumeBackups"]
        kube.fulfill()
        await asyncio.sleep(40)
        assert node.not_ready() == []


async def test_an_agent_is_not_ready_before_it_knows_its_slots() -> None:
    kube = FakeKube()
    kube.fail_next("GET", f"/{NODES.plural}", "lost", times=_ALWAYS)
    node = build_node(fake_parts(kube, _RULES))
    async with running(node.run(), lead_seconds=5):
        assert node.not_ready() == [f"not synced: labels of the node, {', '.join(_ALL)}"]
        kube.fulfill()
        await asyncio.sleep(40)
        assert node.not_ready() == []


def _unreachable(_: Request) -> Response:
    raise UnreachableError("connection refused")


def _without(path: str, missing: Response, *, allowed: bool = True) -> Callable[[Request], Response]:
    """Return an API server that has all but what is at `path`."""

    def script(request: Request) -> Response:
        if "/selfsubject" in request.path:
            return answer({"status": {"allowed": allowed}}, 201)
        return missing if path in request.path else rejection(404, "not found", "NotFound")

    return script


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_unreachable, "cannot check the cluster: connection refused"),
        (_without("none", rejection(404, ""), allowed=False), "permissions missing: get,list,watch,patch datauploads"),
        (_without("/datauploads/", Response(404, b"404 page not found\n")), "cannot check the cluster: .*404"),
        (_without("/configmaps/", answer({"metadata": {}})), "ConfigMap velero/own"),
        (_without("/configmaps/", rejection(404, "", "NotFound")), "ConfigMap velero/own"),
    ],
    ids=["no API server", "no permission", "no definition", "invalid configuration", "no configuration"],
)
async def test_an_agent_that_cannot_start_serves_no_page_and_ends_with_the_reason(
    script: Callable[[Request], Response], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's probe finds no listener; the DaemonSet has the log's last lines in the pod's status."""

    async def load(*_: object) -> tuple[ScriptedTransport, str]:
        return ScriptedTransport(script), "velero"

    def listen(*_: object, **__: object) -> Awaitable[None]:
        raise AssertionError("listens")

    monkeypatch.setattr("nodeagent.app.load_transport", load)
    monkeypatch.setattr("nodeagent.app.SystemClock", LoopClock)
    monkeypatch.setattr("nodeagent.app.WebServer", listen)
    with pytest.raises(ConfigError, match=reason):
        await serve(Settings("node-1", namespace="velero", config_map_name="own"))


@dataclass
class Line(Around):
    """The way to an API server that does not answer while it is `down`, or never about what is in `broken`.

    For an answer about what is in `silent`, a client waits in vain.
    """

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

    def _check(self, request: Request) -> None:
        if self.down or self.broken in request.path:
            self.failed_at.append(asyncio.get_running_loop().time())
            raise UnreachableError("connection refused")


@asynccontextmanager
async def _agent_on(world: World, line: Line) -> AsyncIterator[Agent]:
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
        async with _agent_on(world, line) as agent:
            await asyncio.sleep(30)
            line.down = True
            await asyncio.sleep(700)
            await world.until(lambda: _seconds_until_retry(agent) > 120, seconds=3600)
            line.down = False
            await asyncio.sleep(30)
            world.cluster.snapshots_become_ready = True
            await world.until(lambda: world.phase() == "Completed", seconds=60)


async def test_an_outage_is_no_time_of_the_preparation() -> None:
    """It is longer than the prepare timeout, which counts all else."""
    async with open_world(accepted(data_upload()), mover=Mover(starts=False)) as world:
        line, world.cluster.tick_seconds = Line(world.kube), 30.0
        async with _agent_on(world, line):
            for seconds in (600, 2400):
                await asyncio.sleep(seconds)
                line.down = not line.down
            await asyncio.sleep(600)
            assert world.phase() == "Accepted"
            await world.until(lambda: world.phase() == "Failed", seconds=900, every=5)


async def test_events_that_are_not_answered_delay_no_transfer() -> None:
    async with open_world(accepted(data_upload())) as world, _agent_on(world, Line(world.kube, silent="/events")):
        await world.until(lambda: world.phase() == "Completed", seconds=90)


@pytest.mark.parametrize("phase", ["Prepared", "InProgress", "Completed"])
async def test_a_phase_whose_answer_was_lost_is_recorded_and_counted_once(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with definitions that drop a field."""
    metrics = Metrics(NODE)
    text = f'"phase":"{phase}"'.encode()
    monkeypatch.setattr(fakekube, "prune", lambda obj: merge_patch(obj, {"status": {"sourceSize": None}}))

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
        async with _agent_on(world, line):
            await asyncio.sleep(1500)
        assert len(line.failed_at) > 10
        assert max(later - earlier for earlier, later in pairwise(line.failed_at)) < 90
