"""Agents announce their active configuration, and the leader compares."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.names import BLOCK_DATA_MOVER, CONFIG_ANNOTATION, FEATURES_ANNOTATION, NO_CONFIG, RESTORE_IN_PLACE
from nodeagent.config.current import ConfigAnnouncer, CurrentConfig
from nodeagent.config.parse import parse_config
from nodeagent.leader.live_agents import ConfigAgreement, LiveAgents, describe_difference
from tests.nodeagent.support.board import FakeBoard
from tests.nodeagent.support.dispatching import agent_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.tasks import running


@asynccontextmanager
async def _comparing(active: dict[str, str]) -> AsyncIterator[FakeBoard]:
    board = FakeBoard()
    async with running(ConfigAgreement(LoopClock(), board).run(lambda: active)):
        yield board


@asynccontextmanager
async def _observing(kube: FakeKube) -> AsyncIterator[LiveAgents]:
    clock = LoopClock()
    agents = LiveAgents(KubeClient(kube, Retry(clock)), clock, namespace="velero", on_change=lambda: None)
    async with running(agents.run()):
        await agents.wait_synced()
        yield agents


@pytest.mark.looptime
async def test_different_configurations_are_reported_after_a_minute_and_once() -> None:
    active = {"node-1": "aaa", "node-2": "bbb", "node-3": "aaa"}
    async with _comparing(active) as board:
        await asyncio.sleep(55)
        assert board.recorded == []
        await asyncio.sleep(600)
        ((reason, message),) = board.recorded
        assert reason == "ConfigsDiffer"
        assert "bbb on 1 (node-2), aaa on 2 (node-1, node-3)" in message
        active["node-2"] = "aaa"
        await asyncio.sleep(60)
        assert board.reasons == ["ConfigsDiffer", "ConfigsAgree"]


@pytest.mark.looptime
async def test_an_edit_that_is_being_rolled_out_is_not_reported() -> None:
    active = {"node-1": "aaa", "node-2": "aaa"}
    async with _comparing(active) as board:
        for digest in ("bbb", "ccc", "ddd"):
            active["node-1"] = digest
            await asyncio.sleep(30)
            active["node-2"] = digest
            await asyncio.sleep(30)
        assert board.recorded == []


@pytest.mark.parametrize("active", [{}, {"a": "x"}, {"a": "x", "b": "x"}], ids=["no agent", "one", "all alike"])
def test_agents_that_agree_are_not_reported(active: dict[str, str]) -> None:
    assert describe_difference(active) is None


def test_many_nodes_are_reported_by_number() -> None:
    difference = describe_difference({f"node-{index}": "aaa" for index in range(5)} | {"other": "bbb"})
    assert "aaa on 5 (node-0, node-1, node-2, …)" in (difference or "")


@pytest.mark.looptime
async def test_an_agent_announces_each_configuration_once_and_retries_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    current, board = CurrentConfig(), FakeBoard(broken=2)
    features = {FEATURES_ANNOTATION: f"{RESTORE_IN_PLACE} {BLOCK_DATA_MOVER}"}
    async with running(ConfigAnnouncer(board, current).run(), lead_seconds=100):
        assert board.annotations == [{CONFIG_ANNOTATION: NO_CONFIG} | features]
        assert caplog.text.count("gets no transfers, will retry") == 1
        current.update(parse_config("{}"))
        await asyncio.sleep(100)
        assert board.annotations[1:] == [{CONFIG_ANNOTATION: current.digest} | features]


@pytest.mark.looptime
async def test_configurations_of_live_agents_are_read_from_their_pods() -> None:
    kube = FakeKube()
    for node, annotations in (("a", {CONFIG_ANNOTATION: "abc"}), ("b", {CONFIG_ANNOTATION: "def"}), ("d", {})):
        kube.put(agent_pod(node, annotations=annotations))
    kube.put(agent_pod("c", ready=False))
    async with _observing(kube) as agents:
        assert agents.configs() == {"a": "abc", "b": "def"}
        kube.put(agent_pod("b"))
        await asyncio.sleep(1)
        assert agents.configs() == {"a": "abc", "b": "abc"}


@pytest.mark.looptime
async def test_only_agents_that_announce_a_feature_have_it() -> None:
    kube = FakeKube()
    for node, features in (("a", "other restore-in-place"), ("b", "restore-in-place-not"), ("c", "")):
        kube.put(agent_pod(node, annotations={CONFIG_ANNOTATION: "abc", FEATURES_ANNOTATION: features}))
    async with _observing(kube) as agents:
        assert dict(agents.nodes(RESTORE_IN_PLACE)) == {"a": "a"}
        assert set(agents.nodes()) == {"a", "b", "c"}


@pytest.mark.looptime
async def test_an_agent_that_was_back_in_between_is_unavailable_from_its_last_loss_on() -> None:
    kube = FakeKube()
    kube.put(agent_pod("a", ready=False))
    async with _observing(kube) as agents:
        assert agents.seconds_unavailable("a") == 0.0
        await asyncio.sleep(100)
        assert agents.seconds_unavailable("a") == pytest.approx(100)
        # It is not asked for while it is back.
        for ready in (True, False):
            kube.put(agent_pod("a", ready=ready))
            await asyncio.sleep(1)
        assert agents.seconds_unavailable("a") == 0.0
        await asyncio.sleep(10)
        agents.retain({"b"})
        assert agents.seconds_unavailable("a") == 0.0


@pytest.mark.looptime
async def test_agents_of_velero_get_no_transfers_and_are_known_until_they_end() -> None:
    kube = FakeKube()
    kube.put(agent_pod("a"))
    kube.put(agent_pod("win", annotations={}))
    rolled = agent_pod("rolled", annotations={}, deletionTimestamp="2026-11-21T12:00:00Z", finalizers=["x/y"])
    kube.put(rolled)
    async with _observing(kube) as agents:
        assert (set(agents.nodes()), agents.velero_nodes()) == ({"a"}, {"win", "rolled"})
        # The roll-over has replaced it, and the new one has announced its configuration.
        kube.put(agent_pod("rolled"))
        await asyncio.sleep(1)
        assert (set(agents.nodes()), agents.velero_nodes()) == ({"a", "rolled"}, {"win"})
