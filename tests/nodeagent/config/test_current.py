"""Which of two documents is active, the settings of exposers that follow from it, and their priority class."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import pytest

from core.kube.resources import CONFIG_MAPS, PRIORITY_CLASSES
from core.models.transfers import DataUpload
from exposer.settings import CacheRule, ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.current import CurrentConfig, LiveConfig, PriorityClass
from nodeagent.config.parse import ParsedConfig, parse_config
from tests.nodeagent.support.own_scene import OwnScene
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


def _document(slots: object) -> ParsedConfig:
    text = '{"loadConcurrency": {"globalConfig": %s}}' % slots  # noqa: UP031 - JSON is full of braces
    return parse_config(text)


def _slots(current: CurrentConfig) -> int:
    return current.config.load_concurrency.global_config


def test_a_valid_edit_is_activated_and_subscribers_are_called() -> None:
    current, calls = CurrentConfig(_document(2)), []
    current.subscribe(lambda: calls.append(_slots(current)))
    assert current.update(_document(3))
    assert calls == [3]
    assert current.valid
    assert not current.update(_document(3))


def test_an_edit_with_an_error_is_rejected_as_a_whole() -> None:
    current = CurrentConfig(_document(2))
    assert current.update(parse_config('{"loadConcurrency": {"globalConfig": "x"}, "priorityClassName": "low"}'))
    (reason,) = current.rejected
    assert "loadConcurrency.globalConfig: expected a whole number" in reason
    assert (_slots(current), current.config.priority_class_name) == (2, "")
    assert not current.valid


def test_an_edit_back_to_the_active_document_is_a_change_without_a_call() -> None:
    current, calls = CurrentConfig(_document(2)), []
    current.subscribe(lambda: calls.append(1))
    current.update(_document("[]"))
    assert current.update(_document(2))
    assert current.valid
    assert calls == []


def test_a_rejection_is_a_change_once() -> None:
    current = CurrentConfig(_document(2))
    assert current.reject(("gone",))
    assert not current.reject(("gone",))
    assert current.reject(("not JSON",))


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


def _object(api_version: str, kind: str, meta: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": meta} | more


def test_an_edit_changes_the_next_settings_and_leaves_the_previous_ones() -> None:
    _, live = _live('{"podLabels": {"a": "before"}}')
    before = live.expose_settings()

    live.current.update(parse_config('{"podLabels": {"a": "after"}, "loadAffinityMode": "any"}'))

    after = live.expose_settings()
    assert (before.pod.labels, before.nodes.any_of) == ({"a": "before"}, False)
    assert (after.pod.labels, after.nodes.any_of) == ({"a": "after"}, True)


def test_the_settings_stay_the_same_object_until_something_changes() -> None:
    _, live = _live()
    before = live.expose_settings()

    live.current.update(parse_config('{"loadAffinityMode": 7}'))

    assert live.expose_settings() is before


def test_movers_that_share_the_agents_account_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    _, live = _live()

    live.current.update(parse_config('{"podLabels": {"a": "b"}}'))

    (warning,) = caplog.messages
    assert warning.startswith("data movers use the agent's own ServiceAccount default, with all its permissions")


def test_an_edit_that_removes_the_movers_account_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    _, live = _live('{"nodeagent.io": {"moverServiceAccount": "movers"}}')
    assert caplog.messages == []

    live.current.update(parse_config("{}"))

    assert live.expose_settings().pod.service_account is None
    assert len(caplog.messages) == 1


async def test_the_priority_class_is_used_only_while_the_cluster_has_it() -> None:
    scene, live = _live('{"priorityClassName": "low"}')
    found = [live.expose_settings().pod.priority_class_name]
    meta = {"name": "low"}
    await live.refresh()
    async with running(live.run(), lead_seconds=1.0):
        await scene.client.create(PRIORITY_CLASSES, _object("scheduling.k8s.io/v1", "PriorityClass", meta, value=10))
        await asyncio.sleep(5)
        found.append(live.expose_settings().pod.priority_class_name)
        live.current.update(parse_config('{"priorityClassName": "other"}'))
        found.append(live.expose_settings().pod.priority_class_name)

    assert found == [None, "low", None]


async def test_the_cache_limit_is_that_of_new_repositories() -> None:
    scene, live = _live(_CACHED)
    before = live.expose_settings()
    meta = {"namespace": "velero", "name": "repository-config"}
    scene.kube.put(_object("v1", CONFIG_MAPS.kind, meta, data={"kopia": '{"cacheLimitMB": 100}'}))

    await live.refresh()

    assert before.cache == CacheRule("fast", 5000)
    assert live.expose_settings().cache == CacheRule("fast", 100)


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


async def test_without_a_class_nothing_is_read() -> None:
    scene = _scene("")
    async with _running(scene):
        assert scene.priority.name is None
        assert scene.usable
    assert scene.kube.requests == []


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
