"""An agent that cannot accept transfers is not ready, and says why; a short outage changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from core.clock import Clock
from core.errors import ConfigError
from core.kube.errors import UnreachableError
from core.kube.resources import DATA_UPLOADS, NODES
from core.kube.transport import Request, Response
from nodeagent.app import serve
from nodeagent.node.wiring import Node, build_node
from nodeagent.runtime.settings import Settings
from tests.nodeagent.support.parts import fake_parts
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.scripted import ScriptedTransport, answer, rejection
from tests.support.tasks import running

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


@pytest.mark.parametrize(("what", "seconds"), [("lost", 240), (503, 240), (401, 20), (403, 20), (404, 20)], ids=str)
async def test_short_outages_leave_an_agent_ready(what: Any, seconds: int) -> None:
    """As when the only API server restarts: it does not answer, and then rejects requests for some seconds."""
    async with _running() as scene:
        for _ in range(3):
            scene.begin("/", what)
            with pytest.raises(AssertionError):
                await scene.seconds_until(ready=False, limit=seconds)
            scene.kube.fulfill()
            with pytest.raises(AssertionError):
                await scene.seconds_until(ready=False, limit=60)


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

    def clock(_: object) -> Clock:
        return LoopClock()

    def listen(*_: object, **__: object) -> Awaitable[None]:
        raise AssertionError("listens")

    monkeypatch.setattr("nodeagent.app.load_transport", load)
    monkeypatch.setattr("nodeagent.app.build_clock", clock)
    monkeypatch.setattr("nodeagent.app.WebServer", listen)
    with pytest.raises(ConfigError, match=reason):
        await serve(Settings("node-1", namespace="velero", config_map_name="own"))
