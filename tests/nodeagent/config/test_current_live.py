"""The settings of exposers are rebuilt when the configuration, the priority class or the cache limit changes."""

import asyncio
from typing import Any

import pytest

from core.kube.resources import CONFIG_MAPS, PRIORITY_CLASSES
from exposer.settings import CacheRule, ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.current import ConfigSources, InitialConfig, LiveConfig
from nodeagent.config.parse import parse_config
from tests.nodeagent.support.own_scene import OwnScene, running
from tests.support.clock import LoopClock

_CACHED = '{"cachePVC": {"storageClass": "fast"}}'


def _live(text: str = "{}") -> tuple[OwnScene, LiveConfig]:
    scene = OwnScene.build(parse_config(text))
    initial = InitialConfig(parse_config(text), ExposeSettings(AgentTemplate("mover:1")))
    sources = ConfigSources("velero", agent=None, repositories="repository-config")
    return scene, LiveConfig(scene.client, LoopClock(), sources=sources, initial=initial, report=scene.report)


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


@pytest.mark.looptime
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
        live.current.update(parse_config('{"priorityClassName": "low"}'))
        await asyncio.sleep(5)
        found.append(live.expose_settings().pod.priority_class_name)
        await scene.client.delete(PRIORITY_CLASSES, "", "low")
        await asyncio.sleep(5)
        found.append(live.expose_settings().pod.priority_class_name)

    assert found == [None, "low", None, "low", None]


async def test_the_cache_limit_is_that_of_new_repositories() -> None:
    scene, live = _live(_CACHED)
    before = live.expose_settings()
    meta = {"namespace": "velero", "name": "repository-config"}
    scene.kube.put(_object("v1", CONFIG_MAPS.kind, meta, data={"kopia": '{"cacheLimitMB": 100}'}))

    await live.refresh()

    assert before.cache == CacheRule("fast", 5000)
    assert live.expose_settings().cache == CacheRule("fast", 100)
