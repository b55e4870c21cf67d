"""A whole agent, built as `serve` builds it, follows its ConfigMap, and returns free memory."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from core.kube.resources import CONFIG_MAPS, EVENTS, NODES, PODS, PRIORITY_CLASSES
from core.models.names import BLOCK_DATA_MOVER, CONFIG_ANNOTATION, FEATURES_ANNOTATION, RESTORE_IN_PLACE
from exposer.template import AgentTemplate
from nodeagent.app import Agent, MemoryTrimmer, build_agent, find_trim
from nodeagent.config.parse import parse_config
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentSpec
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object
from tests.support.tasks import running

pytestmark = pytest.mark.looptime

_NAMESPACE, _NODE, _NAME = "velero", "node-1", "agent-config"
_PROMISED_SECONDS = 5


@asynccontextmanager
async def _running(kube: FakeKube, document: dict[str, Any]) -> AsyncIterator[Agent]:
    text = json.dumps(document)
    kube.put(build_object(CONFIG_MAPS, _NAME, _NAMESPACE, data={"any.json": text}))
    kube.put(build_object(NODES, _NODE, metadata={"labels": {"pool": "backup"}}))
    own, name = {"labels": {"role": "node-agent"}}, socket.gethostname().lower()
    kube.put(build_object(PODS, name, _NAMESPACE, metadata=own, spec={"nodeName": _NODE}))
    settings = Settings(_NODE, namespace=_NAMESPACE, config_map_name=_NAME)
    clock = LoopClock()
    spec = AgentSpec(settings, _NAMESPACE, parse_config(text), AgentTemplate("mover:1"))
    agent = build_agent(kube.client, clock, spec)
    async with running(agent.run(), lead_seconds=_PROMISED_SECONDS):
        yield agent


async def _edit(kube: FakeKube, document: dict[str, Any]) -> None:
    client = kube.client
    await client.patch(CONFIG_MAPS, _NAMESPACE, _NAME, {"data": {"any.json": json.dumps(document)}})
    await asyncio.sleep(_PROMISED_SECONDS)


def _slots(agent: Agent) -> str:
    lines = agent.parts.metrics.render().decode().splitlines()
    return next(line.rpartition(" ")[2] for line in lines if line.startswith("nodeagent_slots") and '"total"' in line)


async def test_an_edit_reaches_slots_status_metrics_and_the_agents_pod() -> None:
    kube = FakeKube()
    kube.put(build_object(PRIORITY_CLASSES, "low", value=10))
    async with _running(kube, {"loadConcurrency": {"globalConfig": 2}}) as agent:
        assert _slots(agent) == "2.0"
        rules = [{"nodeSelector": {"matchLabels": {"pool": "backup"}}, "number": 7}]
        await _edit(kube, {"loadConcurrency": {"perNodeConfig": rules}, "priorityClassName": "low"})
        config = agent.report()["config"]
        assert _slots(agent) == "7.0"
        assert (config["valid"], config["priorityClassName"]) == (True, "low")
        (pod,) = kube.objects(PODS)
        announced = {CONFIG_ANNOTATION: config["hash"], FEATURES_ANNOTATION: f"{RESTORE_IN_PLACE} {BLOCK_DATA_MOVER}"}
        assert pod["metadata"]["annotations"] == announced
        assert [event["reason"] for event in kube.objects(EVENTS)] == ["ConfigActivated"]
        await _edit(kube, {"loadConcurrency": {"globalConfig": -1}})
        assert _slots(agent) == "7.0"
        rejected = agent.report()["config"]
        assert (rejected["hash"], rejected["valid"]) == (config["hash"], False)
        assert "loadConcurrency.globalConfig" in rejected["rejected"][0]
        # It accepts transfers with the configuration that was valid before.
        assert agent.node.not_ready() == []


@pytest.mark.parametrize(
    ("error", "shown"),
    [(None, "Landlock ABI 3"), (OSError(38, "Function not implemented"), "a chroot jail, no Landlock (Function not")],
    ids=["landlock", "jail"],
)
async def test_the_status_names_what_confines_kopia(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None, shown: str
) -> None:
    monkeypatch.setattr("nodeagent.app.landlock_abi", Mock(return_value=3, side_effect=error))
    async with _running(FakeKube(), {}) as agent:
        assert agent.report()["confinement"].startswith(shown)


@asynccontextmanager
async def keeping() -> AsyncIterator[tuple[MemoryTrimmer, list[float]]]:
    """Run a trimmer; yield it and the times at which it returned memory."""
    clock = LoopClock()
    began, times = clock.monotonic(), list[float]()
    keeper = MemoryTrimmer(clock, lambda: times.append(clock.monotonic() - began))
    async with running(keeper.run()):
        yield keeper, times


async def test_memory_is_returned_after_the_last_request_and_after_its_connections_closed() -> None:
    async with keeping() as (keeper, times):
        await asyncio.sleep(1000)
        assert times == []
        keeper.record_request()
        await asyncio.sleep(1000)
    assert times == pytest.approx([1010, 1020])


async def test_memory_is_returned_during_a_burst() -> None:
    async with keeping() as (keeper, times):
        for _ in range(60):
            keeper.record_request()
            await asyncio.sleep(1)
        worked_until = 59
        await asyncio.sleep(1000)
    assert len(times) <= 9
    assert [at for at in times if at < worked_until] == pytest.approx([10, 20, 30, 40, 50])
    assert times[-1] >= worked_until + 15


def test_the_c_library_of_this_platform_is_supported() -> None:
    find_trim()()
