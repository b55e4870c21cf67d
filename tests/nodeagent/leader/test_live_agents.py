"""Agents announce their configuration, and the leader compares; a node where transfers failed is passed over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.kube.resources import EVENTS
from core.models.names import (
    BLOCK_DATA_MOVER,
    CONFIG_ANNOTATION,
    FEATURES_ANNOTATION,
    NO_CONFIG,
    NODE_LABEL,
    NOT_PREPARED_ANNOTATION,
    RESTORE_IN_PLACE,
)
from core.models.phases import Phase
from core.models.reasons import NotPrepared
from nodeagent.config.current import ConfigAnnouncer, CurrentConfig
from nodeagent.config.parse import parse_config
from nodeagent.leader.live_agents import LiveAgents, NodeBackoff, choose_node, compare_configs, describe_difference
from tests.nodeagent.support.board import FakeBoard
from tests.nodeagent.support.dispatching import agent_pod, entry, open_scene
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def _comparing(active: dict[str, str]) -> AsyncIterator[FakeBoard]:
    board = FakeBoard()
    async with running(compare_configs(LoopClock(), board, lambda: active)):
        yield board


@asynccontextmanager
async def _observing(kube: FakeKube) -> AsyncIterator[LiveAgents]:
    clock = LoopClock()
    agents = LiveAgents(kube.client, clock, namespace="velero", on_change=lambda: None)
    async with running(agents.informer.run()):
        await agents.informer.synced.wait()
        yield agents


async def test_different_configurations_are_reported_after_a_minute_and_once() -> None:
    active = {"node-1": "aaa", "node-2": "bbb", "node-3": "aaa"}
    async with _comparing(active) as board:
        await asyncio.sleep(55)
        # An edit that is being rolled out is not reported.
        active["node-1"] = active["node-3"] = "bbb"
        await asyncio.sleep(30)
        active["node-1"] = active["node-3"] = "aaa"
        await asyncio.sleep(55)
        assert board.recorded == []
        await asyncio.sleep(600)
        ((reason, message),) = board.recorded
        assert reason == "ConfigsDiffer"
        assert "bbb on 1 (node-2), aaa on 2 (node-1, node-3)" in message
        active["node-2"] = "aaa"
        await asyncio.sleep(60)
        assert board.reasons == ["ConfigsDiffer", "ConfigsAgree"]


@pytest.mark.parametrize("active", [{}, {"a": "x"}, {"a": "x", "b": "x"}], ids=["no agent", "one", "all alike"])
def test_agents_that_agree_are_not_reported(active: dict[str, str]) -> None:
    assert describe_difference(active) is None


def test_many_nodes_are_reported_by_number() -> None:
    difference = describe_difference({f"node-{index}": "aaa" for index in range(5)} | {"other": "bbb"})
    assert "aaa on 5 (node-0, node-1, node-2 and 2 more)" in (difference or "")


async def test_an_agent_announces_each_configuration_once_and_retries(caplog: pytest.LogCaptureFixture) -> None:
    current, board = CurrentConfig(), FakeBoard(broken=2)
    features = {FEATURES_ANNOTATION: f"{RESTORE_IN_PLACE} {BLOCK_DATA_MOVER}"}
    async with running(ConfigAnnouncer(board, current).run(), lead_seconds=100):
        assert board.annotations == [{CONFIG_ANNOTATION: NO_CONFIG} | features]
        assert caplog.text.count("gets no transfers, will retry") == 1
        current.update(parse_config("{}"))
        await asyncio.sleep(100)
        assert board.annotations[1:] == [{CONFIG_ANNOTATION: current.digest} | features]


async def test_an_agent_that_was_back_in_between_is_unavailable_from_its_last_loss_on() -> None:
    kube = FakeKube()
    kube.put(agent_pod("a", ready=False))
    async with _observing(kube) as agents:
        assert agents.seconds_unavailable("a") == 0.0
        for _ in range(20):
            await asyncio.sleep(5)
            seconds = agents.seconds_unavailable("a")
        assert seconds == pytest.approx(100)
        # It is not asked for while it is back.
        for ready in (True, False):
            kube.put(agent_pod("a", ready=ready))
            await asyncio.sleep(1)
        assert agents.seconds_unavailable("a") == 0.0
        await asyncio.sleep(10)
        agents.retain({"b"})
        assert agents.seconds_unavailable("a") == 0.0


async def test_no_time_counts_against_an_agent_in_which_this_process_was_frozen_or_saw_no_pods() -> None:
    kube = FakeKube()
    kube.put(agent_pod("a", ready=False))
    async with _observing(kube) as agents:
        assert agents.seconds_unavailable("a") == 0.0
        await asyncio.sleep(3600)
        frozen = agents.seconds_unavailable("a")
        assert 0.0 < frozen < 30.0
    agents.informer._state.close(None)
    for _ in range(100):
        await asyncio.sleep(5)
        assert agents.seconds_unavailable("a") == frozen


async def test_what_agents_announce_is_read_from_their_pods() -> None:
    kube = FakeKube()
    ending: JsonDict = {"deletionTimestamp": "2026-11-21T12:00:00Z", "finalizers": ["x/y"]}
    for node, config, features in (
        ("a", "abc", "other restore-in-place"),
        ("b", "def", "restore-in-place-not"),
        ("c", "abc", ""),
    ):
        kube.put(agent_pod(node, annotations={CONFIG_ANNOTATION: config, FEATURES_ANNOTATION: features}))
    kube.put(agent_pod("starting", ready=False))
    kube.put(agent_pod("ending", **ending))
    kube.put(agent_pod("win", annotations={}))
    kube.put(agent_pod("rolled", annotations={}, **ending))
    async with _observing(kube) as agents:
        assert agents.configs() == {"a": "abc", "b": "def", "c": "abc"}
        assert dict(agents.nodes(RESTORE_IN_PLACE)) == {"a": "a"}
        # Agents of Velero get no transfers, and are known until they end.
        assert (set(agents.nodes()), agents.velero_nodes()) == ({"a", "b", "c"}, {"win", "rolled"})
        # The roll-over has replaced it, and the new one has announced its configuration.
        kube.put(agent_pod("rolled"))
        await asyncio.sleep(1)
        assert (set(agents.nodes()), agents.velero_nodes()) == ({"a", "b", "c", "rolled"}, {"win"})


AGENTS = {"a": "node-a", "b": "node-b", "skewed": "node-skewed"}
OWN = None


def end(backoff: NodeBackoff, *causes: str | None, phase: Phase = Phase.FAILED, node: str = "skewed") -> None:
    """Let transfers of a node leave Accepted one after the other."""
    for number, cause in enumerate(causes):
        backoff.observe(entry(str(number), phase=Phase.ACCEPTED, node_label=node))
        backoff.observe(entry(str(number), phase=phase, node_label=node, not_prepared=cause and NotPrepared(cause)))


def chosen(backoff: NodeBackoff, agents: dict[str, str] | None = None) -> str | None:
    return choose_node(agents or AGENTS, {"a": 3, "b": 3, "skewed": 0}, backoff.labels())


def test_a_node_is_passed_over_after_three_failures_while_there_are_others() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, "OperationTimeout", "OperationTimeout")
    assert chosen(backoff) == "skewed"
    end(backoff, "MoverLost")
    assert chosen(backoff) == "a"
    assert chosen(backoff, {"skewed": "node-skewed"}) == "skewed"
    assert backoff.report(AGENTS) == [{"node": "node-skewed", "failures": 3, "cause": "MoverLost", "seconds": 300}]
    ((label, message),) = backoff.take_news()
    assert (label, backoff.take_news()) == ("skewed", [])
    assert message == (
        "other nodes are preferred for 5m0s: the last 3 transfers of this node failed before Prepared, "
        "the last one because of MoverLost"
    )


@pytest.mark.parametrize(
    ("causes", "phase"),
    [
        pytest.param(["OperationTimeout", OWN, "OperationTimeout"], Phase.FAILED, id="a fault of its own"),
        pytest.param([OWN, OWN, OWN], Phase.CANCELED, id="canceled"),
    ],
)
def test_other_ends_do_not_count(causes: list[str | None], phase: Phase) -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *causes, phase=phase)
    assert chosen(backoff) == "skewed"
    end(backoff, "OperationTimeout")
    assert chosen(backoff) == ("a" if phase is Phase.FAILED else "skewed")


@pytest.mark.parametrize("phase", [Phase.PREPARED, Phase.IN_PROGRESS, Phase.COMPLETED])
def test_one_transfer_that_becomes_prepared_ends_it(phase: Phase) -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["PrepareTimeout"] * 3)
    end(backoff, OWN, phase=phase)
    assert chosen(backoff) == "skewed"
    end(backoff, *["PrepareTimeout"] * 2)
    assert chosen(backoff) == "skewed"


def test_the_pause_doubles_up_to_an_hour() -> None:
    clock = HandClock()
    backoff = NodeBackoff(clock)
    end(backoff, *["OperationTimeout"] * 3)
    pauses = []
    for _ in range(6):
        began = clock.seconds
        # What was accepted before does not make it longer.
        end(backoff, *["OperationTimeout"] * 2)
        while backoff.labels():
            clock.seconds += 60
        pauses.append((clock.seconds - began) / 60)
        assert chosen(backoff) == "skewed"
        end(backoff, "OperationTimeout")
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_only_accepted_transfers_and_live_agents_are_remembered() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["OperationTimeout"] * 3)
    for number in range(10):
        backoff.observe(entry(f"gone-{number}", phase=Phase.ACCEPTED, node_label="a"))
    kept = entry("kept", phase=Phase.ACCEPTED, node_label="a")
    backoff.observe(kept)
    backoff.retain([kept, entry("new")], AGENTS.keys())
    assert (backoff._accepted, list(backoff._nodes)) == ({kept.uid: "a"}, ["skewed"])
    backoff.retain([], {"a", "b"})
    assert (backoff._accepted, backoff._nodes) == ({}, {})


def test_a_transfer_counts_for_the_node_that_it_was_accepted_for() -> None:
    backoff = NodeBackoff(HandClock())
    end(backoff, *["OperationTimeout"] * 2)
    for label in ("a", "skewed"):
        backoff.observe(entry("moved", phase=Phase.ACCEPTED, node_label=label))
    backoff.observe(entry("moved", phase=Phase.FAILED, not_prepared=NotPrepared.OPERATION_TIMEOUT))
    assert backoff.labels() == {"skewed"}


async def test_the_leader_accepts_transfers_for_other_nodes_and_says_so() -> None:
    scene = open_scene("node-a", "node-b", limit=None)
    for number in range(3):
        scene.add(f"early-{number}", status={"phase": "Accepted"}, labels={NODE_LABEL: "node-a"})
    async with scene.dispatching() as dispatcher:
        await asyncio.sleep(5)
        for number in range(3):
            cr = scene.transfer(f"early-{number}")
            cr["metadata"]["annotations"] = {NOT_PREPARED_ANNOTATION: "OperationTimeout"}
            scene.kube.put(cr | {"status": {"phase": "Failed", "message": "timed out"}})
        names = [f"later-{number}" for number in range(4)]
        for name in names:
            scene.add(name)
        await scene.until(lambda: [scene.label(name) for name in names] == ["node-b"] * 4, seconds=20)
        (shown,) = dispatcher.report()["passedOver"]
        assert (shown["node"], shown["failures"], shown["cause"]) == ("node-a", 3, "OperationTimeout")
        events = [event for event in scene.kube.objects(EVENTS) if event["reason"] == "NodePassedOver"]
        assert [(event["type"], event["involvedObject"]["name"]) for event in events] == [
            ("Warning", "node-agent-node-a")
        ]
        assert 'nodeagent_node_passed_over{node="node-a",passed_over="node-a"} 1.0' in scene.metrics.render().decode()
        scene.kube.put(scene.transfer("later-0") | {"status": {"phase": "Prepared"}})
        await asyncio.sleep(300)
        await scene.until(lambda: dispatcher.report()["passedOver"] == [], seconds=70)
        await scene.until(lambda: "node_passed_over{" not in scene.metrics.render().decode(), seconds=70)
