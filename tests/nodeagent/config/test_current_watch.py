"""An edit of the ConfigMap is active within seconds, or reported as rejected."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kube.resources import CONFIG_MAPS
from nodeagent.config.current import ConfigWatch, CurrentConfig
from nodeagent.config.parse import parse_config
from nodeagent.metrics import Metrics
from nodeagent.runtime.own_pod import AgentReport
from tests.nodeagent.support.board import FakeBoard
from tests.nodeagent.support.own_scene import OwnScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import only
from tests.support.tasks import running

pytestmark = pytest.mark.looptime

NAMESPACE, NAME = "velero", "agent-config"
_LIMIT_SECONDS = 5.0


@dataclass
class Scene(OwnScene):
    async def edit(self, *values: str) -> None:
        """Write the ConfigMap with so many keys, and wait for as long as an agent may take."""
        data = {f"key-{index}": value for index, value in enumerate(values)} or None
        whole = {"data": {f"key-{index}": None for index in range(3)} | (data or {})}
        await self.client.patch(CONFIG_MAPS, NAMESPACE, NAME, whole)
        await asyncio.sleep(_LIMIT_SECONDS)

    @property
    def slots(self) -> int:
        return self.current.config.load_concurrency.global_config

    def shown(self, name: str) -> list[str]:
        return [line for line in self.metrics.render().decode().splitlines() if line.startswith(f"nodeagent_{name}")]


def _text(slots: object) -> str:
    return '{"loadConcurrency": {"globalConfig": %s}}' % slots  # noqa: UP031 - JSON is full of braces


@asynccontextmanager
async def _open_scene(started_with: str = _text(1)) -> AsyncIterator[Scene]:
    scene = Scene.build(parse_config(started_with))
    metadata = {"namespace": NAMESPACE, "name": NAME}
    await scene.client.create(
        CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"key-0": started_with}}
    )
    place = (NAMESPACE, NAME)
    watch = ConfigWatch(scene.client, LoopClock(), place=place, current=scene.current, report=scene.report)
    async with running(watch.run(), lead_seconds=1):
        yield scene


async def test_an_edit_is_active_within_seconds_and_reported() -> None:
    async with _open_scene() as scene:
        before = scene.current.digest
        await scene.edit('{"loadConcurrency": {"globalConfig": 7}, "priorityClass": "low"}')
        assert scene.slots == 7
        ((reason, message),) = scene.board.recorded
        assert reason == "ConfigActivated"
        assert "warnings: priorityClass: unknown key; ignored (did you mean priorityClassName?)" in message
        assert scene.shown("config_valid") == ['nodeagent_config_valid{node="node-1"} 1.0']
        (info,) = scene.shown("config_info")
        assert str(scene.current.digest) in info
        assert str(before) not in info


_INVALID = {
    "two keys": ([_text(2), _text(3)], "exactly one key"),
    "invalid value": ([_text('"x"')], "loadConcurrency.globalConfig: expected a whole number"),
}


@pytest.mark.parametrize(("values", "text"), _INVALID.values(), ids=list(_INVALID))
async def test_an_invalid_edit_is_rejected_and_reported(values: list[str], text: str) -> None:
    async with _open_scene(_text(4)) as scene:
        await scene.edit(*values)
        assert scene.slots == 4
        ((reason, message),) = scene.board.recorded
        assert reason == "ConfigRejected"
        assert text in message
        assert scene.shown("config_valid") == ['nodeagent_config_valid{node="node-1"} 0.0']
        assert str(scene.current.digest) in scene.shown("config_info")[0]
        await scene.edit(_text(5))
        assert scene.slots == 5
        assert scene.current.valid
        assert scene.board.recorded[-1][0] == "ConfigActivated"


async def test_a_deleted_config_map_leaves_the_active_configuration() -> None:
    async with _open_scene(_text(4)) as scene:
        await scene.client.delete(CONFIG_MAPS, NAMESPACE, NAME)
        await asyncio.sleep(_LIMIT_SECONDS)
        assert scene.slots == 4
        ((reason, message),) = scene.board.recorded
        assert (reason, "does not exist" in message) == ("ConfigRejected", True)


async def test_an_invalid_configuration_at_start_is_recorded_as_an_event_once() -> None:
    async with _open_scene(_text('"x"')) as scene:
        assert [reason for reason, _ in scene.board.recorded] == ["ConfigInvalid"]
        assert scene.slots == 1
        assert scene.shown("config_valid") == ['nodeagent_config_valid{node="node-1"} 0.0']


async def test_without_a_config_map_nothing_is_watched() -> None:
    kube, clock = FakeKube(), LoopClock()
    report = AgentReport(FakeBoard(), Metrics("node-1"))
    client = kube.client
    await ConfigWatch(client, clock, place=(NAMESPACE, None), current=CurrentConfig(), report=report).run()
    assert kube.requests == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_VALUES = st.lists(st.text() | _JSON.map(json.dumps), max_size=3)


@given(edits=st.lists(st.none() | _VALUES, min_size=1, max_size=4))
def test_no_content_of_a_config_map_ends_the_agent(edits: list[list[str] | None]) -> None:
    async def live() -> None:
        client = FakeKube().client
        current, board = CurrentConfig(parse_config(_text(4))), FakeBoard()
        report = AgentReport(board, Metrics("node-1"))
        watch = ConfigWatch(client, LoopClock(), place=(NAMESPACE, NAME), current=current, report=report)
        metadata = {"namespace": NAMESPACE, "name": NAME}
        for values in edits:
            data = {str(index): value for index, value in enumerate(values or [])}
            await watch._update(NAME, None if values is None else only(metadata=metadata, data=data))
            assert current.valid != bool(current.rejected)
            assert current.config.load_concurrency.global_config >= 1

    asyncio.run(live())
