"""Which document is active: an edit of the ConfigMap within seconds, or it is reported as rejected.

Also the settings of exposers that follow from it, and their priority class.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS, PRIORITY_CLASSES
from core.models.transfers import DataUpload
from exposer.settings import CacheRule, ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.current import ConfigWatch, CurrentConfig, LiveConfig, PriorityClass
from nodeagent.config.parse import ParsedConfig, parse_config
from nodeagent.metrics import Metrics
from nodeagent.runtime.own_pod import AgentReport
from tests.nodeagent.support.board import FakeBoard
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object, only
from tests.support.tasks import running

pytestmark = pytest.mark.looptime

NAMESPACE, NAME = "velero", "agent-config"
_LIMIT_SECONDS = 5.0


@dataclass
class OwnScene:
    """A fake cluster, where one part of an agent is at work with the configuration `current`."""

    current: CurrentConfig
    kube: FakeKube = field(default_factory=FakeKube)
    board: FakeBoard = field(default_factory=FakeBoard)
    metrics: Metrics = field(default_factory=lambda: Metrics("node-1"))

    @classmethod
    def build(cls, parsed: ParsedConfig) -> Self:
        return cls(CurrentConfig(parsed))

    @property
    def client(self) -> KubeClient:
        return self.kube.client

    @property
    def report(self) -> AgentReport:
        return AgentReport(self.board, self.metrics)


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
    await scene.client.create(CONFIG_MAPS, build_object(CONFIG_MAPS, NAME, NAMESPACE, data={"key-0": started_with}))
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
    "invalid value": (
        ['{"loadConcurrency": {"globalConfig": "x"}, "priorityClassName": "low"}'],
        "loadConcurrency.globalConfig: expected a whole number",
    ),
}


@pytest.mark.parametrize(("values", "text"), _INVALID.values(), ids=list(_INVALID))
async def test_an_invalid_edit_is_rejected_and_reported(values: list[str], text: str) -> None:
    async with _open_scene(_text(4)) as scene:
        await scene.edit(*values)
        assert (scene.slots, scene.current.config.priority_class_name) == (4, "")
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
        # It is the active document, also once it is there again.
        await scene.edit('["other"]')
        await scene.edit(_text('"x"'))
        assert [reason for reason, _ in scene.board.recorded[1:]] == ["ConfigRejected", "ConfigActivated"]
        assert not scene.current.valid


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


def test_only_an_active_document_is_a_change_for_subscribers() -> None:
    current, calls = CurrentConfig(parse_config(_text(2))), list[int]()
    current.subscribe(lambda: calls.append(current.config.load_concurrency.global_config))

    def observe(slots: object) -> tuple[bool, bool, list[int]]:
        """Return whether that edit is a change, whether it is valid, and the calls so far."""
        return current.update(parse_config(_text(slots))), current.valid, list(calls)

    found = [observe(slots) for slots in (3, 3, '"x"', '"x"', 3)]
    assert found == [(True, True, [3]), (False, True, [3]), (True, False, [3]), (False, False, [3]), (True, True, [3])]
    assert [current.reject((reason,)) for reason in ("gone", "gone", "not JSON")] == [True, False, True]


def test_only_a_transfer_with_an_owner_has_a_deadline_without_configuration() -> None:
    owner = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "b", "uid": "u"}
    uploads = [DataUpload.parse(data_upload(ownerReferences=owners)) for owners in ([owner], [])]
    current = CurrentConfig()
    before = [current.retry_rules(each).deadline for each in uploads]
    current.update(parse_config('{"nodeagent.io": {"retry": {"deadline": "1h"}}}'))
    assert before == [timedelta(hours=4), None]
    assert [current.retry_rules(each).deadline for each in uploads] == [timedelta(hours=1)] * 2


_CACHED = '{"cachePVC": {"storageClass": "fast"}}'


def _live(text: str = "{}") -> tuple[OwnScene, LiveConfig]:
    scene = OwnScene.build(parse_config(text))
    live = LiveConfig(
        scene.client,
        LoopClock(),
        place=("velero", None),
        repository_config_map="repository-config",
        parsed=parse_config(text),
        expose_defaults=ExposeSettings(AgentTemplate("mover:1")),
        report=scene.report,
    )
    return scene, live


def test_an_edit_changes_the_next_settings_and_leaves_the_previous_ones() -> None:
    _, live = _live('{"podLabels": {"a": "before"}}')
    before = live.expose_settings()
    live.current.update(parse_config('{"podLabels": {"a": "before"}, "loadAffinityMode": 7}'))
    assert live.expose_settings() is before
    live.current.update(parse_config('{"podLabels": {"a": "after"}, "loadAffinityMode": "any"}'))
    after = live.expose_settings()
    assert (before.pod.labels, before.nodes.any_of) == ({"a": "before"}, False)
    assert (after.pod.labels, after.nodes.any_of) == ({"a": "after"}, True)


def test_movers_that_share_the_agents_account_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    _, live = _live('{"nodeagent.io": {"moverServiceAccount": "movers"}}')
    assert caplog.messages == []
    for document in ("{}", '{"podLabels": {"a": "b"}}'):
        live.current.update(parse_config(document))
    assert live.expose_settings().pod.service_account is None
    (warning,) = caplog.messages
    assert warning.startswith("data movers use the agent's own ServiceAccount default, with all its permissions")


async def test_the_priority_class_is_used_only_while_the_cluster_has_it() -> None:
    scene, live = _live('{"priorityClassName": "low"}')
    found = [live.expose_settings().pod.priority_class_name]
    async with running(live.run(), lead_seconds=1.0):
        await scene.client.create(PRIORITY_CLASSES, build_object(PRIORITY_CLASSES, "low", value=10))
        await asyncio.sleep(5)
        found.append(live.expose_settings().pod.priority_class_name)
        live.current.update(parse_config('{"priorityClassName": "other"}'))
        found.append(live.expose_settings().pod.priority_class_name)
    assert found == [None, "low", None]


async def test_the_cache_limit_is_that_of_new_repositories() -> None:
    scene, live = _live(_CACHED)
    before = live.expose_settings()
    data = {"kopia": '{"cacheLimitMB": 100}'}
    scene.kube.put(build_object(CONFIG_MAPS, "repository-config", "velero", data=data))
    await live.refresh()
    assert before.cache == CacheRule("fast", 5000)
    assert live.expose_settings().cache == CacheRule("fast", 100)


@dataclass
class _PriorityScene(OwnScene):
    def __post_init__(self) -> None:
        self.priority = PriorityClass(self.client, LoopClock(), current=self.current, report=self.report)

    async def create(self, name: str) -> None:
        await self.client.create(PRIORITY_CLASSES, build_object(PRIORITY_CLASSES, name, value=10))

    async def configure(self, name: str) -> None:
        self.current.update(_named(name))
        await asyncio.sleep(_LIMIT_SECONDS)

    @property
    def usable(self) -> bool:
        return 'nodeagent_priority_class_usable{node="node-1"} 1.0' in self.metrics.render().decode()


def _named(name: str) -> ParsedConfig:
    return parse_config('{"priorityClassName": "%s"}' % name)  # noqa: UP031 - JSON is full of braces


@asynccontextmanager
async def _running(scene: _PriorityScene) -> AsyncIterator[None]:
    await scene.priority.refresh()
    async with running(scene.priority.run(), lead_seconds=_LIMIT_SECONDS):
        yield


def _scene(name: str = "low") -> _PriorityScene:
    return _PriorityScene.build(_named(name))


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
        await scene.client.delete(PRIORITY_CLASSES, "", "low")
        await asyncio.sleep(_LIMIT_SECONDS)
        assert scene.priority.name is None
        assert scene.board.reasons[2:] == ["PriorityClassMissing"]


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
