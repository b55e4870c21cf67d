"""Data movers get the configured priority class while the cluster has it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import pytest

from core.kube.resources import PRIORITY_CLASSES
from nodeagent.config.current import PriorityClass
from nodeagent.config.parse import ParsedConfig, parse_config
from tests.nodeagent.support.own_scene import OwnScene
from tests.support.clock import LoopClock
from tests.support.tasks import running

_LIMIT_SECONDS = 5.0


@dataclass
class Scene(OwnScene):
    def __post_init__(self) -> None:
        self.priority = PriorityClass(self.client, LoopClock(), current=self.current, report=self.report)

    async def create(self, name: str) -> None:
        manifest = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        await self.client.create(PRIORITY_CLASSES, manifest | {"value": 10})

    async def configure(self, name: str) -> None:
        self.current.update(_named(name))
        await asyncio.sleep(_LIMIT_SECONDS)

    @property
    def usable(self) -> bool:
        return 'nodeagent_priority_class_usable{node="node-1"} 1.0' in self.metrics.render().decode()


def _named(name: str) -> ParsedConfig:
    return parse_config('{"priorityClassName": "%s"}' % name)  # noqa: UP031 - JSON is full of braces


@asynccontextmanager
async def _running(scene: Scene) -> AsyncIterator[None]:
    await scene.priority.refresh()
    async with running(scene.priority.run(), lead_seconds=_LIMIT_SECONDS):
        yield


def _scene(name: str = "low") -> Scene:
    return Scene.build(_named(name))


@pytest.mark.looptime
async def test_an_existing_class_is_used_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = _scene()
    await scene.create("low")
    async with _running(scene):
        assert scene.priority.name == "low"
        assert scene.usable
    assert [record.message for record in caplog.records if "low" in record.message] == [
        "PriorityClass low exists: data movers get it (value 10)"
    ]
    assert scene.board.reasons == []


@pytest.mark.looptime
async def test_without_a_class_nothing_is_read() -> None:
    scene = _scene("")
    async with _running(scene):
        assert scene.priority.name is None
        assert scene.usable
    assert scene.kube.requests == []


@pytest.mark.looptime
async def test_a_missing_class_is_reported_and_used_once_it_appears() -> None:
    scene = _scene()
    async with _running(scene):
        assert scene.priority.name is None
        assert scene.board.reasons == ["PriorityClassMissing"]
        assert not scene.usable
        await scene.create("low")
        await asyncio.sleep(_LIMIT_SECONDS)
        assert scene.priority.name == "low"
        assert scene.board.reasons == ["PriorityClassMissing", "PriorityClassFound"]
        assert scene.usable


@pytest.mark.looptime
async def test_a_deleted_class_is_dropped_and_reported() -> None:
    scene = _scene()
    await scene.create("low")
    async with _running(scene):
        await scene.client.delete(PRIORITY_CLASSES, "", "low")
        await asyncio.sleep(_LIMIT_SECONDS)
        assert scene.priority.name is None
        assert scene.board.reasons == ["PriorityClassMissing"]


@pytest.mark.looptime
async def test_another_configured_class_is_used_immediately() -> None:
    scene = _scene()
    await scene.create("low")
    await scene.create("system-node-critical")
    async with _running(scene):
        await scene.configure("system-node-critical")
        assert scene.priority.name == "system-node-critical"
        await scene.configure("")
        assert scene.priority.name is None
        assert scene.usable
        await scene.configure("low")
        assert scene.priority.name == "low"
        await scene.configure("none-of-these")
        assert scene.priority.name is None
        assert scene.board.reasons == ["PriorityClassMissing"]


@pytest.mark.looptime
@pytest.mark.parametrize("fault", [403, 500, "lost"])
async def test_a_class_that_cannot_be_read_at_start_is_used_once_it_can(
    fault: int | Literal["lost"], caplog: pytest.LogCaptureFixture
) -> None:
    scene = _scene()
    await scene.create("low")
    scene.kube.fail_next("GET", "priorityclasses", fault, times=12)
    await scene.priority.refresh()
    assert scene.priority.name is None
    assert "cannot check PriorityClass low, will retry; data movers get the default priority" in caplog.text
    async with _running(scene):
        await asyncio.sleep(600)
        assert scene.priority.name == "low"
    assert "PriorityClassMissing" not in scene.board.reasons
    assert caplog.text.count("cannot check PriorityClass") == 1


@pytest.mark.looptime
@pytest.mark.parametrize("fault", [403, 500, "lost"])
async def test_the_last_state_is_kept_while_the_api_server_rejects_reads(fault: int | Literal["lost"]) -> None:
    scene = _scene()
    await scene.create("low")
    async with _running(scene):
        scene.kube.fail_next("GET", "priorityclasses", fault, times=10_000)
        scene.kube.watches.cut()
        await asyncio.sleep(600)
        assert scene.priority.name == "low"
    assert scene.board.reasons == []
