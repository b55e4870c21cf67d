"""Which of two documents is active, and the settings of exposers that follow from it."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from core.kube.resources import CONFIG_MAPS, PRIORITY_CLASSES
from core.models.transfers import DataUpload
from exposer.settings import CacheRule, ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.current import CurrentConfig, LiveConfig
from nodeagent.config.parse import ParsedConfig, parse_config
from tests.nodeagent.support.own_scene import OwnScene
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.tasks import running


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


def test_the_same_document_is_no_change() -> None:
    current = CurrentConfig(_document(2))
    assert not current.update(_document(2))


def test_errors_at_start_are_no_edit() -> None:
    current = CurrentConfig(_document('"x"'))
    assert not current.update(_document('"x"'))
    assert not current.valid
    assert current.rejected == ()


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

    assert found == [None, "low", None]


async def test_the_cache_limit_is_that_of_new_repositories() -> None:
    scene, live = _live(_CACHED)
    before = live.expose_settings()
    meta = {"namespace": "velero", "name": "repository-config"}
    scene.kube.put(_object("v1", CONFIG_MAPS.kind, meta, data={"kopia": '{"cacheLimitMB": 100}'}))

    await live.refresh()

    assert before.cache == CacheRule("fast", 5000)
    assert live.expose_settings().cache == CacheRule("fast", 100)
